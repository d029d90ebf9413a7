"""Put the recipe on every edge of a precision graph.

Each weight GEMM gets the flows of the recipe on its operands, or the reason why it
stays in high precision. Routers and output heads are told by what they do, not by what
they are called.
"""

from collections import deque
from dataclasses import replace

from jetrl_compile.errors import ModelError
from jetrl_compile.precision_graph import (
    GEMM_KINDS,
    Edge,
    Operator,
    PrecisionGraph,
)
from jetrl_compile.recipe import GEMM_ROLES, Recipe

GROUPED_REASON = (
    "grouped expert GEMM: no FP8 kernel groups experts yet, so it stays in BF16"
)
OTHER_REASON = (
    "its weight is computed, a part of a parameter, or not read as one matrix: there "
    "are no stored codes for it, so it stays in BF16"
)
_REASONS = {"grouped_gemm": GROUPED_REASON, "other_gemm": OTHER_REASON}
_HEAD_NAMES = ("lm_head", "embed_out", "output_layer", "score")
_LAYERS = (*GEMM_KINDS, "norm", "residual_add", "attention", "rope")
# Operators that a router's result passes through on its way to the choice of experts.
_TOWARDS_CHOICE = (
    "elementwise",
    "softmax",
    "reduction",
    "bias_add",
    "activation",
    "routing",
    "index",
    "unknown",
)


def annotate_precision(
    graph: PrecisionGraph, recipe: Recipe, phase: str
) -> PrecisionGraph:
    """Return the graph with the recipe's flows and reasons.

    Args:
        graph: A precision graph without FP8, or one that was annotated before.
        recipe: The recipe.
        phase: "train" or "rollout".

    Raises:
        ModelError: A GEMM that the recipe names has FP16 or FP64 operands.
    """
    roles = linear_roles(graph)
    kept: dict[str, str] = {}
    for operator in graph.operators:
        if operator.kind in _REASONS:
            kept[operator.name] = _REASONS[operator.kind]
        elif operator.kind == "gemm":
            reason = recipe.reason_to_keep(
                operator.module, roles.get(operator.module, "linear"), phase
            )
            if reason is not None:
                kept[operator.name] = reason
    lowered = {op.name for op in graph.gemms() if op.name not in kept}
    for name in lowered:
        _check_dtypes(graph, name)
    edges = tuple(_annotate(edge, lowered, recipe) for edge in graph.edges)
    # A bias is added to the BF16 result of an FP8 GEMM, not to its accumulator, in the
    # dtype of the bias: BF16, or FP32 in a model of FP32.
    biased = {
        edge.target: graph.operands[edge.target]["bias"].flow.dtype
        for edge in graph.edges
        if edge.source in lowered and graph.by_name[edge.target].kind == "bias_add"
    }
    operators = tuple(
        replace(op, reason=kept[op.name]) if op.name in kept else _without_reason(op)
        for op in graph.operators
    )
    operators = tuple(
        replace(op, compute_dtype=biased.get(op.name, op.compute_dtype))
        for op in operators
    )
    return PrecisionGraph(operators, edges, graph.meta)


def _without_reason(operator: Operator) -> Operator:
    if operator.kind in GEMM_KINDS and operator.reason:
        return replace(operator, reason="")
    return operator


def linear_roles(graph: PrecisionGraph) -> dict[str, str]:
    """Return the modules that are no plain linear layer: "lm_head" or "router".

    A router's result reaches a top-k choice. An output head shares its weight with an
    embedding; or makes as many numbers a token as an embedding of the graph has rows
    (`meta["vocabulary"]`), and no layer follows it; or is called as heads are, which is
    all that is left to tell where a head is compiled alone.
    """
    readers: dict[str, list[str]] = {}
    for edge in graph.edges:
        readers.setdefault(edge.source, []).append(edge.target)
    tables = {
        edge.source
        for edge in graph.edges
        if graph.by_name[edge.target].kind == "embedding"
    }
    vocabulary = set(graph.meta.get("vocabulary", "").split())
    roles: dict[str, str] = {}
    for gemm in graph.gemms("fprop"):
        operands = graph.operands[gemm.name]
        rows = str(dict(gemm.params).get("N", ""))
        if (
            ("w" in operands and operands["w"].source in tables)
            or gemm.module.rpartition(".")[2] in _HEAD_NAMES
            or (rows in vocabulary and _is_last(graph, gemm.name, readers))
        ):
            roles[gemm.module] = "lm_head"
        elif _chooses(graph, gemm.name, readers):
            roles[gemm.module] = "router"
    return roles


def _is_last(graph: PrecisionGraph, name: str, readers: dict[str, list[str]]) -> bool:
    """Whether no layer of the forward pass reads what a GEMM leads to."""
    pending = deque(readers.get(name, ()))
    seen: set[str] = set()
    while pending:
        target = pending.popleft()
        operator = graph.by_name[target]
        if target in seen or operator.phase == "backward":
            continue
        if operator.kind in _LAYERS:
            return False
        seen.add(target)
        pending.extend(readers.get(target, ()))
    return True


def _chooses(graph: PrecisionGraph, name: str, readers: dict[str, list[str]]) -> bool:
    """Whether a GEMM's result reaches a choice of experts."""
    pending = deque(readers.get(name, ()))
    seen: set[str] = set()
    while pending:
        target = pending.popleft()
        operator = graph.by_name[target]
        if target in seen or operator.kind not in _TOWARDS_CHOICE:
            continue
        seen.add(target)
        if operator.kind == "routing" and operator.role.startswith(("topk", "routing")):
            return True
        pending.extend(readers.get(target, ()))
    return False


def _check_dtypes(graph: PrecisionGraph, name: str) -> None:
    for operand, edge in graph.operands[name].items():
        if edge.flow.dtype in ("fp16", "fp64", "e5m2"):
            module = graph.by_name[name].module
            raise ModelError(
                f"operand {operand} of {module} is {edge.flow.dtype}; the precision "
                "flow needs BF16 or FP32: convert the model with "
                "model.to(torch.bfloat16), or exclude the module from the recipe"
            )


def _annotate(edge: Edge, lowered: set[str], recipe: Recipe) -> Edge:
    if edge.target in lowered and recipe.flows is not None:
        role = edge.target.rpartition(":")[2].partition(".")[0]
        if role in GEMM_ROLES and edge.operand in ("x", "w", "dy"):
            flow = recipe.flows.flow(role, edge.operand)
            if role == "fprop" and edge.flow.saved_dtype is not None:
                flow = flow.saved_as("e4m3")
            return replace(edge, flow=flow)
    if edge.source in lowered and edge.flow.dtype == "fp32":
        # FP8 GEMMs of fprop and dgrad give BF16.
        return replace(edge, flow=replace(edge.flow, dtype="bf16"))
    return edge
