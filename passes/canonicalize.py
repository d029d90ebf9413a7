"""One spelling for what the later passes match: views, biases, batched GEMMs.

- Equal views of one tensor become one node, so that the siblings of a fused GEMM (q, k
  and v) read the same x and share its quantization.
- `addmm` becomes `mm` and `add` where the recipe quantizes the GEMM: an FP8 GEMM has a
  BF16 result, and the bias is added to that, in the trainer as in vLLM.
- `bmm` with one weight expanded over the batch becomes `mm` over all tokens.

A graph without such nodes is left as it is.
"""

from typing import Any

import torch
from torch.fx import Node

from jetrl_compile.capture import op_name, tensor_shape
from jetrl_compile.captured_graph import CapturedNode
from jetrl_compile.errors import LoweringError
from jetrl_compile.matrix_views import is_transposed
from jetrl_compile.passes.annotate_precision import annotate_precision
from jetrl_compile.passes.context import Context
from jetrl_compile.passes.graph_nodes import emit, hashable

aten = torch.ops.aten
_VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.t.default,
    aten.transpose.int,
    aten.alias.default,
)


def canonicalize(context: Context) -> int:
    """Rewrite the graph; return the number of nodes that were replaced.

    Raises:
        LoweringError: A GEMM is no longer recognized in its new spelling.
    """
    if not (context.recipe.quantizes(context.phase) or context.exact):
        return 0
    before = context.built.gemms
    count = _merge_views(context) + _split_bias(context) + _flatten_bmm(context)
    if count:
        context.graph.eliminate_dead_code()
        context.changed()
        lost = [name for name in before if name not in context.built.gemms]
        if lost:
            raise LoweringError(
                f"{', '.join(lost[:5])} cannot be recognized in canonical form; this "
                "is a fault of the compiler, please report it, or exclude the module "
                "from the recipe"
            )
    return count


def _merge_views(context: Context) -> int:
    seen: dict[Any, Node] = {}
    count = 0
    for node in list(context.graph.nodes):
        if node.op != "call_function" or node.target not in _VIEWS or node.kwargs:
            continue
        key = (node.target, hashable(node.args), node.meta.get("partitioner_tag"))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            context.graph.erase_node(node)
            count += 1
    return count


def _gemm_nodes(context: Context, target: Any) -> list[tuple[str, Node]]:
    """The GEMMs of a spelling that the passes replace: operator name and node.

    Those that the recipe quantizes; in exact mode, all of forward.
    """
    built = context.built
    spelled = {
        name: context.nodes[site.node]
        for name, site in built.gemms.items()
        if context.nodes[site.node].target is target
    }
    if not spelled:
        return []
    graph = annotate_precision(built.graph, context.recipe, context.phase)
    return [
        (name, node)
        for name, node in spelled.items()
        if graph.is_fp8(graph.by_name[name])
        or (context.exact and built.gemms[name].role == "fprop")
    ]


def _split_bias(context: Context) -> int:
    found = {node: None for _, node in _gemm_nodes(context, aten.addmm.default)}
    for node in found:
        bias, a, b = node.args
        with context.graph.inserting_before(node):
            product = emit(context.graph, aten.mm.default, (a, b), node)
            total = emit(context.graph, aten.add.Tensor, (product, bias), node)
        node.replace_all_uses_with(total)
        context.graph.erase_node(node)
    if found:
        context.changed()
    return len(found)


def _flatten_bmm(context: Context) -> int:
    found = {node: None for _, node in _gemm_nodes(context, aten.bmm.default)}
    for node in found:
        a, b = node.args
        assert isinstance(a, Node)
        assert isinstance(b, Node)
        graph = context.graph
        w, flipped = _unexpanded(b)
        with graph.inserting_before(node):
            cols = _size(context, a, 2, node)
            x = emit(graph, aten.reshape.default, (a, [-1, cols]), node)
            if flipped:
                w = emit(graph, aten.permute.default, (w, [1, 0]), node)
            product = emit(graph, aten.mm.default, (x, w), node)
            shape = [_size(context, a, dim, node) for dim in (0, 1)]
            shape.append(_size(context, product, 1, node))
            result = emit(graph, aten.view.default, (product, shape), node)
        node.replace_all_uses_with(result)
        context.graph.erase_node(node)
    return len(found)


def _unexpanded(batched: Node) -> tuple[Node, bool]:
    """The matrix that was expanded over a batch, and whether it was transposed then."""
    views: list[CapturedNode] = []
    while batched.meta["val"].dim() != 2:
        shape = tensor_shape(batched.meta["val"])
        name, args = op_name(batched.target), tuple(batched.args)
        views.append(CapturedNode(name, "call", name, args, {}, "", shape))
        (batched,) = (arg for arg in batched.args[:1] if isinstance(arg, Node))
    flipped = is_transposed(tensor_shape(batched.meta["val"]), views[::-1])
    assert flipped is not None
    return batched, flipped


def _size(context: Context, tensor: Node, dim: int, anchor: Node) -> Node | int:
    """A size as an argument: a number, or the node that reads a symbolic one."""
    size = tensor.meta["val"].shape[dim]
    if isinstance(size, int):
        return size
    return emit(context.graph, aten.sym_size.int, (tensor, dim), anchor)
