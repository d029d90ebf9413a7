"""A model at Dynamo's level, in an inference and in a joint graph: one graph."""

import pytest
from graph_levels import levels_of
from tiny_models import ARCHITECTURES, make_model, tokens

from jetrl_compile.captured_graph import CapturedGraph
from jetrl_compile.graph_builder import build_precision_graph
from jetrl_compile.precision_graph import Edge, Operator, PrecisionGraph


def comparable(graph: PrecisionGraph) -> tuple[dict[str, Operator], set[Edge]]:
    """Operators and edges in forward, without positions, masks and saved dtypes."""
    forward = graph.forward()
    kept = {op.name: op for op in forward.operators if op.kind != "index"}
    edges = {
        Edge(edge.source, edge.target, edge.operand, edge.flow.saved_as(None))
        for edge in forward.edges
        if edge.source in kept
        and edge.target in kept
        and not edge.operand.startswith(("index", "out"))
    }
    return kept, edges


def built(captured: CapturedGraph) -> PrecisionGraph:
    return build_precision_graph(captured).graph


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_level_gives_the_same_graph(name: str) -> None:
    levels = levels_of(make_model(name).eval(), tokens(2, 16))

    dynamo, inference, joint = (
        comparable(built(graphs[0]))
        for graphs in (levels.dynamo, levels.inference, levels.joint)
    )

    assert inference == joint
    assert dynamo == inference
    kinds = {op.kind for op in dynamo[0].values()}
    assert "unknown" not in kinds
    assert {"gemm", "norm", "attention", "residual_add", "embedding"} <= kinds


def test_outputs_of_forward_come_first() -> None:
    levels = levels_of(make_model("llama").eval(), tokens(2, 16))

    for graphs in (levels.dynamo, levels.inference, levels.joint):
        graph = built(graphs[0])
        assert graph.operands["output"]["out.0"].source == "lm_head:fprop"


def test_building_twice_gives_one_text() -> None:
    model = make_model("llama").eval()
    first, second = (
        levels_of(model, tokens(2, 16), infer=False).joint[0] for _ in range(2)
    )

    assert str(built(first)) == str(built(second))
