"""The differences between any two precision graphs, in both directions."""

from jetrl_compile.differences import FLOW_ATTRIBUTES, Comparison, Difference
from jetrl_compile.precision_graph import PrecisionGraph

_STRUCTURE = ("kind", "phase", "module")
_FLOW = ("compute_dtype", "provider", "batch_invariant")


def diff_graphs(
    a: PrecisionGraph, b: PrecisionGraph, *, sides: tuple[str, str] = ("a", "b")
) -> list[Difference]:
    """Compare two graphs in everything but reasons, meta data and order.

    Other than `check_containment` this is symmetric, leaves nothing out (integers,
    backward operators, `saved_dtype`, every kernel) and judges nothing. An operator
    that one graph lacks stands for the edges into it.

    Args:
        a: A graph; its values are in `Difference.rollout`.
        b: Another; its values are in `Difference.train`.
        sides: What messages call them.

    Returns:
        Differences in the execution order of `a`, then what only `b` has.
    """
    compare = Comparison(sides, remedies=False)
    found: list[Difference] = []
    for op in a.operators:
        other = b.by_name.get(op.name)
        if other is None:
            found.append(compare.missing_operator(op, absent=1))
            continue
        for level, names in ((1, _STRUCTURE), (2, _FLOW)):
            for name in names:
                left, right = getattr(op, name), getattr(other, name)
                if left != right:
                    found.append(compare.values(level, op.name, name, left, right))
        found += compare.params(op, other)
        if formula := compare.formula(op, other):
            found.append(formula)
        others = b.operands[op.name]
        for edge in a.operands[op.name].values():
            match = others.get(edge.operand)
            if match is None:
                found.append(compare.missing_edge(edge, absent=1))
                continue
            if edge.source != match.source:
                sources = edge.source, match.source
                found.append(
                    compare.values(2, op.name, "source", *sources, edge.operand)
                )
            found += compare.flows(edge, match, FLOW_ATTRIBUTES)
        mine = a.operands[op.name]
        found += [
            compare.missing_edge(edge, absent=0)
            for edge in others.values()
            if edge.operand not in mine
        ]
    found += [
        compare.missing_operator(op, absent=0)
        for op in b.operators
        if op.name not in a.by_name
    ]
    return found
