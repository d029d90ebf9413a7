"""The last pass: quantizers bring the weight of the GEMM behind them into the L2 cache.

It runs after the graph has been read and verified, and only changes which operator
quantizes: `kernels/ahead_ops.py` has those that bring a weight, and why.
"""

import operator

from torch.fx import Graph, Node

from jetrl_compile.kernels import ops
from jetrl_compile.kernels.ahead_ops import AHEAD
from jetrl_compile.kernels.gemm_parts import gemm_parts

_GEMMS = (ops.gemm, gemm_parts)
_TRACED = "eager_input_vals"  # which Inductor keeps the strides of
_CODES = 0  # of the results of a quantizer, those of its matrix


def bring_weights(graph: Graph) -> int:
    """Replace quantizers whose codes one GEMM reads; return how many.

    Args:
        graph: As `run_passes` left it; weights are inputs or attributes.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    count = 0
    for node in list(graph.nodes):
        other = AHEAD.get(node.target) if node.op == "call_function" else None
        weight = _next_weight(node) if other is not None else None
        if other is None or weight is None or order[weight] > order[node]:
            continue
        node.target = other
        node.args = (*node.args, weight)
        if (known := node.meta.get(_TRACED)) is not None:
            args, kwargs = known
            node.meta[_TRACED] = ((*args, weight.meta["val"]), kwargs)
        count += 1
    if count:
        graph.lint()
    return count


def _next_weight(quantizer: Node) -> Node | None:
    """Return the codes that a quantizer's are multiplied with, if it is one matrix."""
    weights = {
        weight
        for codes in quantizer.users
        if codes.target is operator.getitem and codes.args[1] == _CODES
        for gemm in codes.users
        if gemm.target in _GEMMS and gemm.args[0] is codes
        if isinstance(weight := gemm.args[2], Node)
    }
    return weights.pop() if len(weights) == 1 else None
