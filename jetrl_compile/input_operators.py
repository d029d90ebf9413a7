"""Operators for a graph's inputs, parameters and outputs."""

from jetrl_compile.captured_graph import CapturedNode, Ref
from jetrl_compile.graph_state import GraphState
from jetrl_compile.op_classes import LOWERED_DEQUANTIZE, LOWERED_GEMM
from jetrl_compile.tensor_sources import ROPE_TABLE

_SCALE_PLACES = {LOWERED_DEQUANTIZE: (1,), LOWERED_GEMM: (1, 3)}


def add_placeholder(
    state: GraphState, index: int, node: CapturedNode, number: int
) -> None:
    """Add the operators of a placeholder: several where it is a fused layer's weight.

    Args:
        state: The graph that is built.
        index: The placeholder.
        node: The same.
        number: How many inputs came before it.
    """
    if node.target == "input" or not node.module:
        name = "tangents:input" if node.backward else f"input.{number}"
        state.operator(index, name, "input")
        return
    if node.module.endswith(ROPE_TABLE):
        # One table for all layers, made in FP32, as Hugging Face's module makes it.
        if any(op.kind == "rope_table" for op in state.operators):
            state.made[index] = ["model.rotary_emb:rope_table"]
            return
        state.operator(
            index,
            "model.rotary_emb:rope_table",
            "rope_table",
            module="model.rotary_emb",
            compute_dtype="fp32",
        )
        return
    if _holds_scales(state, index):
        return  # part of the flow of the edge that reads the codes
    parts = state.fused.parameter_names(index)
    if parts is None:
        module = node.module.rpartition(".")[0]
        reason = f"stored {node.dtype}"
        state.operator(index, node.module, "parameter", module=module, reason=reason)
        return
    names: list[str] = []
    for name in parts:
        module = name.rpartition(".")[0]
        reason = f"stored {node.dtype}"
        state.operator(index, name, "parameter", module=module, reason=reason)
        names += state.made[index]
    state.made[index] = names


def add_output(state: GraphState, index: int) -> None:
    """Add the operator that stands for what the graph returns."""
    target = state.operator(index, "output", "output", module="")
    seen: set[tuple[int, int]] = set()
    for read in state.sources.inputs[index]:
        source = state.sources.source(read)
        key = (source.index, source.slot)
        if state.nodes[source.index].backward or key in seen:
            continue
        seen.add(key)
        state.edge(target, f"out.{len(seen) - 1}", read)


def _holds_scales(state: GraphState, index: int) -> bool:
    """Whether a buffer is read only as the scales of stored codes."""
    users = [state.nodes[user] for user in state.sources.users[index]]
    return bool(users) and all(
        any(
            isinstance(user.args[place], Ref) and user.args[place].index == index
            for place in _SCALE_PLACES.get(user.target, ())
        )
        for user in users
    )
