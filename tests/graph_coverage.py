"""Which operators the nodes of a captured graph became part of."""

from jetrl_compile.captured_graph import CapturedGraph
from jetrl_compile.graph_state import GraphState
from jetrl_compile.mutations import without_mutations

FLOW = ("jetrl.quantize", "jetrl.requantize", "jetrl.dequantize")


def uncovered(captured: CapturedGraph) -> list[str]:
    """Return the call nodes that are in no operator or in two; empty if all is well.

    Views, casts and cache writes pass on what another node made; quantizers are part
    of the flow of an edge.
    """
    state = GraphState(without_mutations(captured)[0], {})
    wrong = []
    for index, node in enumerate(state.nodes):
        if node.op != "call" or state.sources.passes[index] or node.target in FLOW:
            continue
        group = state.grouping.group_of.get(index)
        homes = (index in state.sites.sites) + (group is not None)
        listed = group is None or (
            any(group is other for other in state.grouping.groups)
            and group.nodes.count(index) == 1
        )
        if homes != 1 or not listed:
            wrong.append(f"{node.name} ({node.target}) is in {homes} operators")
    return wrong
