"""Operators for groups of nodes: what each is called, and what its operands are."""

from jetrl_compile.captured_graph import CapturedNode, Ref
from jetrl_compile.describe import Description, describe
from jetrl_compile.formula import formula_of
from jetrl_compile.fused_bias import add_fused_bias
from jetrl_compile.graph_state import GraphState
from jetrl_compile.group_finder import Group
from jetrl_compile.kernel_claims import CLAIMS
from jetrl_compile.op_classes import ADD_NORMS, ATTENTION, ROPES
from jetrl_compile.opaque_operators import add_norm, opaque_rope, provider_of
from jetrl_compile.tensor_sources import ROPE_TABLE, narrower

_TABLE_MODULES = ("rotary", "rope")


def add_group(state: GraphState, group: Group) -> None:
    """Add the operator of a group, with its edges: several for some engine operators.

    Args:
        state: The graph that is built.
        group: The group.
    """
    index = group.nodes[0 if group.shape == "index" else -1]
    main = state.nodes[index]
    if main.target in ADD_NORMS:
        add_norm(state, index, main)
        return
    if main.target in ROPES:
        opaque_rope(state, index, main)
        return
    if index in state.fused.biased:
        add_fused_bias(state, index)
        return
    first = state.nodes[group.nodes[0]]
    what = describe(group, state.sources)
    module = group.module
    if what.kind == "attention" and main.target.startswith("vllm."):
        module = _vllm_attention_module(main)
    reads = _outside(state, group)
    _refine(state, what, reads)
    if what.kind == "residual_add":
        module = state.module_of(reads[1])
    elif what.kind == "bias_add":
        module = state.module_of(reads[0])
    elif what.role == "grad_sum":
        # The module whose gradient is added last.
        module = state.module_of(
            max(reads, key=lambda read: state.sources.source(read).index)
        )
    elif what.kind == "activation" and module.endswith(".activation_fn"):
        # Phi's name for what Llama, and any engine, calls act_fn.
        module = module.removesuffix("activation_fn") + "act_fn"
    provider = "" if what.kind == "index" else provider_of(first)
    name = state.operator(
        index,
        f"{module}:{what.role}",
        what.kind,
        module=module,
        params=tuple(sorted(what.params.items())),
        compute_dtype=what.compute_dtype,
        provider=provider,
        batch_invariant=True if _claims(provider) else None,
        formula=formula_of(group, state.sources, state.level),
    )
    if what.params.get("gated") and len(reads) == 1:  # a fused layer made both
        state.part_edge(name, "gate", reads[0], None, 0, 2)
        state.part_edge(name, "up", reads[0], None, 1, 2)
        return
    for operand, read in _labelled(state, what, reads, main):
        state.edge(name, operand, read)


def _vllm_attention_module(node: CapturedNode) -> str:
    """The module above vLLM's `Attention`: the one that Hugging Face's runs in."""
    module = node.module
    if not module:  # the layer's name is an argument of the operator
        names = [arg for arg in node.args if isinstance(arg, str) and "." in arg]
        module = names[0] if names else ""
    return module.removesuffix(".attn")


def _outside(state: GraphState, group: Group) -> list[int]:
    """What a group reads from outside it: each tensor once, floats or integers."""
    sources = state.sources
    if len(group.nodes) == 1:
        alone = sources.inputs[group.nodes[0]]
        if len(alone) < 2:
            return alone
    found: dict[tuple[object, ...], int] = {}
    group_of = state.grouping.group_of
    for index in group.nodes:
        for read in sources.inputs[index]:
            source = sources.source(read)
            if group_of.get(source.index) is group:
                continue
            key = (source.index, source.slot, state.fused.parts_read(read))
            kept = found.setdefault(key, read)
            if kept != read:
                held = sources.source(kept).dtype
                if narrower(held, source.dtype) != held:
                    found[key] = read
    return list(found.values())


