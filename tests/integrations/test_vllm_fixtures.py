"""Graphs that were captured from running engines on an H200 (vLLM 0.24, two layers).

`vllm_h200_NAME.json` is the graph that vLLM's model code makes, before the pass;
`vllm_h200_NAME_graph.json` is the precision graph of what ran.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from jetrl_compile.capture_json import read_captured
from jetrl_compile.containment import check_containment
from jetrl_compile.graph_json import read_graph
from jetrl_compile.integrations.vllm.graph_reading import build
from jetrl_compile.passes.annotate_precision import annotate_precision
from jetrl_compile.precision_graph import PrecisionGraph
from jetrl_compile.recipe import JETRL
from jetrl_compile.tracing import trace_config

FIXTURES = Path(__file__).parent.parent / "fixtures"
COMMON: dict[str, Any] = {
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
CONFIGS: dict[str, Any] = {
    "qwen3": lambda: tf.Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        **COMMON,
    ),
    "llama": lambda: tf.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        **COMMON,
    ),
    "qwen2": lambda: tf.Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_attention_heads=28,
        num_key_value_heads=4,
        rms_norm_eps=1e-6,
        **COMMON,
    ),
}
NAMES = sorted(
    name for name in CONFIGS if (FIXTURES / f"vllm_h200_{name}.json").exists()
)


@cache
def trainer(name: str) -> PrecisionGraph:
    """The trainer's graph, with the kernels that it runs on a Hopper GPU."""
    config = CONFIGS[name]()
    config.dtype = torch.bfloat16
    graph = trace_config(config, phase="train")
    operators = (
        replace(op, provider="deep_gemm") if graph.is_fp8(op) else op
        for op in graph.operators
    )
    return replace(graph, operators=tuple(operators))


@pytest.mark.parametrize("name", NAMES)
def test_graph_that_ran_is_contained(name: str) -> None:
    ran = read_graph(FIXTURES / f"vllm_h200_{name}_graph.json")
    report = check_containment(ran, trainer(name))
    assert report.exit_status == 0, [d.message for d in report.differences]
    fp8 = [op for op in ran.gemms("fprop") if ran.is_fp8(op)]
    assert {op.provider for op in fp8} == {"deep_gemm"}
    assert len(fp8) == 14
    assert any(op.name == "lm_head:fprop" for op in ran.gemms())


@pytest.mark.parametrize("name", NAMES)
def test_vllms_own_graph_differs(name: str) -> None:
    """Before the pass the norms read the residual sum in FP32."""
    found = read_captured(FIXTURES / f"vllm_h200_{name}.json")
    graph = build(found.graph, {"phase": "rollout"}).graph
    report = check_containment(
        annotate_precision(graph, JETRL, "rollout"), trainer(name)
    )
    dtypes = [d for d in report.differences if d.attribute == "dtype"]
    assert {(d.rollout, d.train) for d in dtypes} == {("fp32", "bf16")}
    assert len(dtypes) == 4
    assert {d.operand for d in dtypes} == {"x"}
