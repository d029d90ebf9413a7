"""The pass inside vLLM's compilation: the trainer's norms, and fused quantizers.

It runs where the trainer's passes run, on the graph that AOTAutograd hands to Inductor
(`joint_custom_pre_pass`), for each piece between two attentions; the linear layers have
written the FP8 flow already. vLLM compiles isomorphic pieces once, so nothing in the
result or in the pass's identity may depend on the number of a layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from jetrl_compile.capture import PlaceholderInfo, capture
from jetrl_compile.captured_graph import CapturedGraph
from jetrl_compile.errors import LoweringError
from jetrl_compile.formats import Flow
from jetrl_compile.integrations.vllm.graph_reading import EngineContext, infos_by_reader
from jetrl_compile.integrations.vllm.settings import Reports, Settings
from jetrl_compile.integrations.vllm.sharding import WholeShapes
from jetrl_compile.integrations.vllm.spelling import spell_norms
from jetrl_compile.integrations.vllm.spelling_rope import spell_rope
from jetrl_compile.kernel_claims import not_exact
from jetrl_compile.kernels import ops
from jetrl_compile.kernels.dispatch import GemmShape, default_providers, get_provider
from jetrl_compile.kernels.gemm_parts import gemm_parts
from jetrl_compile.passes.annotate_precision import annotate_precision
from jetrl_compile.passes.canonicalize import canonicalize
from jetrl_compile.passes.context import LoweredGemm
from jetrl_compile.passes.fuse_quantize import fuse_quantize
from jetrl_compile.passes.use_exact import use_exact, use_exact_gemms
from jetrl_compile.passes.verify import verify
from jetrl_compile.pipeline import CompileReport, source_hash

HOOK = "joint_custom_pre_pass"  # of Inductor's config


class EnginePass(CustomGraphPass):
    """The passes over a piece of a vLLM model.

    Attributes:
        settings: Of the engine.
        reports: What was done to each graph that the passes ran on, in order.
    """

    def __init__(self, settings: Settings, reports: Reports) -> None:
        self.settings = settings
        self.reports = reports

    def __call__(self, graph: Graph) -> None:
        """Rewrite a graph in place."""
        self.reports.append(run_passes(graph, self.settings))

    def uuid(self) -> Any:
        """Identify the pass for compile caches: its sources and settings."""
        return identity(self.settings)


def identity(settings: Settings) -> str:
    """Return what identifies the passes: all their sources, and the settings.

    A compiled graph names the providers that the layers chose, and vLLM's cache knows
    nothing of the layers: so which providers can run belongs to the identity.

    Args:
        settings: Of the engine.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = settings.providers or default_providers(device)
    usable = [name for name in names if get_provider(name).usable() is None]
    switches = f"{settings.fuse} {settings.exact} {' '.join(usable)}"
    return f"jetrl {source_hash()} {settings.recipe!r} {switches}"


def run_passes(
    graph: Graph,
    settings: Settings,
    placeholders: Mapping[str, PlaceholderInfo] | None = None,
    attributes: Mapping[str, Mapping[str, Any]] | None = None,
    meta: Mapping[str, str] | None = None,
    *,
    spell: bool = True,
    strict: bool = True,
    whole: WholeShapes | None = None,
    outside: frozenset[str] = frozenset(),
) -> CompileReport:
    """Rewrite a functional graph of vLLM's in place.

    Args:
        graph: A whole model or a piece; its nodes have `meta["val"]`.
        settings: Of the engine.
        placeholders: What is known of its inputs; None: told by who reads them.
        attributes: What the engine knows of opaque operators, by module.
        meta: More entries for the precision graph's `meta`.
        spell: Whether norms are to be written as the trainer writes them.
        strict: Whether another precision than the recipe's is an error; else it stays
            in the graph, for the containment check to name.
        whole: N and K of whole layers by module, for one rank of several.
        outside: Modules that vLLM runs without the passes: the output head.

    Raises:
        LoweringError: A pass changed the precision flow, or an exact engine has an
            operator without an exact kernel.
    """
    changes = {"spell_norms": 0, "spell_rope": 0}
    if spell:
        changes = {"spell_norms": spell_norms(graph), "spell_rope": spell_rope(graph)}
    entries = {"phase": "rollout", "recipe": settings.recipe.name, **(meta or {})}
    context = EngineContext(
        graph,
        infos_by_reader(graph) if placeholders is None else placeholders,
        settings.recipe,
        "rollout",
        settings.providers,
        meta={"vocabulary": _vocabulary(graph), **entries},
        fuse=settings.fuse,
        exact="report" if settings.exact and spell else False,
    )
    context.attributes = attributes
    context.strict = strict
    context.whole = whole
    context.outside = outside
    for name, run in _PASSES:
        changes[name] = run(context)
    assert context.final is not None
    if context.exact and strict:
        _check_exact(context)
    return CompileReport(
        module="",
        phase="rollout",
        training=False,
        recipe=settings.recipe.name,
        graph=context.final,
        changes=changes,
        providers={
            name: str(node.args[-1])
            for node, gemm in context.lowered.items()
            for name in gemm.names
        },
        notes=tuple(context.notes),
    )


