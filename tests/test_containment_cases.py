"""Differences that hid in public FP8 RL stacks: each is named, with its level."""

from dataclasses import replace

import pytest
from sample_graphs import PROJECTIONS, decoder_graph, names, with_edges, without_fp8

from jetrl_compile.containment import (
    check_containment,
    group_differences,
)
from jetrl_compile.formats import Flow, blocks, groups
from jetrl_compile.grouping import group_causes
from jetrl_compile.precision_graph import Edge, Operator, PrecisionGraph

TRAIN = decoder_graph("train")
ROLLOUT = decoder_graph("rollout")


@pytest.mark.parametrize("pattern", ["mlp.gate", "q_proj", "layers.1."])
@pytest.mark.parametrize("side", ["rollout", "train"])
def test_substring_skip_on_one_side(pattern: str, side: str) -> None:
    graphs = {
        "rollout": decoder_graph("rollout", 3),
        "train": decoder_graph("train", 3),
    }
    graphs[side] = without_fp8(graphs[side], lambda name: pattern in name)
    report = check_containment(graphs["rollout"], graphs["train"])
    hit = [
        f"model.layers.{layer}.{part}:fprop"
        for layer in range(3)
        for part in PROJECTIONS
        if pattern in f"model.layers.{layer}.{part}"
    ]
    assert names(report.differences) == [(1, name, "fp8") for name in hit]
    (cause,) = group_causes(report)
    assert cause.size == len(hit)
    assert {item.rollout for item in report.differences} == {
        "bf16" if side == "rollout" else "e4m3"
    }


def test_groups_name_all_layers() -> None:
    rollout = without_fp8(decoder_graph("rollout", 36), lambda name: "mlp.up" in name)
    (group,) = group_differences(check_containment(rollout, decoder_graph("train", 36)))
    assert group.where == "36 layers (model.layers.0-35), mlp.up_proj:fprop"
    assert str(group) == (
        "36 layers (model.layers.0-35), mlp.up_proj:fprop: GEMM precision is bf16 in "
        "rollout, e4m3 in train; name the module in both recipes or in neither, by its "
        "exact path"
    )


@pytest.mark.parametrize("values", [("ue8m0", "fp32"), ("fp32", "ue8m0")])
def test_scale_format_on_every_gemm_edge(values: tuple[str, str]) -> None:
    def change(graph: PrecisionGraph, value: str) -> PrecisionGraph:
        return with_edges(
            graph,
            lambda e: (
                replace(e, flow=replace(e.flow, scale_format=value))
                if e.flow.is_quantized
                else e
            ),
        )

    report = check_containment(change(ROLLOUT, values[0]), change(TRAIN, values[1]))
    assert len(report.differences) == 2 * 7 * 2
    assert {(d.level, d.attribute) for d in report.differences} == {(2, "scale_format")}
    assert report.level(1).status == "passed"
    assert f"scale format is {values[0]} in rollout" in report.differences[0].message
    (cause,) = group_causes(report)
    assert len(cause.groups) == 14
    assert cause.size == 28


def test_source_dtype() -> None:
    train = with_edges(
        TRAIN,
        lambda e: (
            replace(e, flow=replace(e.flow, source_dtype="fp32"))
            if e.flow.is_quantized and e.operand == "w"
            else e
        ),
    )
    report = check_containment(ROLLOUT, train)
    assert {(d.level, d.attribute, d.operand) for d in report.differences} == {
        (2, "source_dtype", "w")
    }
    assert len(report.differences) == 14
    assert "round the master weight to BF16" in report.differences[0].message


@pytest.mark.parametrize("router", ["mlp.gate", "block.router", "gate.wg"])
def test_router_quantized_on_one_side(router: str) -> None:
    def add(graph: PrecisionGraph, fp8: bool) -> PrecisionGraph:
        x, w = (groups("K"), blocks("K")) if fp8 else (Flow("bf16"), Flow("bf16"))
        operators, edges = [*graph.operators], [*graph.edges]
        for layer in range(2):
            module = f"model.layers.{layer}.{router}"
            source = f"model.layers.{layer}.post_attention_layernorm:norm"
            operators += [
                Operator(f"{module}.weight", "parameter", module),
                Operator(f"{module}:fprop", "gemm", module, reason="a router"),
            ]
            edges += [
                Edge(source, f"{module}:fprop", "x", x),
                Edge(f"{module}.weight", f"{module}:fprop", "w", w),
            ]
        return replace(graph, operators=tuple(operators), edges=tuple(edges))

    assert check_containment(add(ROLLOUT, False), add(TRAIN, False)).contained
    report = check_containment(add(ROLLOUT, True), add(TRAIN, False))
    assert names(report.differences) == [
        (1, f"model.layers.{layer}.{router}:fprop", "fp8") for layer in range(2)
    ]
    assert "(a router)" in report.differences[0].message


def test_residual_kept_in_fp32() -> None:
    """One side normalizes the FP32 sum, the other rounds it to BF16 first."""
    read = ("model.layers.0.post_attention_layernorm:norm", "x")

    def unify(graph: PrecisionGraph, dtype: str) -> PrecisionGraph:
        return with_edges(
            graph, lambda e: replace(e, flow=Flow(dtype)) if e.key == read else e
        )

    rollout = unify(ROLLOUT, "fp32")
    report = check_containment(rollout, TRAIN)
    (found,) = report.differences
    assert (found.level, found.name, found.attribute) == (2, ".".join(read), "dtype")
    assert (found.rollout, found.train) == ("fp32", "bf16")
    assert "fp32 in rollout, bf16 in train" in found.message
    assert check_containment(unify(rollout, "bf16"), TRAIN).contained
    assert check_containment(rollout, unify(TRAIN, "fp32")).contained
