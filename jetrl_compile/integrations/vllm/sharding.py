"""Read one rank's graph of a tensor-parallel model as that of the whole model.

Column-parallel layers have a part of the rows, row-parallel ones a part of the columns
and a sum over ranks behind them, the embedding a part of the vocabulary. The sums are
of BF16 results, which the unsharded model does not round: the graph's `meta` says so.
"""

from collections.abc import Mapping
from dataclasses import replace

from jetrl_compile.captured_graph import CapturedGraph, CapturedNode, Ref
from jetrl_compile.graph_builder import BuiltGraph

WholeShapes = Mapping[str, tuple[int, int]]
_SUMS = (
    "vllm.all_reduce",
    "_c10d_functional.all_reduce",
    "_c10d_functional.wait_tensor",
)
_MASKS = ("where", "masked_fill")
META = "partial_sums"


def without_sums(captured: CapturedGraph) -> int:
    """Let sums over ranks pass their input on, in place; return how many there were.

    Args:
        captured: One rank's graph; ids of other ranks' words are masked out of the
            embedding's result before its sum.
    """
    nodes = captured.nodes
    count = 0
    for node in nodes:
        if node.target in _SUMS:
            count += node.target != "_c10d_functional.wait_tensor"
            _pass(node, node.args[0])
        elif node.target in _MASKS:
            for arg in node.args:
                if isinstance(arg, Ref) and nodes[arg.index].target == "embedding":
                    _pass(node, arg)
    return count


def _pass(node: CapturedNode, source: Ref) -> None:
    node.target, node.args, node.kwargs = "alias", (source,), {}


def with_whole_shapes(built: BuiltGraph, shapes: WholeShapes) -> BuiltGraph:
    """Return a graph whose GEMMs have the sizes of the unsharded layers.

    Args:
        built: Of one rank.
        shapes: N and K of whole layers, by module.
    """
    operators = []
    for op in built.graph.operators:
        whole = shapes.get(op.module)
        if op.kind == "gemm" and whole is not None:
            sizes = {"N": whole[0], "K": whole[1]}
            params = tuple((key, sizes.get(key, value)) for key, value in op.params)
            op = replace(op, params=params)
        operators.append(op)
    graph = replace(built.graph, operators=tuple(operators))
    return replace(built, graph=graph)
