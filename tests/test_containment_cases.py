"""Differences that hid in public FP8 RL stacks: each is named, with its level."""

from dataclasses import replace

import pytest
from sample_graphs import (
    PROJECTIONS,
    decoder_graph,
    names,
    one_operator,
    with_edges,
    without_fp8,
)

from jetrl_compile.containment import (
    check_containment,
    diff_graphs,
    group_differences,
)
from jetrl_compile.formats import Flow, blocks, groups
from jetrl_compile.grouping import group_causes
from jetrl_compile.precision_graph import UNKNOWN, Edge, Operator, PrecisionGraph

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


@pytest.mark.parametrize(
    ("mine", "theirs", "equal"),
    [
        ("aten:1f", "aten:1f", True),
        ("aten:1f", "aten:2e", False),
        ("aten:1f", "dynamo:2e", True),
        ("aten:1f", "", True),
        ("", "aten:1f", True),
    ],
)
@pytest.mark.parametrize("kind", ["norm", "gemm", "activation"])
def test_formula(kind: str, mine: str, theirs: str, equal: bool) -> None:
    """Operators that are equal but for what they were made of."""
    op = next(op for op in ROLLOUT.operators if op.kind == kind)
    rollout = one_operator(ROLLOUT, op, formula=mine)
    train = one_operator(TRAIN, TRAIN.by_name[op.name], formula=theirs)
    report = check_containment(rollout, train)
    assert report.contained is equal
    assert report.notes == ()
    assert names(report.differences) == ([] if equal else [(2, op.name, "formula")])
    changed = diff_graphs(rollout, one_operator(ROLLOUT, op, formula=theirs))
    assert names(changed) == names(report.differences)
    if not equal:
        message = report.differences[0].message
        assert "rollout and train compute another formula" in message
        assert "run the same model code" in message


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("side", ["rollout", "train"])
@pytest.mark.parametrize("key", ["N", "K", "eps"])
def test_unknown_parameters(key: str, side: str, strict: bool) -> None:
    """What one graph does not show is a note, but sizes of a GEMM are always known."""
    graphs = {"rollout": ROLLOUT, "train": TRAIN}
    name = next(
        op.name
        for op in ROLLOUT.operators
        if key in dict(op.params) and (key == "eps" or op.kind == "gemm")
    )
    op = graphs[side].by_name[name]
    params = tuple((k, UNKNOWN if k == key else v) for k, v in op.params)
    graphs[side] = one_operator(graphs[side], op, params=params)
    report = check_containment(graphs["rollout"], graphs["train"], strict=strict)
    is_note = key == "eps" and not strict
    assert report.contained is is_note
    found = report.notes if is_note else report.differences
    assert names(found) == [(2, name, f"params.{key}")]
