"""A compiled layer sees its own part of a cache.

That layers share one graph so, and decode as the trainer computes, is tested with the
examples' sampling (`tests/examples/test_decode.py`).
"""

import pytest
import torch
import transformers as tf
from test_rollout import tiny_llama

from jetrl_compile.errors import ModelError
from jetrl_compile.examples.sampling import cache_argument
from jetrl_compile.layers import compile_layers


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_cache_without_a_part_for_the_layer_is_told() -> None:
    model = tiny_llama().to(torch.bfloat16)
    compile_layers(model, lowering="aot")
    with pytest.raises(ModelError, match=r"none for layer 0; make it with its config"):
        model(
            input_ids=torch.ones(1, 2, dtype=torch.int64),
            **{cache_argument(model): tf.DynamicCache()},
        )


@pytest.mark.usefixtures("fresh_dynamo")
def test_layer_indices_are_kept() -> None:
    model = tiny_llama().to(torch.bfloat16)
    compile_layers(model, lowering="aot", phase="rollout")
    with torch.no_grad():
        cache = tf.DynamicCache(config=model.config)
        model(
            input_ids=torch.ones(1, 2, dtype=torch.int64),
            **{cache_argument(model): cache},
        )
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1]
    assert cache.get_seq_length() == 2
