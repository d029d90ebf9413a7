"""Locks: the same facts give the same file, every change is told, nothing else is."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from hostile import hostile_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_graphs import (
    decoder_graph,
    names,
    one_edge,
    one_operator,
    with_edges,
    with_operators,
    without_fp8,
)

from jetrl_compile.errors import GraphFormatError
from jetrl_compile.formats import Flow
from jetrl_compile.lock import Lock, lock_from_json, lock_to_json
from jetrl_compile.lock_check import LockReport, check_lock, lock_lines, make_lock
from jetrl_compile.lock_facts import Facts, facts_of
from jetrl_compile.precision_graph import GEMM_KINDS, PrecisionGraph
from jetrl_compile.report import FORMATS, render

Golden = Callable[[str, str], None]
TRAIN = decoder_graph("train", 3)
LOCK = make_lock(TRAIN, path="model")


def check(graph: PrecisionGraph) -> LockReport:
    return check_lock(LOCK, graph)


def plain(facts: Facts) -> Any:
    return (
        dict(facts.operators),
        {name: dict(reads) for name, reads in facts.reads.items()},
    )


# The file --------------------------------------------------------------------------


def test_golden(golden: Golden) -> None:
    golden("report/lock/decoder", lock_to_json(make_lock(TRAIN, path="model")))


@pytest.mark.parametrize("layers", [1, 2, 36])
def test_a_lock_is_short_and_read_back(layers: int) -> None:
    graph = decoder_graph("train", layers)
    text = lock_to_json(make_lock(graph, path="model"))
    assert text.count("\n") < 140
    back = lock_from_json(text)
    assert plain(back.facts) == plain(facts_of(graph))
    assert lock_to_json(back) == text


def test_hostile_names_are_read_back() -> None:
    graph = hostile_graph()
    text = lock_to_json(make_lock(graph))
    assert plain(lock_from_json(text).facts) == plain(facts_of(graph))


@given(st.randoms())
@settings(max_examples=20, deadline=None)
def test_order_and_remarks_do_not_matter(random: Any) -> None:
    """Execution order, reasons, formulas and what makes masks are no facts."""
    operators, edges = [*TRAIN.operators], [*TRAIN.edges]
    random.shuffle(operators)
    random.shuffle(edges)
    shuffled = PrecisionGraph(tuple(operators), tuple(edges), TRAIN.meta)
    shuffled = with_operators(
        shuffled,
        lambda op: replace(op, reason="why", formula="aten:1", module="elsewhere"),
    )
    assert lock_to_json(make_lock(shuffled, path="model")) == lock_to_json(LOCK)
    assert check(shuffled).contained is True


def test_layers_that_differ_are_told_apart() -> None:
    graph = without_fp8(TRAIN, lambda name: "layers.1.mlp.up_proj" in name)
    text = lock_to_json(make_lock(graph))
    assert '{"name": "model.layers.[0,2].mlp.up_proj:fprop"' in text
    assert '{"name": "model.layers.[1].mlp.up_proj:fprop"' in text


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_corrupted_text_raises_one_error(data: st.DataObject) -> None:
    raw = bytearray(lock_to_json(LOCK).encode())
    start = data.draw(st.integers(0, len(raw)))
    piece = st.sampled_from([b'"', b"{", b"]", b"null", b"9", b"[]", b"[=]", b"[0-9]"])
    raw[start : start + data.draw(st.integers(0, 9))] = data.draw(piece)
    with contextlib.suppress(GraphFormatError):
        lock_from_json(bytes(raw))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"version": 1', '"version": 2', "reads versions up to 1: upgrade it"),
        ('"version": 1', '"version": 0', "versions begin at 1"),
        ("precision_lock", "precision_graph", "needed is a precision lock"),
        ("21 of 22 FP8", "22 of 22 FP8", "it was edited or merged by hand"),
        ('"operators"', '"operator"', "unknown field 'operator'"),
        ("[0-2].mlp.up_proj:fprop", "[0-x].mlp.up_proj:fprop", "no set of numbers"),
        ("[0-2].mlp.up_proj:fprop", "[0-2].mlp.gate_proj:fprop", "twice"),
        ("[=].mlp.up_proj.weight", "[?].mlp.up_proj.weight", "is no number"),
        ('"e4m3 1x128 N"]', '"e4m3 1x127 N"]', "has no flow 'e4m3 1x127 N'"),
        ('"kind": "rope"', '"kind": "rop"', "has the kind 'rop'"),
    ],
)
def test_bad_text(old: str, new: str, message: str) -> None:
    text = lock_to_json(LOCK)
    assert old in text
    with pytest.raises(GraphFormatError, match=message):
        lock_from_json(text.replace(old, new, 1), name="p.lock.json")


def test_a_merge_conflict_says_what_to_do() -> None:
    text = "<<<<<<< HEAD\n" + lock_to_json(LOCK)
    with pytest.raises(GraphFormatError, match="write it again with `jetrl lock`"):
        lock_from_json(text)


# Changes ---------------------------------------------------------------------------


def facts_edges(graph: PrecisionGraph) -> list[Any]:
    facts = facts_of(graph)
    kept = {(name, key) for name, reads in facts.reads.items() for key in reads}
    return [edge for edge in graph.edges if edge.key in kept]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_single_change_of_a_flow_is_named(data: st.DataObject) -> None:
    edge = data.draw(st.sampled_from(facts_edges(TRAIN)))
    attribute = data.draw(st.sampled_from([field.name for field in fields(Flow)]))
    if attribute == "granularity" or getattr(edge.flow, attribute) == "other":
        return
    value = 1e-3 if attribute == "amax_floor" else "other"
    changes: dict[str, Any] = {attribute: value}
    edited = one_edge(TRAIN, edge, flow=replace(edge.flow, **changes))
    report = check(edited)
    assert report.contained is False
    assert names(report.differences) == [(2, ".".join(edge.key), attribute)]


@pytest.mark.parametrize(
    "attribute", ["kind", "compute_dtype", "provider", "batch_invariant", "params"]
)
def test_every_attribute_of_an_operator_is_named(attribute: str) -> None:
    op = next(op for op in TRAIN.operators if op.kind == "norm")
    values: dict[str, Any] = {
        "kind": "activation",
        "batch_invariant": True,
        "params": (("eps", 1e-5),),
    }
    edited = one_operator(TRAIN, op, **{attribute: values.get(attribute, "other")})
    (found,) = check(edited).differences
    named = "params.eps" if attribute == "params" else attribute
    assert (found.operator, found.attribute) == (op.name, named)


def test_new_and_missing_operators() -> None:
    fewer, more = decoder_graph("train", 2), decoder_graph("train", 4)
    gone = [d for d in check(fewer).differences if d.attribute == "operator"]
    new = [d for d in check(more).differences if d.attribute == "operator"]
    layer = [name for name in LOCK.facts.operators if name.startswith("model.layers.2")]
    assert {d.operator for d in gone} == set(layer)
    assert len(new) == len(layer)
    assert "is in the lock but not in the graph" in gone[0].message
    assert "is in the graph but not in the lock" in new[0].message
    edge = next(e for e in TRAIN.edges if e.operand == "residual")
    without = with_edges(TRAIN, lambda e: None if e is edge else e)
    assert names(check(without).differences) == [(1, ".".join(edge.key), "edge")]


def test_sources_are_facts() -> None:
    edge = next(e for e in TRAIN.edges if e.operand == "up")
    edited = one_edge(TRAIN, edge, source="lm_head:fprop")
    (found,) = check(edited).differences
    assert (found.attribute, found.train) == ("source", "lm_head:fprop")
    again = check_lock(make_lock(edited), TRAIN)
    assert names(again.differences) == names(check(edited).differences)


def test_masks_and_positions_are_no_facts() -> None:
    index = next(op for op in TRAIN.operators if op.kind == "index")
    kept = tuple(op for op in TRAIN.operators if op is not index)
    edges = tuple(e for e in TRAIN.edges if index.name not in (e.source, e.target))
    assert check(PrecisionGraph(kept, edges, TRAIN.meta)).contained is True


def test_backward_flows_are_facts() -> None:
    def change(edge: Any) -> Any:
        wgrad = edge.target.endswith(":wgrad") and edge.operand == "x"
        flow = replace(edge.flow, source_dtype="e4m3")
        return replace(edge, flow=flow) if wgrad else edge

    report = check(with_edges(TRAIN, change))
    assert {d.attribute for d in report.differences} == {"source_dtype"}
    assert len(report.differences) == 21


# The report ------------------------------------------------------------------------


def changed_reports() -> dict[str, LockReport]:
    scales = with_edges(
        TRAIN,
        lambda e: (
            replace(e, flow=replace(e.flow, scale_format="ue8m0"))
            if e.flow.is_quantized
            else e
        ),
    )
    return {
        "unchanged": check(TRAIN),
        "scales": check(scales),
        "skipped": check(without_fp8(TRAIN, lambda name: "mlp.gate" in name)),
        "other_phase": check(decoder_graph("rollout", 3)),
        "layers": check(decoder_graph("train", 4)),
    }


@pytest.mark.parametrize("name", changed_reports())
def test_golden_reports(name: str, golden: Golden) -> None:
    golden(f"report/lock/{name}", render(changed_reports()[name]))


def test_the_first_lines_tell_the_change() -> None:
    lines = render(changed_reports()["scales"]).split("\n")
    assert lines[:3] == [
        "changed: 126 differences from the lock",
        "cause: scale format fp32 -> ue8m0: all 63 FP8 GEMMs (x, w and dy), 3 layers "
        "(model.layers.0-2)",
        "means: the graph rounds scales to powers of two, which changes 87-100% of the "
        "codes",
    ]
    skipped = render(changed_reports()["skipped"]).split("\n")
    assert skipped[1] == (
        "cause: GEMM precision e4m3 -> bf16: 3 layers (model.layers.0-2), "
        "mlp.gate_proj:fprop, mlp.gate_proj:dgrad and mlp.gate_proj:wgrad"
    )
    assert skipped[2] == "means: they are no longer FP8"


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("name", changed_reports())
def test_every_format_speaks_of_the_lock(name: str, format_name: str) -> None:
    text = render(changed_reports()[name], format_name)
    assert "rollout" not in text.replace("phase rollout", "").replace('"rollout"', "")
    assert "contained" not in text


def test_status_and_counts() -> None:
    reports = changed_reports()
    status = {name: report.exit_status for name, report in reports.items()}
    assert status == {
        "unchanged": 0,
        "scales": 1,
        "skipped": 1,
        "other_phase": 2,
        "layers": 1,
    }
    counts = reports["scales"].counts
    gemms = [op for op in TRAIN.operators if op.kind in GEMM_KINDS]
    assert counts["FP8 GEMMs in the lock"] == sum(map(TRAIN.is_fp8, gemms))
    assert "keep a lock for each" in reports["other_phase"].verdict()


def test_an_incomplete_graph() -> None:
    partial = replace(TRAIN, meta={**TRAIN.meta, "incomplete": "layer 1 ran eagerly"})
    assert check(partial).contained is None
    fewer = decoder_graph("train", 2)
    fewer = replace(fewer, meta={**fewer.meta, "incomplete": "layer 2 ran eagerly"})
    report = check(fewer)
    assert "operator" not in {d.attribute for d in report.differences}
    assert "layer 2 ran eagerly" in render(report)


def test_an_incomplete_graph_is_not_locked() -> None:
    partial = replace(TRAIN, meta={**TRAIN.meta, "incomplete": "layer 1 ran eagerly"})
    with pytest.raises(GraphFormatError, match=r"layer 1 ran eagerly.*captured whole"):
        make_lock(partial)


def test_lines_of_the_file() -> None:
    text = lock_to_json(LOCK)
    rows = text.split("\n")
    lines = lock_lines(text)
    for name, op in LOCK.facts.operators.items():
        assert f'"kind": "{op.kind}"' in rows[lines[name] - 1]
        for operand in LOCK.facts.reads[name]:
            assert json.dumps(operand) in rows[lines[f"{name}.{operand}"] - 1]
    assert lock_lines('{"name": "a.[0-999999].b"') == {}


def test_a_lock_without_facts_is_a_lock() -> None:
    text = lock_to_json(Lock(Facts({}, {})))
    assert lock_from_json(text) == Lock(Facts({}, {}))
