"""Build the precision graph of a captured graph."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jetrl_compile.captured_graph import CapturedGraph
from jetrl_compile.collection import collection_paused
from jetrl_compile.edge_names import finish_edges
from jetrl_compile.gemm_operators import add_gemm
from jetrl_compile.gemm_sites import GemmSite
from jetrl_compile.graph_state import GraphState
from jetrl_compile.group_operators import add_group
from jetrl_compile.input_operators import add_output, add_placeholder
from jetrl_compile.mutations import without_mutations
from jetrl_compile.precision_graph import PrecisionGraph, make_graph


@dataclass(frozen=True)
class BuiltGraph:
    """A precision graph, and how it relates to the captured graph.

    Attributes:
        graph: The precision graph.
        gemms: The weight GEMMs, by the names of their operators; their node indices
            are those of the captured graph.
        node_of: For each operator, the name of the last captured node that is part of
            it: where its result appears.
        lost: As in `GemmSites`.
    """

    graph: PrecisionGraph
    gemms: Mapping[str, GemmSite]
    node_of: Mapping[str, str]
    lost: tuple[str, ...] = ()


def build_precision_graph(
    captured: CapturedGraph,
    batch_invariant: Mapping[str, bool] | None = None,
    **meta: Any,
) -> BuiltGraph:
    """Return the precision graph of a captured graph, in time linear in its size.

    Args:
        captured: A joint, inference or Dynamo-level graph.
        batch_invariant: For each GEMM provider whether a row's result is independent
            of the batch.
        **meta: The graph's `meta`.
    """
    with collection_paused():
        return _build(captured, batch_invariant or {}, meta)


def _build(
    captured: CapturedGraph,
    batch_invariant: Mapping[str, bool],
    meta: Mapping[str, Any],
) -> BuiltGraph:
    functional, origin = without_mutations(captured)
    state = GraphState(functional, batch_invariant)
    # An operator stands where its result is ready; masks and positions come first.
    last = {
        group.nodes[0 if group.shape == "index" else -1]: group
        for group in state.grouping.groups
    }
    inputs = 0
    for index, node in enumerate(state.nodes):
        if node.op == "placeholder":
            if node.target == "input":
                inputs += not node.backward
            add_placeholder(state, index, node, inputs - 1)
        elif node.op == "attribute":
            state.operator(index, f"{node.module}:constant", "constant")
        elif node.op == "output":
            add_output(state, index)
        elif index in state.sites.sites:
            add_gemm(state, index, node, state.sites.sites[index])
        elif index in last:
            add_group(state, last[index])
    operators, edges, node_of = finish_edges(state)
    gemms = {node_of.renamed(k): v for k, v in state.gemms.items()}
    if origin is not None:
        gemms = {name: _original(site, origin) for name, site in gemms.items()}
    graph = make_graph(operators, edges, **meta)
    return BuiltGraph(graph, gemms, node_of.table, tuple(state.sites.lost))


def _original(site: GemmSite, origin: list[int]) -> GemmSite:
    """Return a site with the indices of the graph before it was functionalized."""
    return replace(
        site,
        node=origin[site.node],
        weight=origin[site.weight],
        a=origin[site.a],
        b=origin[site.b],
        bias=None if site.bias is None else origin[site.bias],
    )
