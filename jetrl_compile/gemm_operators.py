"""Operators for weight GEMMs: one for each layer that a GEMM holds."""

from jetrl_compile.captured_graph import CapturedNode
from jetrl_compile.formats import Flow
from jetrl_compile.gemm_sites import GemmSite
from jetrl_compile.graph_state import GraphState
from jetrl_compile.lowered_flow import lowered_flow, lowered_provider, stored_flow
from jetrl_compile.op_classes import BF16_GEMM, LOWERED_GEMM
from jetrl_compile.precision_graph import Operator

_OPERANDS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}


def add_gemm(state: GraphState, index: int, node: CapturedNode, site: GemmSite) -> None:
    """Add the operators of a weight GEMM, and of the bias that it adds.

    Args:
        state: The graph that is built.
        index: The node of the GEMM.
        node: The same.
        site: What the GEMM is.
    """
    lowered = node.target == LOWERED_GEMM
    provider = lowered_provider(node) if lowered else "aten"
    if node.target == BF16_GEMM:
        provider = str(node.args[2])
    invariant = state.batch_invariant.get(provider)
    names = []
    for module, params in state.fused.split(site):
        name = state.operator(
            index,
            f"{module}:{site.role}",
            "gemm",
            module=module,
            params=tuple(sorted(params.items())),
            compute_dtype="fp32",
            provider=provider,
            batch_invariant=invariant,
        )
        names.append(name)
        state.gemms[name] = site
    state.made[index] = names
    left, right = _OPERANDS[site.role]
    operands: list[tuple[str, int, Flow | None]]
    if lowered:
        operands = [
            (operand, *lowered_flow(state.sources, node, codes, site.role))
            for operand, codes in ((left, 0), (right, 2))
        ]
    else:
        a, b = site.a, site.b
        if site.role == "wgrad" and site.transposed:
            a, b = b, a
        weight = None
        if right == "w":
            weight = stored_flow(state.sources, site) or state.flow(site.weight_dtype)
        operands = [(left, a, None), (right, b, weight)]
    tied = _tied_weight(state, site) if right == "w" and len(names) == 1 else ""
    for number, name in enumerate(names):
        for operand, read, flow in operands:
            if operand == "w" and tied:
                assert flow is not None
                state.link(tied, name, operand, flow)
            else:
                state.part_edge(name, operand, read, flow, number, len(names))
    if site.bias is not None and not lowered:
        state.made[index] = [
            _bias(state, index, name, site.bias, number, len(names))
            for number, name in enumerate(names)
        ]


def _tied_weight(state: GraphState, site: GemmSite) -> str:
    """Return the layer's own name of a weight that another module owns, or "".

    A rollout model may store the two apart (the head in FP8, the embedding in BF16), so
    the head's weight has one name on both sides.
    """
    stored = state.nodes[state.sites.stored(site.weight)].module
    owner = stored.rpartition(".")[0]
    if not owner or owner == site.module:
        return ""
    name = f"{site.module}.weight"
    if name not in state.node_of:
        state.operators.append(
            Operator(name, "parameter", module=site.module, reason=f"tied to {stored}")
        )
        state.node_of[name] = state.nodes[site.weight].name
    return name


def _bias(
    state: GraphState, index: int, gemm: str, bias: int, part: int, of: int
) -> str:
    """The bias that a GEMM kernel adds to its FP32 accumulator."""
    module = gemm.rpartition(":")[0]
    name = state.operator(
        index,
        f"{module}:bias_add",
        "bias_add",
        module=module,
        compute_dtype="fp32",
        provider="aten",
    )
    state.link(gemm, name, "x", state.flow("fp32"))
    state.part_edge(name, "bias", bias, None, part, of)
    return name
