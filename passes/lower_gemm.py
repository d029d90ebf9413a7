"""Replace each GEMM whose operands are quantized by `jetrl::gemm`.

fprop and dgrad give BF16, wgrad the dtype of the gradient that is wanted. The provider
is the first of the ordered list that accepts the GEMM; the choice is recorded. An
annotated GEMM that is left is an error.
"""

import torch
from torch.fx import Node

from jetrl_compile.errors import LoweringError
from jetrl_compile.formats import short_name
from jetrl_compile.gemm_sites import GemmSite
from jetrl_compile.kernels.dispatch import GemmShape, select
from jetrl_compile.passes.context import Context, LoweredGemm
from jetrl_compile.passes.graph_nodes import emit, refresh_values, replace_uses

aten = torch.ops.aten
# What the rows of a, the rows of b and the contraction are.
_ORDER = {"fprop": "MNK", "dgrad": "MKN", "wgrad": "NKM"}
_SEEN_THROUGH = (aten.permute.default, aten.t.default, aten.transpose.int)


def lower_gemm(context: Context) -> int:
    """Lower the GEMMs; return how many.

    Raises:
        LoweringError: A GEMM that the recipe names was not lowered.
        ProviderError: No provider accepts one.
    """
    if context.annotated is None:
        return 0
    names: dict[Node, list[str]] = {}
    for name, site in context.built.gemms.items():
        names.setdefault(context.nodes[site.node], []).append(name)
    done: set[Node] = set()
    for name, site in context.built.gemms.items():
        node = context.nodes[site.node]
        if node in context.operands and node not in done:
            _lower(context, name, site, node, tuple(names[node]))
            done.add(node)
    if done:
        context.graph.eliminate_dead_code()
        refresh_values(context.graph)
        context.changed()
    _check_all(context)
    return len(done)


def _lower(
    context: Context, name: str, site: GemmSite, node: Node, names: tuple[str, ...]
) -> None:
    annotated = context.annotated
    assert annotated is not None
    flows = {k: e.flow for k, e in annotated.operands[name].items()}
    a_flow = flows["x" if site.role == "fprop" else "dy"]
    b_flow = flows["x" if site.role == "wgrad" else "w"]
    a, b = context.operands[node]
    wanted: torch.dtype = node.meta["val"].dtype
    out = torch.bfloat16
    if site.role == "wgrad":
        out = torch.float32 if _only_cast_to_fp32(node) else wanted
    # Rows of a, rows of b, contraction: which of M, N and K they are, by role.
    sizes = (_static(a.codes, 0), _static(b.codes, 0), _static(a.codes, 1))
    m, n, k = (sizes[_ORDER[site.role].index(dim)] for dim in "MNK")
    shape = GemmShape(
        role=site.role,
        n=-1 if n is None else n,
        k=-1 if k is None else k,
        a=a_flow,
        b=b_flow,
        m=m,
        out_dtype=short_name(out),
        device_type=node.meta["val"].device.type,
    )
    choice = select(shape, context.providers)
    context.choices[name] = choice
    assert a_flow.granularity is not None
    assert b_flow.granularity is not None
    args = (
        a.codes,
        a.scales,
        b.codes,
        b.scales,
        a_flow.granularity.rows,
        a_flow.granularity.cols,
        b_flow.granularity.rows,
        b_flow.granularity.cols,
        out,
        choice.provider.name,
    )
    graph = context.graph
    with graph.inserting_before(node):
        result = emit(graph, torch.ops.jetrl.gemm.default, args, node)
        context.lowered[result] = LoweredGemm(names, site.role, site.module, shape)
        if site.role == "wgrad" and site.transposed:
            result = emit(graph, aten.permute.default, (result, [1, 0]), node)
        if result.meta["val"].dtype != wanted and site.role != "wgrad":
            cast = torch.ops.prims.convert_element_type.default
            result = emit(graph, cast, (result, wanted), node)
    replace_uses(node, result)
    graph.erase_node(node)


def _static(node: Node, dim: int) -> int | None:
    size = node.meta["val"].shape[dim]
    return size if isinstance(size, int) else None


def _only_cast_to_fp32(node: Node) -> bool:
    """Whether a gradient is only read, transposed perhaps, by casts to FP32."""
    pending, cast = [node], False
    while pending:
        for user in pending.pop().users:
            if user.target in _SEEN_THROUGH:
                pending.append(user)
            elif (
                user.target is torch.ops.prims.convert_element_type.default
                and user.args[1] == torch.float32
            ):
                cast = True
            else:
                return False
    return cast


def _check_all(context: Context) -> None:
    annotated, built = context.annotated, context.built
    assert annotated is not None
    target = torch.ops.jetrl.gemm.default
    lowered = {
        name
        for name, site in built.gemms.items()
        if context.nodes[site.node].target is target
    }
    left = [
        op.name
        for op in annotated.gemms()
        if annotated.is_fp8(op) and op.name not in lowered
    ]
    if left:
        raise LoweringError(
            f"{len(left)} GEMMs that recipe {context.recipe.name!r} names were not "
            f"lowered: {', '.join(left[:5])}; exclude them from the recipe, or report "
            "the graph that 'jetrl graph' writes"
        )
