"""Many architectures: nothing is dropped, nothing crashes, the unknown is reported."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers as tf
from graph_coverage import uncovered
from graph_levels import Levels, levels_of
from tiny_models import tokens

from jetrl_compile.containment import check_containment
from jetrl_compile.graph_builder import build_precision_graph
from jetrl_compile.precision_graph import PrecisionGraph

_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_EAGER: dict[str, Any] = {**_SIZES, "attn_implementation": "eager"}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
_MLA: dict[str, Any] = {
    **_SIZES,
    **_EXPERTS,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
}
_NEXT: dict[str, Any] = {
    "head_dim": 64,
    "num_experts": 4,
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
}
_GPTJ: dict[str, Any] = {
    "vocab_size": 320,
    "n_embd": 128,
    "n_layer": 1,
    "n_head": 2,
    "rotary_dim": 32,
}
_FALCON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_NEOX = {k: v for k, v in _SIZES.items() if k != "num_key_value_heads"}

ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "eager": lambda: tf.LlamaConfig(**_EAGER),
    "sliding_window_eager": lambda: tf.Gemma3TextConfig(
        **_EAGER, head_dim=64, sliding_window=8
    ),
    "sliding_window": lambda: tf.MistralConfig(**_SIZES, sliding_window=8),
    "fused_weights": lambda: tf.Phi3Config(**_SIZES),
    "partial_rotary_parallel": lambda: tf.GPTNeoXConfig(**_NEOX),
    "partial_rotary_interleaved": lambda: tf.GlmConfig(**_SIZES, head_dim=64),
    "interleaved": lambda: tf.GPTJConfig(**_GPTJ, bos_token_id=0, eos_token_id=1),
    "complex_rotary": lambda: tf.Llama4TextConfig(
        **_SIZES, intermediate_size_mlp=192, num_local_experts=4, head_dim=64
    ),
    "parallel_residual": lambda: tf.FalconConfig(**_FALCON, bias=False),
    "mixtral": lambda: tf.MixtralConfig(**_SIZES, num_local_experts=4),
    "shared_expert": lambda: tf.Qwen2MoeConfig(
        **_SIZES, **_EXPERTS, num_experts=4, shared_expert_intermediate_size=64
    ),
    "mla_group_topk": lambda: tf.DeepseekV3Config(**_MLA),
    "sinks": lambda: tf.GptOssConfig(
        **_SIZES, head_dim=64, num_local_experts=4, num_experts_per_tok=2
    ),
    "linear_attention": lambda: tf.Qwen3NextConfig(
        **{**_SIZES, **_EXPERTS, **_NEXT, "num_hidden_layers": 2}
    ),
}
# Dynamo's graph has operators here that AOTAutograd decomposes.
DECOMPOSED = {"parallel_residual", "sinks", "linear_attention"}
UNKNOWN = {"linear_attention": {"constant_pad_nd", "convolution"}}


def model_of(config: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    model: torch.nn.Module = tf.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model.to(torch.bfloat16).eval()


@cache
def traced(name: str) -> tuple[torch.nn.Module, Levels]:
    model = model_of(ARCHITECTURES[name]())
    return model, levels_of(model, tokens(2, 16), infer=False)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(name: str) -> None:
    model, levels = traced(name)

    graphs: list[PrecisionGraph] = []
    for captured in (levels.dynamo[0], levels.joint[0]):
        assert not uncovered(captured)
        graphs.append(build_precision_graph(captured).graph)
    dynamo, joint = graphs
    unknown = {op.role.partition(".")[0] for op in joint.unknown()}
    assert unknown == UNKNOWN.get(name, set())
    if name not in DECOMPOSED:
        report = check_containment(dynamo, joint)
        assert report.contained, report.differences
    linear = {
        path
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    parts = {"qkv_proj": "v_proj", "gate_up_proj": "up_proj"}
    for path in linear:
        head, _, leaf = path.rpartition(".")
        wanted = f"{head}.{parts[leaf]}" if leaf in parts else path
        roles = {op.role for op in joint.gemms() if op.module == wanted}
        assert roles == {"fprop", "dgrad", "wgrad"}, path


def attention(name: str) -> tuple[PrecisionGraph, str]:
    _, levels = traced(name)
    graph = build_precision_graph(levels.joint[0]).graph
    return graph, next(op.name for op in graph.operators if op.kind == "attention")


@pytest.mark.parametrize(
    "name",
    [
        "eager",
        "partial_rotary_parallel",
        "partial_rotary_interleaved",
        "interleaved",
        "complex_rotary",
        "fused_weights",
    ],
)
def test_rotary_embeddings_feed_attention(name: str) -> None:
    graph, found = attention(name)

    for part in "qk":
        source = graph.operands[found][part].source
        if name == "complex_rotary":  # normalized after it is rotated
            source = graph.operands[source]["x"].source
        assert source == found.replace(":attention", f":rope.{part}")
        assert graph.by_name[source].kind == "rope"
        table = graph.operands[source]["cos"]
        assert table.source == graph.operands[source]["sin"].source
        if name != "interleaved":  # GPT-J keeps its table as a buffer
            assert graph.by_name[table.source].kind == "rope_table"


def test_eager_attention_rounds_its_scores() -> None:
    graph, found = attention("eager")
    assert graph.by_name[found].compute_dtype == "bf16"
    assert dict(graph.by_name[found].params) == {"scale": 0.125}
    other, found = attention("sliding_window")
    assert other.by_name[found].compute_dtype == "fp32"
    assert dict(other.by_name[found].params) == {"scale": 0.125}


def test_mla_names_both_rotary_embeddings() -> None:
    graph, found = attention("mla_group_topk")
    module = found.removesuffix(":attention")
    operands = graph.operands[found]
    assert operands["q"].source == f"{module}:rope.q"
    key = graph.operands[operands["k"].source]
    assert f"{module}:rope.k" in {edge.source for edge in key.values()}
