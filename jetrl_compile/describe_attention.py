"""What fixes an attention's result besides its operands, and what it computes in."""

from jetrl_compile.formats import FLOATING
from jetrl_compile.group_finder import Group
from jetrl_compile.op_classes import ATTENTION, EXACT_ATTENTION, MATMULS, MULS
from jetrl_compile.precision_graph import UNKNOWN, Scalar
from jetrl_compile.tensor_sources import TensorSources, scalar_args

_PLAIN_CACHES = ("auto", "bfloat16", "bf16")


def attention_params(
    group: Group, sources: TensorSources
) -> tuple[dict[str, Scalar], str]:
    """Return an attention's parameters and compute dtype.

    A library's attention keeps scores in FP32. One that is written out rounds them to
    the dtype of its matmuls. An engine's opaque attention has its scale in the
    operator's `attributes`; where nobody knows it, it is `UNKNOWN` and not compared.
    """
    nodes = [sources.nodes[index] for index in group.nodes]
    for index, node in zip(group.nodes, nodes, strict=True):
        if node.target in ATTENTION:
            return _fused(index, sources), "fp32"
    params: dict[str, Scalar] = {}
    for node in nodes:
        scalars = [abs(n) for n in scalar_args(node) if isinstance(n, float)]
        if node.target == "div" and scalars:
            params.setdefault("scale", 1 / scalars[0])
        elif node.target in MULS and scalars:
            params.setdefault("scale", scalars[0])
    products = [node.dtype for node in nodes if node.target in MATMULS]
    rounded = min(products or ["fp32"], key=_width)
    return params, rounded


def _fused(index: int, sources: TensorSources) -> dict[str, Scalar]:
    node = sources.nodes[index]
    params: dict[str, Scalar] = {}
    scale = node.kwargs.get("scale", node.attributes.get("scale"))
    if node.target == EXACT_ATTENTION:
        scale = node.args[5]
    if isinstance(scale, (int, float)):
        params["scale"] = float(scale)
    elif "." in node.target:  # an engine's operator, with a scale of its own
        params["scale"] = UNKNOWN
    else:  # the default of torch: 1 / sqrt(head size)
        size = sources.nodes[sources.inputs[index][0]].shape[-1:]
        params["scale"] = float(size[0]) ** -0.5 if size and size[0] else UNKNOWN
    for key in ("kv_cache_dtype", "softcap", "window"):
        value = node.attributes.get(key)
        if value is not None and value not in _PLAIN_CACHES:
            params[key] = value
    return params


def _width(dtype: str) -> int:
    return FLOATING.index(dtype) if dtype in FLOATING else len(FLOATING)
