"""Groups and causes of any differences: nothing lost or twice, the cause first."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from sample_graphs import decoder_graph, with_edges, with_operators, without_fp8
from test_report import many_causes, texts

from jetrl_compile.containment import (
    ContainmentReport,
    Difference,
    LevelResult,
    check_containment,
)
from jetrl_compile.grouping import group_causes, group_differences, pattern, subject
from jetrl_compile.report import render
from jetrl_compile.report_cause import explain, listed

ORDER = (
    "fp8",
    "operator",
    "scale_format",
    "dtype",
    "params.eps",
    "formula",
    "provider",
)
parts = st.sampled_from(
    ["mlp.up_proj:fprop", "self_attn:rope.q", "norm", "x.3.y:add.1"]
)
operators = st.builds(
    lambda layer, part: f"model.layers.{layer}.{part}", st.integers(0, 40), parts
)
differences = st.builds(
    Difference,
    st.integers(1, 4),
    operators | texts,
    st.sampled_from([*ORDER, "source", "edge", "bytes", "values", "saved_dtype"]),
    st.none() | st.sampled_from(["bf16", "fp32", "model.layers.3:cast"]),
    st.none() | st.sampled_from(["bf16", "e4m3", "model.layers.2:cast"]),
    operators.map(lambda name: f"{name}: 3 of 9 elements differ") | texts,
    st.sampled_from(["", "x", "w"]),
)


@given(st.lists(differences, max_size=40))
@settings(max_examples=200, deadline=None)
def test_every_difference_is_in_exactly_one_group(found: list[Difference]) -> None:
    wanted = Counter(map(id, found))
    causes = group_causes(found)
    for groups in (group_differences(found), [g for c in causes for g in c.groups]):
        members = Counter(id(item) for group in groups for item in group.differences)
        assert members == wanted
        for group in groups:
            assert len({pattern(item.name) for item in group.differences}) == 1
            for item in group.differences:
                assert (item.level, item.attribute) == (group.level, group.attribute)
                assert pattern(subject(item)) == group.place
    assert sum(cause.size for cause in causes) == len(found)
    for cause in causes:
        assert len(cause.places()) == len(cause.groups)


@given(st.lists(differences, max_size=40))
@settings(max_examples=200, deadline=None)
def test_causes_are_in_order(found: list[Difference]) -> None:
    causes = group_causes(found)
    assert [cause.level for cause in causes] == sorted(item.level for item in causes)
    for first, second in pairwise(causes):
        if (first.level, first.attribute) == (second.level, second.attribute):
            assert first.size >= second.size
    late = ("operator", "edge", "formula", "provider", "saved_dtype")
    for level in range(1, 5):
        names = [cause.attribute for cause in causes if cause.level == level]
        ranks = [late.index(name) + 1 if name in late else 0 for name in names]
        ranks = [1 if rank == 2 else rank for rank in ranks]
        assert ranks == sorted(ranks)


@given(st.lists(differences, max_size=20))
@settings(max_examples=100, deadline=None)
def test_explanations_take_any_difference(found: list[Difference]) -> None:
    levels = tuple(LevelResult(number, "failed") for number in range(1, 5))
    report = ContainmentReport(levels, tuple(found))
    explained = explain(report)
    assert [each.cause for each in explained] == list(group_causes(report))
    assert all(each.summary for each in explained if each.cause.groups[0].place)


def test_the_cause_leads_whatever_its_size() -> None:
    """A quantizer that differs at few places comes before formulas at all."""
    base = many_causes(1).differences[0]
    formulas = [
        replace(base, operator=f"model.layers.{i}:x", attribute="formula")
        for i in range(300)
    ]
    scales = [
        replace(base, operator=f"model.layers.{i}.a:fprop", attribute="scale_format")
        for i in range(2)
    ]
    causes = group_causes([*formulas, *scales])
    assert [(cause.attribute, cause.size) for cause in causes] == [
        ("scale_format", 2),
        ("formula", 300),
    ]


def thousand() -> ContainmentReport:
    """36 layers, more than 1,000 differences of four causes."""
    rollout = decoder_graph("rollout", 36)
    rollout = with_edges(
        rollout,
        lambda e: (
            replace(e, flow=replace(e.flow, scale_format="ue8m0", amax_floor=1e-4))
            if e.flow.is_quantized
            else e
        ),
    )
    rollout = with_operators(
        rollout,
        lambda op: replace(op, params=(("eps", 1e-5),)) if op.kind == "norm" else op,
    )
    rollout = without_fp8(rollout, lambda name: "mlp.gate" in name)
    return check_containment(rollout, decoder_graph("train", 36))


def test_a_report_of_a_thousand_differences() -> None:
    report = thousand()
    assert len(report.differences) == 36 + 2 * 36 * 6 * 2 + 73
    causes = group_causes(report)
    assert [(cause.attribute, cause.size) for cause in causes] == [
        ("fp8", 36),
        ("scale_format", 432),
        ("amax_floor", 432),
        ("params.eps", 73),
    ]
    text = render(report)
    lines = text.split("\n")
    assert lines[1] == (
        "cause: GEMM precision is bf16 in rollout, e4m3 in train: 36 layers "
        "(model.layers.0-35), mlp.gate_proj:fprop"
    )
    assert "also: 3 more causes, below" in lines
    assert "  36 layers (model.layers.0-35), mlp.up_proj:fprop.x" in lines
    assert len(lines) < 90
    (scale,) = (
        each for each in explain(report) if each.cause.attribute == "amax_floor"
    )
    assert scale.summary == "all 216 FP8 GEMMs (x and w), 36 layers (model.layers.0-35)"
    assert len(render(report, "md")) < 12_000
    assert render(report, "github").count("::error ") == 4


def test_stored_tensors_of_one_operand_are_two_groups() -> None:
    """Codes and scales are both the operand w; each group says its own tensor."""
    found = [
        Difference(
            3,
            f"model.layers.{layer}.mlp.up_proj:fprop",
            "bytes",
            None,
            None,
            f"model.layers.{layer}.mlp.up_proj.{tensor}: 1 of 9 elements differ",
            "w",
        )
        for layer in range(3)
        for tensor in ("weight", "weight_scale_inv")
    ]
    (cause,) = group_causes(found)
    assert cause.places() == [
        f"3 layers (model.layers.0-2), mlp.up_proj.{tensor}: 1 of 9 elements differ "
        "(the first of them)"
        for tensor in ("weight", "weight_scale_inv")
    ]


def test_listed() -> None:
    assert listed([]) == ""
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "a"]) == "a and b"
    assert listed("abcd") == "a, b, c and d"
    assert listed("abcde") == "a, b, c and 2 more"
