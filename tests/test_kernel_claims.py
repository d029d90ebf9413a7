"""Each kernel that claims to be independent of the batch has tests that show it."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sample_graphs import decoder_graph
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from jetrl_compile.containment import check_containment
from jetrl_compile.kernel_claims import BY_DEFINITION, CLAIMS, claim_of, not_exact
from jetrl_compile.kernels.attention_kernels import KERNELS
from jetrl_compile.kernels.dispatch import PROVIDERS
from jetrl_compile.kernels.exact_kernels import BF16_GEMMS
from jetrl_compile.precision_graph import Operator, PrecisionGraph

ROOT = Path(__file__).parent.parent


def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_has_tests(name: str) -> None:
    tests = CLAIMS[name].tests
    assert tests, "a kernel without a test may claim nothing"
    for test in tests:
        file, _, function = test.partition("::")
        assert function.startswith("test_")
        assert function in functions(file), test


def test_every_kernel_that_says_so_has_a_claim() -> None:
    invariant = {p.name: p.numerics for p in PROVIDERS.values() if p.batch_invariant}
    assert set(invariant) <= set(CLAIMS)
    for a in invariant:
        for b in invariant:
            equal = CLAIMS[a].numerics == CLAIMS[b].numerics
            assert equal == (invariant[a] == invariant[b])
    assert set(BF16_GEMMS) <= set(CLAIMS)
    assert {f"jetrl.attention.{kernel}" for kernel in KERNELS} <= set(CLAIMS)
    assert set(BY_DEFINITION.values()) <= set(CLAIMS)


def test_what_needs_no_kernel_of_its_own() -> None:
    """Rows that are copied, sums of two BF16 numbers, tables by position."""
    x, y = torch.randn(2, 64, 96).bfloat16()
    embedding = nn.Embedding(64, 96, _weight=x)
    ids = torch.randperm(64)
    wide = (x.double() + y.double()).bfloat16()
    assert torch.equal(x + y, wide), "one rounding, whatever the kernel"
    rope = LlamaRotaryEmbedding(LlamaConfig(hidden_size=128, num_attention_heads=2))
    table = rope(x, torch.arange(64)[None])
    for start, end in ((0, 1), (3, 10), (17, 64)):
        part = ids[start:end]
        assert torch.equal(embedding(part), x[part])
        assert torch.equal(x[start:end] + y[start:end], wide[start:end])
        own = rope(x, torch.arange(start, end)[None].repeat(3, 1))
        for mine, whole in zip(own, table, strict=True):
            assert torch.equal(mine, whole[:, start:end].expand_as(mine))


def exact(graph: PrecisionGraph) -> PrecisionGraph:
    """The same graph, run by the kernels of exact mode."""
    kernels = {
        "norm": "jetrl.rms_norm",
        "rope": "jetrl.rope",
        "activation": "jetrl.silu_mul",
        "attention": "jetrl.attention.fa3",
        "gemm": "deep_gemm",
    }
    operators = tuple(
        replace(op, provider=kernels.get(op.kind, op.provider))
        if op.phase == "forward"
        else op
        for op in graph.operators
    )
    return replace(graph, operators=operators)


def planted(graph: PrecisionGraph, name: str, provider: str) -> PrecisionGraph:
    operators = [
        replace(op, provider=provider) if op.name == name else op
        for op in graph.operators
    ]
    return replace(graph, operators=tuple(operators))


def test_exact_graphs_are_contained() -> None:
    rollout, train = (exact(decoder_graph(side)) for side in ("rollout", "train"))
    report = check_containment(rollout, train, exact=True)
    assert report.contained, report.differences
    assert report.strict
    plain = check_containment(
        decoder_graph("rollout"), decoder_graph("train"), exact=True
    )
    attributes = {d.attribute for d in plain.differences}
    assert attributes == {"batch_invariant"}
    named = {d.operator for d in plain.differences}
    assert "model.layers.1.self_attn:attention" in named
    assert "lm_head:fprop" in named
    assert not any("residual_add" in name or "embed" in name for name in named)


@pytest.mark.parametrize(
    ("name", "provider", "attribute"),
    [
        ("model.layers.0.self_attn:attention", "aten", "batch_invariant"),
        ("model.layers.0.self_attn:attention", "jetrl.attention.triton", "provider"),
        ("model.layers.1.input_layernorm:norm", "vllm_c", "batch_invariant"),
        ("lm_head:fprop", "aten", "batch_invariant"),
        ("model.layers.1.mlp.up_proj:fprop", "triton", "provider"),
    ],
)
@pytest.mark.parametrize("side", ["rollout", "train"])
def test_another_kernel_on_one_side_is_named(
    name: str, provider: str, attribute: str, side: str
) -> None:
    graphs = {key: exact(decoder_graph(key)) for key in ("rollout", "train")}
    graphs[side] = planted(graphs[side], name, provider)
    report = check_containment(graphs["rollout"], graphs["train"], exact=True)
    assert report.contained is False
    (found,) = report.differences
    assert (found.operator, found.attribute) == (name, attribute)
    assert f"{provider} in {side}" in found.message


def test_one_numerics_class_is_enough() -> None:
    rollout, train = (exact(decoder_graph(side)) for side in ("rollout", "train"))
    other = planted(rollout, "model.layers.0.mlp.up_proj:fprop", "scaled_mm")
    assert check_containment(other, train, exact=True).contained


def test_sums_that_a_kernel_keeps_in_fp32_are_no_single_rounding() -> None:
    rounded = Operator("a:residual_add", "residual_add", "a", (), "bf16", "aten")
    assert claim_of(rounded) is not None
    assert claim_of(replace(rounded, compute_dtype="fp32")) is None
    assert "a:residual_add (residual add) is run by aten" in not_exact(
        replace(rounded, compute_dtype="fp32")
    )
    assert not_exact(replace(rounded, phase="backward", compute_dtype="fp32")) == ""
