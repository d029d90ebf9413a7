from typing import Any

import pytest
import torch
import transformers as tf

from jetrl_compile.errors import ModelError
from jetrl_compile.examples.attention import use_reference_attention
from jetrl_compile.examples.sampling import (
    cache_argument,
    left_pad,
    sample,
    token_log_probs,
)
from jetrl_compile.layers import compile_layers
from jetrl_compile.pipeline import CompileReport
from jetrl_compile.rollout import make_rollout_model

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 160,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny() -> Any:
    torch.manual_seed(0)
    config = tf.LlamaConfig(**SIZES, initializer_range=0.1)
    untyped: Any = tf.AutoModelForCausalLM
    model = untyped.from_config(config, dtype=torch.bfloat16)
    use_reference_attention(model)
    return model


@pytest.mark.usefixtures("fresh_dynamo")
def test_decode_with_shared_graphs_equals_the_trainer_s_forward() -> None:
    model = tiny()
    reports: list[CompileReport] = []
    options: dict[str, Any] = {"lowering": "aot", "report": reports.append}
    rollout: Any = make_rollout_model(model)
    compile_layers(rollout, phase="rollout", **options)
    tokens, mask = left_pad([[5, 6, 7, 8, 9], [10, 11]], pad=0)
    for seed in range(2):
        rollouts = sample(
            rollout,
            tokens,
            mask,
            max_new_tokens=6 + seed,
            stop=[2],
            pad=0,
            samples=3,
            generator=torch.Generator().manual_seed(seed),
        )
    # An empty cache, a filled one, and one that was just repeated; not 3 layers' each.
    assert len(reports) <= 3
    compile_layers(model, phase="train", **options)
    with torch.no_grad():
        log_probs = token_log_probs(
            model, rollouts.tokens, rollouts.attention_mask, rollouts.response_mask
        )
    assert torch.equal(log_probs, rollouts.log_probs)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_cache_without_a_part_for_the_layer_is_told() -> None:
    model = tiny()
    compile_layers(model, lowering="aot")
    with pytest.raises(ModelError, match=r"none for layer 0; make it with its config"):
        model(
            input_ids=torch.ones(1, 2, dtype=torch.int64),
            **{cache_argument(model): tf.DynamicCache()},
        )


@pytest.mark.usefixtures("fresh_dynamo")
def test_layer_indices_are_kept() -> None:
    model = tiny()
    compile_layers(model, lowering="aot", phase="rollout")
    with torch.no_grad():
        cache = tf.DynamicCache(config=model.config)
        model(
            input_ids=torch.ones(1, 2, dtype=torch.int64),
            **{cache_argument(model): cache},
        )
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2]
    assert cache.get_seq_length() == 2
