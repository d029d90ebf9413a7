"""What an operator is: the kind, name and parameters of a group of captured nodes."""

from dataclasses import dataclass

from jetrl_compile.captured_graph import CapturedNode, Ref
from jetrl_compile.describe_attention import attention_params
from jetrl_compile.formats import FLOATING
from jetrl_compile.node_groups import Group, is_activation_class
from jetrl_compile.op_classes import (
    ACTIVATIONS,
    ADDS,
    ATTENTION,
    CACHE_WRITES,
    EMBEDDINGS,
    GATED_ACTIVATIONS,
    GROUPED_GEMMS,
    JOINS,
    MATMULS,
    MULS,
    NORMS,
    POINTWISE,
    ROPES,
    SOFTMAXES,
    TOPKS,
)
from jetrl_compile.precision_graph import Scalar
from jetrl_compile.tensor_sources import TensorSources, narrower, scalar_args

_ACTIVATION_NAMES = {
    "siluactivation": "silu",
    "siluandmul": "silu",
    "newgeluactivation": "gelu_tanh",
    "pytorchgelutanh": "gelu_tanh",
    "geluactivation": "gelu",
    "geluandmul": "gelu",
    "fastgeluactivation": "gelu_tanh",
    "quickgeluactivation": "quick_gelu",
}
_REDUCTIONS = frozenset(
    ("sum", "mean", "amax", "amin", "var", "var_mean", "prod", "cumsum")
)
_ROUTING = frozenset(
    (
        *("index", "index_add", "index_put", "index_select", "gather", "scatter"),
        *("scatter_add", "masked_select", "nonzero", "one_hot", "histc", "bincount"),
    )
)
_PARTS = {"complex64": "fp32", "complex128": "fp64"}
_STATISTICS = frozenset(("mean", "var", "var_mean"))
_SINGLE = ADDS | POINTWISE - _REDUCTIONS | ACTIVATIONS


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
    """Return the widest floating dtype of the nodes' results; else the first dtype.

    A softmax computes in FP32 whatever it reads, as its decomposition shows.
    """
    if any(node.target in SOFTMAXES for node in nodes):
        return "fp64" if any(node.dtype == "fp64" for node in nodes) else "fp32"
    if len(nodes) == 1 and nodes[0].dtype:
        return _PARTS.get(nodes[0].dtype, nodes[0].dtype)
    dtypes = [name for node in nodes for name in (node.dtype, *node.outputs) if name]
    dtypes = [_PARTS.get(name, name) for name in dtypes]
    floating = [name for name in dtypes if name in FLOATING]
    if floating:
        return max(floating, key=FLOATING.index)
    return dtypes[0] if dtypes else ""


def describe(group: Group, sources: TensorSources) -> Description:
    """Return what a group of nodes is."""
    nodes = [sources.nodes[index] for index in group.nodes]
    shape = group.shape
    if shape == "index":
        return Description("index", "index", {}, "")
    computed = compute_dtype(nodes)
    if shape == "backward":
        return Description("backward", "backward", {}, computed)
    if shape == "sum":
        return Description("backward", "grad_sum", {}, computed)
    if shape == "rope":
        return Description("rope", "rope", {}, computed)
    first = nodes[0]
    names = {node.target for node in nodes}
    if shape == "attention" or names & ATTENTION:
        params, computed = attention_params(group, sources)
        return Description("attention", "attention", params, computed)
    if shape == "gated" or first.target in GATED_ACTIVATIONS:
        return _gated(group, sources)
    if names & NORMS:
        return Description("norm", "norm", _opaque_norm(first, sources), "fp32")
    if names & ROPES:
        return Description("rope", "rope", {}, computed)
    if shape == "leaf":
        return _leaf(group, nodes, names, sources, computed)
    return _single(first, sources, group.nodes[0], computed)


def _leaf(
    group: Group,
    nodes: list[CapturedNode],
    names: set[str],
    sources: TensorSources,
    computed: str,
) -> Description:
    if names & EMBEDDINGS:
        return Description("embedding", "embedding", {}, computed)
    if {"cos", "sin"} <= names or any(n.dtype.startswith("complex") for n in nodes):
        return Description("rope_table", "rope_table", {}, computed)
    if is_activation_class(nodes[0]):
        params: dict[str, Scalar] = {"function": _activation(nodes[0])}
        return Description("activation", "activation", params, _in_activation(nodes))
    if "rsqrt" in names or (names & _STATISTICS and names & {"sqrt", "div", "pow"}):
        return Description("norm", "norm", _norm(group, sources), computed)
    if names & TOPKS:
        return Description("routing", "routing", {}, computed)
    if len(nodes) == 1:
        return _single(nodes[0], sources, group.nodes[0], computed)
    if names <= POINTWISE | JOINS:
        return Description("elementwise", "elementwise", {}, computed)
    if names <= POINTWISE | JOINS | _ROUTING | SOFTMAXES:
        return Description("routing", "routing", {}, computed)
    return Description("unknown", "+".join(sorted(names)), {}, computed)


