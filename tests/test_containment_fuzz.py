"""Every single planted edit fails and is named; deletions hold."""

import random
from dataclasses import replace
from typing import Any

import pytest
from sample_graphs import (
    Named,
    decoder_graph,
    names,
    one_edge,
    one_operator,
    with_edges,
)

from jetrl_compile.containment import (
    check_containment,
    diff_graphs,
)
from jetrl_compile.formats import Flow, groups
from jetrl_compile.granularity import Granularity
from jetrl_compile.precision_graph import KINDS, Edge, Operator, PrecisionGraph

SEED = 20260114
TRAIN = decoder_graph("train")
ROLLOUT = decoder_graph("rollout")
NO_PRECISION = ("input.0", "input.1", "model:slots")
OTHER_VALUES: dict[str, Any] = {
    "dtype": ["fp32", "bf16", "fp16", "e5m2"],
    "granularity": [Granularity(1, 64), Granularity(0, 0), Granularity(128, 1)],
    "direction": ["M", "N"],
    "scale_format": ["ue8m0"],
    "amax_floor": [0.0, 1e-4, 1e-12],
    "scale_apply": ["reciprocal"],
    "source_dtype": ["fp32", "e4m3"],
    "scale_layout": ["mn_major_tma"],
}


def comparable(graph: PrecisionGraph) -> list[Edge]:
    return [
        edge
        for edge in graph.edges
        if edge.source not in NO_PRECISION and edge.target not in NO_PRECISION
    ]


def drop_fp8(rng: random.Random) -> tuple[PrecisionGraph, Named]:
    op = rng.choice([op for op in ROLLOUT.gemms() if ROLLOUT.is_fp8(op)])
    operands = rng.choice([("x", "w"), ("x",), ("w",)])

    def change(edge: Edge) -> Edge:
        hit = edge.target == op.name and edge.operand in operands
        return replace(edge, flow=Flow("bf16")) if hit else edge

    return with_edges(ROLLOUT, change), (1, op.name, "fp8")


def edit_flow(rng: random.Random) -> tuple[PrecisionGraph, Named]:
    attribute = rng.choice(list(OTHER_VALUES))
    edge = rng.choice(comparable(ROLLOUT))
    old = getattr(edge.flow, attribute)
    value = rng.choice([v for v in OTHER_VALUES[attribute] if v != old])
    flow = replace(edge.flow, **{attribute: value})
    name = f"{edge.target}.{edge.operand}"
    return one_edge(ROLLOUT, edge, flow=flow), (2, name, attribute)


def edit_param(rng: random.Random) -> tuple[PrecisionGraph, Named]:
    op = rng.choice([op for op in ROLLOUT.operators if op.params])
    params = dict(op.params)
    key = rng.choice([*params, "extra"])
    if key != "extra" and rng.random() < 0.3:
        del params[key]
    else:
        params[key] = "other"
    graph = one_operator(ROLLOUT, op, params=tuple(sorted(params.items())))
    return graph, (2, op.name, f"params.{key}")


def edit_compute_dtype(rng: random.Random) -> tuple[PrecisionGraph, Named]:
    op = rng.choice([op for op in ROLLOUT.operators if op.name not in NO_PRECISION])
    graph = one_operator(ROLLOUT, op, compute_dtype="fp64")
    return graph, (2, op.name, "compute_dtype")


def edit_kind(rng: random.Random) -> tuple[PrecisionGraph, Named]:
    op = rng.choice([op for op in ROLLOUT.operators if op.name != "model:slots"])
    kind = rng.choice([kind for kind in KINDS if kind != op.kind])
    return one_operator(ROLLOUT, op, kind=kind), (1, op.name, "kind")


def edit_provider(rng: random.Random) -> tuple[PrecisionGraph, Named]:
    op = rng.choice(list(ROLLOUT.gemms()))
    provider = rng.choice(["reference", "triton", ""])
    return one_operator(ROLLOUT, op, provider=provider), (2, op.name, "provider")