def _check_exact(context: EngineContext) -> None:
    """Check all but attention, whose kernel the graph does not show."""
    assert context.final is not None
    operators = [op for op in context.final.operators if op.kind != "attention"]
    found = [reason for reason in map(not_exact, operators) if reason]
    if found:
        raise LoweringError(
            f"exact mode: {len(found)} operators of vLLM's graph may give a token "
            f"other bits in another batch, first: {found[0]}; docs/exact.md lists what "
            "has a kernel"
        )


def capture_graph(
    graph: Graph,
    placeholders: Mapping[str, PlaceholderInfo],
    attributes: Mapping[str, Mapping[str, Any]] | None = None,
) -> CapturedGraph:
    """Return a functional graph of vLLM's as data, as it is before the passes."""
    return capture(graph, placeholders, attributes=attributes)


def adopt_gemms(context: EngineContext) -> int:
    """Make the GEMMs known that the linear layers wrote; return how many."""
    names: dict[Node, list[str]] = {}
    sites = context.built.gemms
    for name, site in sites.items():
        names.setdefault(context.nodes[site.node], []).append(name)
    flows = context.recipe.flows
    for node, own in names.items():
        if node.target not in (ops.gemm, gemm_parts) or flows is None:
            continue
        codes = node.args[0]
        weight = node.args[2]
        assert isinstance(codes, Node)
        assert isinstance(weight, Node)
        n, k = weight.meta["val"].shape
        shape = GemmShape(
            role="fprop",
            n=n,
            k=k,
            a=flows.fprop_x,
            b=flows.fprop_w,
            m=None,
            out_dtype="bf16",
            device_type=node.meta["val"].device.type,
        )
        module = sites[own[0]].module
        context.lowered[node] = LoweredGemm(tuple(own), "fprop", module, shape)
    return len(context.lowered)


def annotate(context: EngineContext) -> int:
    """Check what is FP8 against the recipe; return the number of FP8 GEMMs."""
    found = context.built.graph
    wanted = annotate_precision(found, context.recipe, context.phase)
    for op in wanted.gemms() if context.strict else ():
        for operand, edge in found.operands[op.name].items():
            asked: Flow = wanted.operands[op.name][operand].flow
            if asked != edge.flow and (asked.is_quantized or edge.flow.is_quantized):
                raise LoweringError(
                    f"{op.name}.{operand} is '{edge.flow}' in vLLM's graph, and "
                    f"recipe {context.recipe.name!r} asks for '{asked}'; this is a "
                    "fault of the integration, please report it"
                )
    context.annotated = replace(wanted, edges=found.edges)
    context.results = context.gemm_results()
    return sum(map(found.is_fp8, found.gemms()))


def _vocabulary(graph: Graph) -> str:
    embedding = torch.ops.aten.embedding.default
    nodes = graph.find_nodes(op="call_function", target=embedding)
    tables: list[Any] = [node.args[0] for node in nodes]
    return " ".join(sorted({str(t.meta["val"].shape[0]) for t in tables}))


_PASSES: tuple[tuple[str, Callable[[Any], int]], ...] = (
    # One spelling first, as in the trainer's pipeline.
    ("canonicalize", canonicalize),
    ("use_exact", use_exact),
    ("annotate_precision", annotate),
    # The layers have lowered themselves; what follows needs to know where.
    ("adopt_gemms", adopt_gemms),
    ("use_exact_gemms", use_exact_gemms),
    ("fuse_quantize", fuse_quantize),
    # Last: it reads the graph that will run.
    ("verify", verify),
)
