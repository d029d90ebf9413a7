from dataclasses import fields, replace
from typing import Any

import pytest
from sample_graphs import decoder_graph, one_edge, one_operator, with_edges

from jetrl_compile.containment import (
    Difference,
    diff_graphs,
)
from jetrl_compile.formats import Flow
from jetrl_compile.precision_graph import Operator

TRAIN = decoder_graph("train")
ROLLOUT = decoder_graph("rollout")


def mirrored(found: list[Difference]) -> set[tuple[object, ...]]:
    return {(d.level, d.name, d.attribute, d.train, d.rollout) for d in found}


def test_diff_is_symmetric_and_complete() -> None:
    there, back = diff_graphs(ROLLOUT, TRAIN), diff_graphs(TRAIN, ROLLOUT)
    assert mirrored(there) == {
        (d.level, d.name, d.attribute, d.rollout, d.train) for d in back
    }
    attributes = {d.attribute for d in there}
    assert attributes == {"operator", "source", "saved_dtype"}
    backward = [d for d in there if d.operator.endswith(":wgrad")]
    assert len(backward) == 14
    assert "but not in a" in backward[0].message


@pytest.mark.parametrize(
    "attribute",
    [
        f.name
        for f in fields(Operator)
        if f.name not in ("name", "reason", "params", "formula")
    ],
)
def test_diff_names_each_operator_attribute(attribute: str) -> None:
    op = TRAIN.operators[-1]
    edited = one_operator(TRAIN, op, **{attribute: "other"})
    assert [(d.name, d.attribute) for d in diff_graphs(TRAIN, edited)] == [
        (op.name, attribute)
    ]


@pytest.mark.parametrize("attribute", [f.name for f in fields(Flow)])
def test_diff_names_each_flow_attribute(attribute: str) -> None:
    edge = TRAIN.edges[-1]
    changes: dict[str, Any] = {attribute: "other"}
    edited = one_edge(TRAIN, edge, flow=replace(edge.flow, **changes))
    (found,) = diff_graphs(TRAIN, edited, sides=("old", "new"))
    assert (found.name, found.attribute) == (".".join(edge.key), attribute)
    assert "other in new" in found.message


def test_diff_of_edges() -> None:
    edge = TRAIN.edges[0]
    fewer = with_edges(TRAIN, lambda e: None if e is edge else e)
    (gone,) = diff_graphs(TRAIN, fewer)
    (new,) = diff_graphs(fewer, TRAIN)
    assert (gone.attribute, gone.rollout, gone.train) == ("edge", edge.source, None)
    assert (new.attribute, new.rollout, new.train) == ("edge", None, edge.source)


def test_values_that_look_alike_are_told_apart() -> None:
    op = next(op for op in TRAIN.operators if op.kind == "norm")
    edited = one_operator(TRAIN, op, params=(("eps", "1e-06"),))
    (found,) = diff_graphs(TRAIN, edited)
    assert (found.rollout, found.train) == ("1e-06", "'1e-06'")