def _refine(state: GraphState, what: Description, reads: list[int]) -> None:
    """Tell residual and bias adds from other sums; order their operands.

    The sum of two BF16 tensors is computed in FP32 and rounded; where it is not
    rounded, the edges that read it say so. Its compute dtype is that of its operands.
    """
    if what.role != "add" or len(reads) != 2 or what.params:
        return
    sources = state.sources
    parameters = [read for read in reads if sources.is_parameter(read)]
    makers = [sources.source(read) for read in reads]
    if len(parameters) == 1:
        other = next(read for read in reads if read not in parameters)
        if sources.source(other).index in state.sites.sites:
            what.kind, what.role = "bias_add", "bias_add"
            reads[:] = [other, parameters[0]]
    elif (
        not parameters
        and not any(sources.is_index[maker.index] for maker in makers)
        and state.nodes[reads[0]].shape == state.nodes[reads[1]].shape
    ):
        what.kind, what.role = "residual_add", "residual_add"
        if makers[0].dtype == makers[1].dtype:
            what.compute_dtype = makers[0].dtype
        reads.sort(key=lambda read: sources.source(read).index)


def _labelled(
    state: GraphState, what: Description, reads: list[int], main: CapturedNode
) -> list[tuple[str, int]]:
    """Name an operator's operands."""
    if what.kind == "residual_add":
        return list(zip(("residual", "branch"), reads, strict=True))
    if what.kind == "bias_add":
        return list(zip(("x", "bias"), reads, strict=True))
    sources, nodes = state.sources, state.nodes
    labelled: list[tuple[str, int]] = []
    activations: list[int] = []
    for read in reads:
        made = sources.source(read).index
        node = nodes[made]
        if node.op == "placeholder" and node.target != "input" and node.module:
            if node.module.endswith(ROPE_TABLE):
                activations.append(read)
                continue
            labelled.append((node.module.rpartition(".")[2], read))
        elif sources.is_index[made]:
            labelled.append(("index", read))
        else:
            activations.append(read)
    if what.kind == "attention":
        _attention_operands(state, main, activations, labelled)
        return labelled
    if what.kind == "rope":
        names = ["x", "cos", "sin"]
        activations.sort(key=lambda read: _is_table(state, read))
        if len(activations) == 2:  # one tensor holds both halves of the table
            activations.append(activations[1])
    elif what.kind == "activation" and what.params.get("gated"):
        names = ["gate", "up"]
    else:
        names = ["x"] if len(activations) == 1 else []
    for number, read in enumerate(activations):
        label = names[number] if number < len(names) else f"in.{number}"
        labelled.append((label, read))
    order = {read: number for number, read in enumerate(reads)}
    labelled.sort(key=lambda pair: order.get(pair[1], len(order)))
    return labelled


def _attention_operands(
    state: GraphState,
    main: CapturedNode,
    activations: list[int],
    labelled: list[tuple[str, int]],
) -> None:
    """Name q, k and v by their places among the arguments of a library's attention."""
    places: dict[tuple[int, int], str] = {}
    if main.target in ATTENTION:
        for label, arg in zip("qkv", main.args, strict=False):
            if isinstance(arg, Ref):
                source = state.sources.source(arg.index)
                places.setdefault((source.index, source.slot), label)
    free = iter("qkv" if not places else "")
    found: list[tuple[str, int]] = []
    for number, read in enumerate(activations):
        source = state.sources.source(read)
        label = places.get((source.index, source.slot)) or next(free, f"in.{number}")
        found.append((label, read))
    # An engine writes k and v into its cache before attention reads q.
    labelled += sorted(found, key=lambda pair: "qkv".find(pair[0]) % 4)


def _is_table(state: GraphState, read: int) -> bool:
    """Whether a rope operand is a cosine or sine table, not the rotated tensor."""
    node = state.nodes[state.sources.source(read).index]
    if node.op == "placeholder":
        return True
    module = node.module.lower()
    made = node.target in ("cos", "sin", "mul", "stack", "cat")
    return made and any(word in module for word in _TABLE_MODULES)


def _claims(provider: str) -> bool:
    """Whether an operator of exact mode claims to be independent of the batch."""
    return provider.startswith("jetrl.") and provider in CLAIMS
