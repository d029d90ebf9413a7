"""Read the lowered graph back and compare it with what the recipe asked for.

The graph that will run is built into a precision graph anew, from the operators that
are in it, and must equal the annotated one, operator by operator and edge by edge.
"""

from dataclasses import replace

from jetrl_compile.errors import LoweringError
from jetrl_compile.passes.context import Context
from jetrl_compile.precision_graph import Edge, Operator, PrecisionGraph


def verify(context: Context) -> int:
    """Set `context.final`; return the number of GEMMs that are FP8 in it.

    Raises:
        LoweringError: The lowered graph differs from the annotated one, or the gradient
            of a layer's weight is not known as one.
    """
    context.graph.lint()
    annotated = context.annotated
    found = context.built.graph
    if annotated is None:
        context.final = found
        return 0
    reasons = {op.name: op.reason for op in annotated.operators}
    context.final = PrecisionGraph(
        tuple(_with_reason(op, reasons.get(op.name, "")) for op in found.operators),
        found.edges,
        found.meta,
    )
    _check_lost(context, context.final)
    wrong = _differences(annotated, context.final, fused=context.fuse)
    wrong += [
        f"the result that was {before or 'no GEMM'} is {after or 'no GEMM'}"
        for before, after in zip(context.results, context.gemm_results(), strict=True)
        if before != after
    ]
    if wrong:
        raise LoweringError(
            f"the lowered graph differs from the annotated one in {len(wrong)} places, "
            f"first: {wrong[0]}; this is a fault of the compiler, please report it"
        )
    return sum(context.final.is_fp8(op) for op in context.final.gemms())


def _check_lost(context: Context, graph: PrecisionGraph) -> None:
    """Refuse a product of backward that might be the wgrad of an FP8 layer."""
    for module in dict.fromkeys(context.built.lost):
        operator = graph.by_name.get(f"{module}:fprop")
        if operator is not None and graph.is_fp8(operator):
            raise LoweringError(
                f"a matrix product in backward reads the input of {module}, which is "
                "FP8, and was not recognized as a gradient of its weight, so it would "
                "run in high precision; this is a fault of the compiler, please report "
                "it; until then, compile each decoder layer with "
                "jetrl_compile.layers.compile_layers"
            )


def _with_reason(operator: Operator, reason: str) -> Operator:
    return replace(operator, reason=reason) if reason else operator


def _differences(
    wanted: PrecisionGraph, found: PrecisionGraph, *, fused: bool = False
) -> list[str]:
    # First what became something else: what is missing or new often follows from it.
    wrong: list[str] = []
    for name, operator in wanted.by_name.items():
        other = found.by_name.get(name)
        # The provider and what it says of itself are chosen after annotation.
        if other is not None and operator != replace(
            other,
            provider=operator.provider,
            batch_invariant=operator.batch_invariant,
        ):
            wrong.append(f"{operator} became {other}")
    missing: list[str] = []
    for key, edge in wanted.by_key.items():
        read = found.by_key.get(key)
        if read is None:
            missing.append(f"edge '{edge}' is missing")
        elif read != edge and not (fused and _saved_otherwise(edge, read)):
            wrong.append(f"edge '{edge}' became '{read}'")
    wrong += [
        f"{name} is missing" for name in wanted.by_name if name not in found.by_name
    ]
    wrong += [f"{name} is new" for name in found.by_name if name not in wanted.by_name]
    wrong += missing
    wrong += [
        f"edge '{edge}' is new"
        for key, edge in found.by_key.items()
        if key not in wanted.by_key
    ]
    return wrong


def _saved_otherwise(wanted: Edge, found: Edge) -> bool:
    """Whether only what is kept for backward differs: fused kernels may remake it."""
    flow = found.flow.saved_as(wanted.flow.saved_dtype)
    return replace(found, flow=flow) == wanted
