"""Let GEMMs quantize their weights themselves, and keep the codes from call to call.

`jetrl::gemm_weights` makes them anew when a weight has changed. Only weights that the
model stores are kept: one that the graph computes (a merged adapter, an FP32 master
rounded to BF16) is another tensor at each call. Under CUDA graphs nothing is kept: a
replay would not see a new version, and what is made in a graph's memory ends with it.
"""

from typing import Any

from torch.fx import Node

from jetrl_compile.kernels import fused_ops, ops, weight_ops
from jetrl_compile.passes.context import Context
from jetrl_compile.passes.expand_fused import ORIGIN, SUM
from jetrl_compile.passes.graph_nodes import emit, maker_of


def cache_weights(context: Context) -> int:
    """Rewrite GEMMs with stored weights; return how many."""
    if context.annotated is None or not context.cache_weights:
        return 0
    if context.cuda_graphs:
        context.notes.append(
            "weights are quantized in each call, although cache_weights is set: a CUDA "
            "graph replays what it recorded, and its memory cannot be kept"
        )
        return 0
    count = 0
    for node, gemm in list(context.lowered.items()):
        found = _weights(node.args[2]) if gemm.role != "wgrad" else None
        if found is None:
            continue
        weights, transpose, scale_format, floor = found
        a, a_scales, _, _, *numbers, out_dtype, provider = node.args
        last = (*numbers, scale_format, floor, out_dtype, provider)
        args = (a, a_scales, weights, transpose, *last)
        with context.graph.inserting_before(node):
            result = emit(context.graph, weight_ops.gemm_weights, args, node)
        for key in (ORIGIN, SUM):
            if key in node.meta:
                result.meta[key] = node.meta[key]
        node.replace_all_uses_with(result)
        context.graph.erase_node(node)
        context.lowered[result] = context.lowered.pop(node)
        count += 1
    if count:
        context.graph.eliminate_dead_code()
        context.changed()
    return count


def _weights(codes: Any) -> tuple[list[Node], bool, Any, Any] | None:
    """The stored weights that codes are made of, and how."""
    made = maker_of(codes, ops.quantize, fused_ops.quantize_parts)
    if made is None:
        return None
    if made.target is ops.quantize:
        weights: Any = [made.args[0]]
        _, _, transpose, scale_format, floor = made.args[1:6]
    elif made.args[1] == 0:
        weights = list(made.args[0])  # type: ignore[arg-type]
        _, _, transpose, scale_format, floor = made.args[2:7]
    else:
        return None
    if any(w.op != "placeholder" for w in weights):
        return None
    return weights, bool(transpose), scale_format, floor
