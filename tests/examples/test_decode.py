from typing import Any

import pytest
import torch
import transformers as tf

from jetrl_compile.examples.attention import use_reference_attention
from jetrl_compile.examples.sampling import left_pad, sample, token_log_probs
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
    graph = reports[0].graph
    assert graph.by_name["model.layers.0.self_attn:attention"].kind == "attention"
    assert not graph.unknown()
    compile_layers(model, phase="train", **options)
    with torch.no_grad():
        log_probs = token_log_probs(
            model, rollouts.tokens, rollouts.attention_mask, rollouts.response_mask
        )
    assert torch.equal(log_probs, rollouts.log_probs)