def _single(
    node: CapturedNode, sources: TensorSources, index: int, computed: str
) -> Description:
    name = node.target
    params: dict[str, Scalar] = {}
    if name in _SINGLE:
        scalars = scalar_args(node)
        if scalars:
            params["scalar"] = scalars[0]
        alpha = node.kwargs.get("alpha", 1)  # of add and sub: the second one's factor
        if isinstance(alpha, (int, float)) and alpha != 1:
            params["alpha"] = alpha
        return Description("elementwise", name, params, computed)
    if name in EMBEDDINGS:
        return Description("embedding", "embedding", params, computed)
    if name in GROUPED_GEMMS:
        return Description("grouped_gemm", "grouped_gemm", params, "fp32")
    if name in MATMULS:
        kind = "other_gemm" if _reads_weights(sources, index) else "elementwise"
        return Description(kind, "matmul", params, "fp32")
    if name in SOFTMAXES:
        return Description("softmax", "softmax", params, computed)
    if name in TOPKS:
        return Description("routing", "topk", params, computed)
    if name in _REDUCTIONS:
        return Description("reduction", name, params, computed)
    if name in CACHE_WRITES:  # of a tensor that is no cache, part by part
        return Description("elementwise", "write", params, computed)
    if name in JOINS:
        return Description("elementwise", name, params, computed)
    if name in _ROUTING:
        return Description("routing", name, params, computed)
    return Description("unknown", name, params, computed)


def _reads_weights(sources: TensorSources, index: int) -> bool:
    """Whether an operand of a matmul is made of parameters alone: a computed weight."""
    return any(sources.of_parameters[read] for read in sources.inputs[index])


def _activation(node: CapturedNode) -> str:
    name = node.module_class.lower()
    return _ACTIVATION_NAMES.get(name, name.removesuffix("activation"))


def _in_activation(nodes: list[CapturedNode]) -> str:
    """The dtype that an activation computes in.

    A single operator computes in FP32 whatever it reads, as its decomposition shows; a
    function that is written out rounds every step to the steps' dtype.
    """
    if len(nodes) == 1 and nodes[0].target in ACTIVATIONS | {"hardswish"}:
        return "fp32"
    return compute_dtype(nodes)


def _gated(group: Group, sources: TensorSources) -> Description:
    """The function, and the dtype to which it is rounded before the multiply."""
    nodes = [sources.nodes[index] for index in group.nodes]
    opaque = GATED_ACTIVATIONS.get(nodes[0].target)
    if opaque is not None:
        # These kernels compute in FP32 and round to the input's dtype before they
        # multiply. Source: vLLM, csrc/activation_kernels.cu.
        rounded = nodes[0].dtype or next((d for d in nodes[0].outputs if d), "")
        params: dict[str, Scalar] = {"function": opaque, "gated": True}
        params["rounded"] = nodes[0].attributes.get("rounded", rounded)
        return Description("activation", "activation", params, "fp32")
    product = group.nodes[-1]
    inner = [
        sources.source(read).dtype
        for read in sources.inputs[product]
        if sources.source(read).index in group.members
    ]
    result = sources.nodes[product].dtype
    rounded = narrower(inner[0], result) if inner else result
    params = {"function": _activation(nodes[0]), "gated": True, "rounded": rounded}
    return Description("activation", "activation", params, _in_activation(nodes[:-1]))


def _opaque_norm(node: CapturedNode, sources: TensorSources) -> dict[str, Scalar]:
    """eps, and the dtype that is rounded to before the weight multiplies.

    torch multiplies in FP32; vLLM's operators round to the weight's dtype first, as
    Hugging Face's modules do.
    """
    numbers = [node.kwargs.get("eps"), node.kwargs.get("epsilon"), *scalar_args(node)]
    eps = [n for n in numbers if isinstance(n, float)]
    params: dict[str, Scalar] = {"eps": eps[-1]} if eps else {}
    params["rounded"] = "fp32"
    if "." in node.target:
        params["rounded"] = next(
            (
                sources.nodes[read].dtype
                for read in node.inputs()
                if sources.is_parameter(read)
            ),
            node.dtype,
        )
    return params


def _norm(group: Group, sources: TensorSources) -> dict[str, Scalar]:
    """eps, the constant added to the weight (Gemma's 1), and as `_opaque_norm`."""
    params: dict[str, Scalar] = {}
    for index in group.nodes:
        node = sources.nodes[index]
        if node.target in MULS:
            params["rounded"] = node.dtype
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
