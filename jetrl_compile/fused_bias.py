"""Operators for a bias that is added to the result of a fused layer."""

from jetrl_compile.graph_state import GraphState


def add_fused_bias(state: GraphState, index: int) -> None:
    """Add one bias add for each part of a fused layer.

    Args:
        state: The graph that is built.
        index: The node that adds the bias.
    """
    gemm = state.fused.biased[index]
    parts = list(state.made[gemm])
    bias = state.fused.bias_of(index)
    dtype = state.nodes[index].dtype
    names = []
    for number, part in enumerate(parts):
        module = part.rpartition(":")[0]
        name = state.operator(
            index,
            f"{module}:bias_add",
            "bias_add",
            module=module,
            compute_dtype=dtype,
            provider="aten",
        )
        state.link(part, name, "x", state.flow(dtype))
        state.part_edge(name, "bias", bias, None, number, len(parts))
        names.append(name)
    state.made[index] = names
