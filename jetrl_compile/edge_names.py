"""The last step of building: saved dtypes, and names that depend on the readers."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jetrl_compile.captured_graph import CapturedNode
from jetrl_compile.graph_state import GraphState
from jetrl_compile.precision_graph import Edge, Operator


@dataclass(frozen=True)
class NodeTable:
    """Final names of operators.

    Attributes:
        table: For each operator, the name of the captured node that ends it.
        renames: Names that were replaced.
    """

    table: Mapping[str, str]
    renames: Mapping[str, str]

    def renamed(self, name: str) -> str:
        """Return the final name of an operator."""
        return self.renames.get(name, name)


def finish_edges(
    state: GraphState,
) -> tuple[list[Operator], list[Edge], NodeTable]:
    """Return the operators and edges of a graph in their final form.

    The input of each linear layer is marked with what is kept of it for backward, and
    each rotary embedding is named by the attention operand that it makes.
    """
    edges = state.edges()
    saved = _saved_dtypes(state, edges)
    renames = _rope_names(state, edges)
    if saved or renames:
        edges = [_finished(edge, saved, renames) for edge in edges]
    operators, table = state.operators, state.node_of
    if renames:
        operators = [
            replace(op, name=renames[op.name]) if op.name in renames else op
            for op in operators
        ]
        table = {renames.get(name, name): node for name, node in table.items()}
    return operators, edges, NodeTable(table, renames)


def _finished(edge: Edge, saved: Mapping[str, str], renames: Mapping[str, str]) -> Edge:
    kept = saved.get(edge.target) if edge.operand == "x" else None
    if kept is None and edge.source not in renames and edge.target not in renames:
        return edge
    return Edge(
        renames.get(edge.source, edge.source),
        renames.get(edge.target, edge.target),
        edge.operand,
        edge.flow if kept is None else edge.flow.saved_as(kept),
    )


def _saved_dtypes(state: GraphState, edges: list[Edge]) -> dict[str, str]:
    """What of each linear layer's input is kept for backward, by fprop operator."""
    saved: dict[str, str] = {}
    for edge in edges:
        if edge.operand == "x" and edge.target.endswith(":wgrad"):
            name = edge.target.removesuffix(":wgrad")
            node = state.nodes[state.gemms[edge.target].node]
            saved[f"{name}:fprop"] = _saved_dtype(state, node, edge)
    return saved


def _saved_dtype(state: GraphState, node: CapturedNode, edge: Edge) -> str:
    """What is kept of x: FP8 if forward quantized it, or its own dtype."""
    if not edge.flow.is_quantized:
        return edge.flow.dtype
    made = state.sources.source(node.args[2].index).index
    if not state.nodes[made].backward or edge.flow.source_dtype == "e4m3":
        return "e4m3"
    return edge.flow.source_dtype or edge.flow.dtype


def _rope_names(state: GraphState, edges: list[Edge]) -> dict[str, str]:
    """Name each rotary embedding by the attention operand that it makes.

    Seen through a concatenation with a part that is not rotated.
    """
    ropes = {op.name for op in state.operators if op.kind == "rope"}
    attentions = {op.name for op in state.operators if op.kind == "attention"}
    if not ropes:
        return {}
    joined: dict[str, list[str]] = {}
    for edge in edges:
        if edge.source in ropes and edge.target not in attentions:
            joined.setdefault(edge.target, []).append(edge.source)
    rename: dict[str, str] = {}
    for edge in edges:
        if edge.operand not in ("q", "k") or edge.target not in attentions:
            continue
        found = [edge.source] if edge.source in ropes else joined.get(edge.source, [])
        for source in found:
            if not source.endswith(f":rope.{edge.operand}"):
                module = source.rpartition(":")[0]
                rename.setdefault(source, f"{module}:rope.{edge.operand}")
    taken = Counter(rename.values())
    names = {op.name for op in state.operators}
    return {
        old: new for old, new in rename.items() if taken[new] == 1 and new not in names
    }
