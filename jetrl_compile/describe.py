"""What an operator is: the kind, name and parameters of a group of captured nodes."""

from dataclasses import dataclass

from jetrl_compile.capture import CapturedNode, Ref
from jetrl_compile.formats import FLOATING
from jetrl_compile.node_groups import Group, is_activation_class
from jetrl_compile.op_classes import (
    ACTIVATIONS,
    ADDS,
    ATTENTION,
    EMBEDDINGS,
    GATED_ACTIVATIONS,
    GROUPED_GEMMS,
    MATMULS,
    NORMS,
    POINTWISE,
    ROPES,
    SOFTMAXES,
    TOPKS,
)
from jetrl_compile.precision_graph import Scalar
from jetrl_compile.tensor_sources import TensorSources, scalar_args

_ACTIVATION_NAMES = {
    "siluactivation": "silu",
    "siluandmul": "silu",
    "newgeluactivation": "gelu_tanh",
    "pytorchgelutanh": "gelu_tanh",
    "geluactivation": "gelu",
    "fastgeluactivation": "gelu_tanh",
    "quickgeluactivation": "quick_gelu",
}
_REDUCTIONS = frozenset("sum mean amax amin var var_mean prod cumsum".split())
_ROUTING = frozenset(
    """
    index index_add index_put scatter scatter_add gather index_select one_hot
    histc bincount nonzero masked_select
    """.split()
)
_STATISTICS = frozenset("mean var var_mean".split())


@dataclass(slots=True)
class Description:
    """What a group is.

    Attributes:
        kind: One of `precision_graph.KINDS`.
        role: The part of its name after the module path.
        params: What else fixes its result.
        compute_dtype: Short name of the widest floating dtype that it computes in.
    """

    kind: str
    role: str
    params: dict[str, Scalar]
    compute_dtype: str


def compute_dtype(nodes: list[CapturedNode]) -> str:
    """Return the widest floating dtype of the nodes' results; else the first dtype."""
    dtypes = [name for node in nodes for name in (node.dtype, *node.outputs) if name]
    floating = [name for name in dtypes if name in FLOATING]
    if floating:
        return max(floating, key=FLOATING.index)
    return dtypes[0] if dtypes else ""


def describe(group: Group, sources: TensorSources) -> Description:
    """Return what a group of nodes is."""
    nodes = [sources.nodes[index] for index in group.nodes]
    names = {node.target for node in nodes}
    computed = compute_dtype(nodes)
    first = nodes[0]
    if group.shape == "index":
        return Description("index", "index", {}, "")
    if group.shape == "backward":
        return Description("backward", "backward", {}, computed)
    if group.shape == "sum":
        return Description("backward", "grad_sum", {}, computed)
    if group.shape == "rope":
        return Description("rope", "rope", {}, computed)
    if group.shape == "attention" or names & ATTENTION:
        return Description("attention", "attention", _attention(nodes), _read(first))
    if group.shape == "gated" or first.target in GATED_ACTIVATIONS:
        return Description("activation", "activation", _gated(group, sources), computed)
    if names & NORMS:
        return Description("norm", "norm", _opaque_norm(first), "fp32")
    if names & ROPES:
        return Description("rope", "rope", {}, computed)
    if group.shape == "leaf":
        return _leaf(group, nodes, names, sources, computed)
    return _single(first, computed)


def _leaf(
    group: Group,
    nodes: list[CapturedNode],
    names: set[str],
    sources: TensorSources,
    computed: str,
) -> Description:
    if names & EMBEDDINGS:
        return Description("embedding", "embedding", {}, computed)
    if {"cos", "sin"} <= names:
        return Description("rope_table", "rope_table", {}, computed)
    if is_activation_class(nodes[0]):
        params: dict[str, Scalar] = {"function": _activation(nodes[0])}
        return Description("activation", "activation", params, computed)
    if "rsqrt" in names or (names & _STATISTICS and names & {"sqrt", "div", "pow"}):
        return Description("norm", "norm", _norm(group, sources), computed)
    if names & TOPKS:
        return Description("routing", "routing", {}, computed)
    if len(nodes) == 1:
        return _single(nodes[0], computed)
    if names <= POINTWISE | {"cat"}:
        return Description("elementwise", "elementwise", {}, computed)
    return Description("unknown", "+".join(sorted(names)), {}, computed)


def _single(node: CapturedNode, computed: str) -> Description:
    name = node.target
    params: dict[str, Scalar] = {}
    if name in EMBEDDINGS:
        return Description("embedding", "embedding", params, computed)
    if name in GROUPED_GEMMS:
        return Description("grouped_gemm", "grouped_gemm", params, "fp32")
    if name in MATMULS:
        return Description("elementwise", "matmul", params, "fp32")
    if name in SOFTMAXES:
        return Description("softmax", "softmax", params, computed)
    if name in TOPKS:
        return Description("routing", "topk", params, computed)
    if name in ADDS | POINTWISE - _REDUCTIONS | ACTIVATIONS:
        scalars = scalar_args(node)
        if scalars:
            params["scalar"] = scalars[0]
        return Description("elementwise", name, params, computed)
    if name in _REDUCTIONS:
        return Description("reduction", name, params, computed)
    if name in _ROUTING or name == "cat":
        return Description("routing", name, params, computed)
    return Description("unknown", name, params, computed)


def _read(node: CapturedNode) -> str:
    """The dtype of an attention's result; it accumulates as its kernel does."""
    return node.dtype or next((name for name in node.outputs if name), "")


def _attention(nodes: list[CapturedNode]) -> dict[str, Scalar]:
    params: dict[str, Scalar] = {}
    for node in nodes:
        scale = node.kwargs.get("scale")
        if isinstance(scale, (int, float)):
            params["scale"] = float(scale)
    return params


def _activation(node: CapturedNode) -> str:
    name = node.module_class.lower()
    return _ACTIVATION_NAMES.get(name, name.removesuffix("activation"))


def _gated(group: Group, sources: TensorSources) -> dict[str, Scalar]:
    """The function, and the dtype to which it is rounded before the multiply."""
    nodes = [sources.nodes[index] for index in group.nodes]
    opaque = GATED_ACTIVATIONS.get(nodes[0].target)
    if opaque is not None:
        return {"function": opaque, "gated": True, "rounded": "fp32"}
    product = group.nodes[-1]
    inner = [
        sources.source(read).dtype
        for read in sources.inputs[product]
        if sources.source(read).index in group.members
    ]
    rounded = inner[0] if inner else ""
    return {"function": _activation(nodes[0]), "gated": True, "rounded": rounded}


def _opaque_norm(node: CapturedNode) -> dict[str, Scalar]:
    numbers = [node.kwargs.get("eps"), node.kwargs.get("epsilon"), *scalar_args(node)]
    eps = [n for n in numbers if isinstance(n, float)]
    return {"eps": eps[-1]} if eps else {}


def _norm(group: Group, sources: TensorSources) -> dict[str, Scalar]:
    """eps, and the constant added to the weight (Gemma's 1)."""
    params: dict[str, Scalar] = {}
    for index in group.nodes:
        node = sources.nodes[index]
        if node.target not in ADDS:
            continue
        read = [arg.index for arg in node.args if isinstance(arg, Ref)]
        scalars = scalar_args(node)
        if len(read) != 1 or not scalars:
            continue
        maker = sources.source(read[0]).index
        if maker in group.members:
            params.setdefault("eps", float(scalars[0]))
        else:
            params["weight_offset"] = float(scalars[0])
    return params
