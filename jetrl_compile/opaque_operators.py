"""Operators for what an engine runs as one opaque kernel and a model as two steps."""

from jetrl_compile.captured_graph import CapturedNode, Ref
from jetrl_compile.graph_state import GraphState
from jetrl_compile.op_classes import EXACT_ATTENTION
from jetrl_compile.precision_graph import UNKNOWN

_NATIVE = ("native", "unfused", "")
_OWN_CACHE = ("vllm.flashinfer_rotary_embedding",)


def provider_of(node: CapturedNode) -> str:
    """Return who implements an operator: its namespace, or "aten" for torch."""
    impl = node.attributes.get("impl")
    if impl is not None:
        return str(impl)
    if node.target == EXACT_ATTENTION:
        return f"{node.target}.{node.args[6]}"
    if node.target.startswith("jetrl."):
        return node.target
    return node.target.split(".")[0] if "." in node.target else "aten"


def add_norm(state: GraphState, index: int, node: CapturedNode) -> None:
    """Add the two operators of a residual add with norm; results: norm, sum.

    vLLM IR's native form normalizes the FP32 sum and rounds it for the residual alone;
    its CUDA kernel (`impl` "vllm_c", or called directly) rounds the sum first. What
    another implementation does is unknown unless its attribute `sum` names a dtype.
    Source: vLLM 0.24, vllm/ir/ops/layernorm.py, csrc/layernorm_kernels.cu.

    Args:
        state: The graph that is built.
        index: The operator.
        node: The same.
    """
    x, residual, *rest = state.sources.inputs[index]
    dtype = state.sources.source(x).dtype
    impl = str(node.attributes.get("impl", ""))
    kernel = node.target.startswith("_C.") or impl == "vllm_c"
    known = dtype if kernel else "fp32" if impl in _NATIVE else UNKNOWN
    rounded = str(node.attributes.get("sum", known))
    branch = state.module_of(x)
    total = state.operator(
        index,
        f"{branch}:residual_add",
        "residual_add",
        module=branch,
        compute_dtype=dtype,
        provider=provider_of(node),
    )
    state.edge(total, "residual", residual)
    state.edge(total, "branch", x)
    eps = [arg for arg in node.args if isinstance(arg, float)]
    weights = [state.nodes[read].dtype for read in rest]
    params: list[tuple[str, str | float]] = [("eps", eps[0])] if eps else []
    params.append(("rounded", weights[0] if weights else dtype))
    norm = state.operator(
        index,
        f"{node.module}:norm",
        "norm",
        params=tuple(params),
        compute_dtype="fp32",
        provider=provider_of(node),
    )
    state.link(total, norm, "x", state.flow(rounded))
    for read in rest:
        state.edge(norm, "weight", read)
    state.made[index] = [norm, total]


def opaque_rope(state: GraphState, index: int, node: CapturedNode) -> None:
    """Add the two operators of a rotary embedding, one for q and one for k.

    Arguments: positions, q, k, head size, table. The kernel of vLLM 0.24 computes in
    FP32 and rounds once; attribute `rounded` says otherwise.

    Args:
        state: The graph that is built.
        index: The operator.
        node: The same.
    """
    positions, q, k = node.args[:3]
    table = node.args[4]
    module = node.module.removesuffix(".rotary_emb")
    made = []
    for label, read in (("q", q), ("k", k)):
        if not isinstance(read, Ref):
            continue
        name = state.operator(
            index,
            f"{module}:rope.{label}",
            "rope",
            module=module,
            compute_dtype=str(node.attributes.get("rounded", "fp32")),
            provider=provider_of(node),
        )
        state.edge(name, "x", read.index)
        state.edge(name, "cos", table.index)
        state.edge(name, "sin", table.index)
        state.edge(name, "index", positions.index)
        made.append(name)
    state.made[index] = made
