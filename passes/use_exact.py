"""Put the operators of exact mode in the place of the model's, in forward.

RMSNorm, SiLU * mul, rotary embeddings and the GEMMs that stay in BF16 become `jetrl`
operators, which give a row the same bits in every batch, in the trainer and in the
rollout model. Backward stays as autograd wrote it: it reads the factor that the norm's
operator returns, and makes again what else it reads of these.
"""

import torch
from torch.fx import Node

from jetrl_compile.errors import LoweringError
from jetrl_compile.kernel_claims import not_exact
from jetrl_compile.kernels import exact_ops
from jetrl_compile.kernels.exact_kernels import bf16_gemm_provider
from jetrl_compile.passes.context import Context
from jetrl_compile.passes.exact_forms import (
    Rotation,
    chain,
    is_backward,
    leave_to_backward,
    match_rotation,
)
from jetrl_compile.passes.fused_patterns import (
    Gated,
    RmsNorm,
    match_gated,
    match_norm,
)
from jetrl_compile.passes.graph_nodes import (
    emit,
    emit_item,
    refresh_values,
    replace_uses,
    sort_nodes,
)

aten = torch.ops.aten


def use_exact(context: Context) -> int:
    """Replace norms, activations and rotary embeddings; return how many."""
    if not context.exact:
        return 0
    count = _split_bias(context)
    for node in list(context.graph.nodes):
        if node.op != "call_function" or is_backward(node):
            continue
        rotation = match_rotation(node)
        norm = None if rotation else match_norm(node)
        gated = None if rotation or norm else match_gated(node)
        if rotation is not None:
            _rotate(context, rotation)
        elif norm is not None and not norm.exact:
            _norm(context, norm)
        elif gated is not None and not gated.exact:
            _gate(context, gated)
        else:
            continue
        count += 1
    if count:
        _finish(context)
    return count


def _finish(context: Context) -> None:
    sort_nodes(context.graph)
    context.graph.eliminate_dead_code()
    refresh_values(context.graph)
    context.changed()


def _split_bias(context: Context) -> int:
    """Add biases to products that are rounded to BF16, as to those of FP8 GEMMs."""
    count = 0
    for node in context.graph.find_nodes(op="call_function", target=aten.addmm.default):
        if is_backward(node) or not _is_plain(node):
            continue
        bias, a, b = node.args
        with context.graph.inserting_before(node):
            product = emit(context.graph, aten.mm.default, (a, b), node)
            total = emit(context.graph, aten.add.Tensor, (product, bias), node)
        replace_uses(node, total)
        context.graph.erase_node(node)
        count += 1
    return count


def _norm(context: Context, norm: RmsNorm) -> None:
    graph, result = context.graph, norm.result
    assert norm.rstd is not None
    nodes = chain(result, [norm.x, norm.weight, norm.rstd])
    with graph.inserting_before(norm.wide):
        eps = (None, norm.eps) if isinstance(norm.eps, Node) else (norm.eps, None)
        args = (norm.x, norm.weight, *eps)
        node = emit(graph, exact_ops.rms_norm, args, result)
        y = emit_item(graph, node, 0, result)
        rstd = emit_item(graph, node, 1, norm.rstd)
    replace_uses(result, y)
    replace_uses(norm.rstd, rstd)
    graph.erase_node(result)
    leave_to_backward(nodes[:-1])


def _gate(context: Context, gated: Gated) -> None:
    graph, result = context.graph, gated.result
    assert gated.silu is not None
    nodes = chain(gated.silu, [gated.gate])
    with graph.inserting_before(result):
        args = (gated.gate, gated.up)
        y = emit(graph, exact_ops.silu_mul, args, gated.silu)
    replace_uses(result, y)
    graph.erase_node(result)
    leave_to_backward(nodes)


def _rotate(context: Context, rotation: Rotation) -> None:
    graph, result = context.graph, rotation.result
    with graph.inserting_before(result):
        args = (rotation.x, rotation.cos, rotation.sin)
        y = emit(graph, exact_ops.rope, args, result)
    replace_uses(result, y)
    graph.erase_node(result)


def use_exact_gemms(context: Context) -> int:
    """Replace the forward GEMMs of weights that stay in BF16; return how many.

    Raises:
        ProviderError: No kernel that is independent of the batch can run.
    """
    if not context.exact:
        return 0
    count = 0
    sites = context.built.gemms.values()
    own = [s for s in sites if s.role == "fprop" and s.module not in context.outside]
    for node in {context.nodes[s.node]: None for s in own}:
        if node.target is aten.mm.default and _is_plain(node):
            _gemm(context, node)
            count += 1
    if count:
        _finish(context)
    return count


def _is_plain(node: Node) -> bool:
    if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
        return False
    tensors = [a for a in node.args if isinstance(a, Node)]
    return all(t.meta["val"].dtype is torch.bfloat16 for t in (*tensors, node))


def _gemm(context: Context, node: Node) -> None:
    x, w = node.args
    graph = context.graph
    provider = bf16_gemm_provider(node.meta["val"].device.type)
    with graph.inserting_before(node):
        stored = emit(graph, aten.permute.default, (w, [1, 0]), node)
        result = emit(graph, exact_ops.bf16_gemm, (x, stored, provider), node)
    replace_uses(node, result)
    graph.erase_node(node)


def check_exact(context: Context) -> int:
    """Return how many operators' bits are proved to be independent of the batch.

    Raises:
        LoweringError: Others are left, and the graph is to be exact.
    """
    if not context.exact or context.final is None:
        return 0
    reasons: list[str] = []
    for op in context.final.operators:
        reason = not_exact(op)
        if reason:
            reasons.append(reason)
    context.notes += reasons
    if reasons and context.exact != "report":
        raise LoweringError(
            f"exact mode: {len(reasons)} operators may give a token other bits in "
            f"another batch, first: {reasons[0]}; docs/exact.md lists what has a kernel"
        )
    return len(context.final.operators) - len(reasons)