def add_operator(rng: random.Random) -> tuple[PrecisionGraph, Named]:
    """Put an operator into an edge, so that its target reads the new one."""
    edge = rng.choice(comparable(ROLLOUT))
    kind = rng.choice(["cast", "unknown", "norm", "gemm", "parameter"])
    new = Operator("model.layers.0.extra:cast", kind)
    edges = [replace(e, source=new.name) if e is edge else e for e in ROLLOUT.edges]
    edges.append(Edge(edge.source, new.name, "x", edge.flow))
    place = rng.randrange(len(ROLLOUT.operators))
    operators = [*ROLLOUT.operators]
    operators.insert(place, new)
    graph = PrecisionGraph(tuple(operators), tuple(edges), ROLLOUT.meta)
    return graph, (1, new.name, "operator")


def add_edge(rng: random.Random) -> tuple[PrecisionGraph, Named]:
    target = rng.choice([op.name for op in ROLLOUT.operators if op.kind != "index"])
    floating = [op.name for op in ROLLOUT.operators if op.name not in NO_PRECISION]
    edge = Edge(rng.choice(floating), target, "extra", groups("K"))
    return replace(ROLLOUT, edges=(*ROLLOUT.edges, edge)), (
        1,
        f"{target}.extra",
        "edge",
    )


def rename_source(rng: random.Random) -> tuple[PrecisionGraph, Named]:
    edge = rng.choice(comparable(ROLLOUT))
    other = rng.choice([op.name for op in ROLLOUT.operators if op.name != edge.source])
    name = f"{edge.target}.{edge.operand}"
    return one_edge(ROLLOUT, edge, source=other), (2, name, "source")


EDITS = (
    drop_fp8,
    edit_flow,
    edit_flow,
    edit_param,
    edit_compute_dtype,
    edit_kind,
    edit_provider,
    add_operator,
    add_edge,
    rename_source,
)


@pytest.mark.parametrize("case", range(200))
def test_each_single_edit_is_named(case: int) -> None:
    rng = random.Random(SEED + case)
    edited, expected = EDITS[case % len(EDITS)](rng)
    report = check_containment(edited, TRAIN)
    print(f"seed {SEED + case}: {expected}")  # pytest shows it if the case fails
    assert names(report.differences) == [expected]
    assert report.contained is False
    assert report.exit_status == 1
    level, name, attribute = expected
    assert [item.level for item in report.levels if item.status == "failed"] == [level]
    message = report.differences[0].message
    assert name in message
    assert "\n" not in message
    assert names(diff_graphs(edited, ROLLOUT)) or attribute == "fp8"


@pytest.mark.parametrize("case", range(100))
def test_deletions_hold(case: int) -> None:
    rng = random.Random(SEED + case)
    share = rng.random()
    gone = {op.name for op in ROLLOUT.operators if rng.random() < share}
    gone.discard("lm_head:fprop")  # without any GEMM nothing can be told
    rest = replace(
        ROLLOUT,
        operators=tuple(op for op in ROLLOUT.operators if op.name not in gone),
        edges=tuple(
            edge
            for edge in ROLLOUT.edges
            if not {edge.source, edge.target} & gone and rng.random() < 0.8
        ),
    )
    report = check_containment(rest, TRAIN)
    print(f"seed {SEED + case}: {len(gone)} operators deleted")
    assert report.contained is True


@pytest.mark.parametrize("case", range(60))
def test_each_operator_that_training_lacks_is_named(case: int) -> None:
    rng = random.Random(SEED + case)
    gone = rng.choice([op for op in ROLLOUT.operators if op.name not in NO_PRECISION])
    train = replace(
        TRAIN,
        operators=tuple(op for op in TRAIN.operators if op.name != gone.name),
        edges=tuple(e for e in TRAIN.edges if gone.name not in (e.source, e.target)),
    )
    print(f"seed {SEED + case}")
    report = check_containment(ROLLOUT, train)
    assert names(report.differences) == [(1, gone.name, "operator")]


@pytest.mark.parametrize("case", range(40))
def test_each_edge_that_training_lacks_is_named(case: int) -> None:
    rng = random.Random(SEED + case)
    gone = rng.choice(comparable(ROLLOUT))
    train = with_edges(TRAIN, lambda e: None if e.key == gone.key else e)
    print(f"seed {SEED + case}")
    report = check_containment(ROLLOUT, train)
    assert names(report.differences) == [(1, ".".join(gone.key), "edge")]
