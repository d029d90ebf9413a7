"""The passes, in order, and what one run of them reports."""

import functools
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph

from jetrl_compile.capture import PlaceholderInfo
from jetrl_compile.passes.annotate_precision import (
    annotate_precision,
    linear_roles,
)
from jetrl_compile.passes.cache_weights import cache_weights
from jetrl_compile.passes.canonicalize import canonicalize
from jetrl_compile.passes.context import Context
from jetrl_compile.passes.fuse_quantize import fuse_quantize
from jetrl_compile.passes.insert_quantize import insert_quantize
from jetrl_compile.passes.lower_gemm import lower_gemm
from jetrl_compile.passes.merge_siblings import merge_siblings
from jetrl_compile.passes.use_exact import check_exact, use_exact, use_exact_gemms
from jetrl_compile.passes.verify import verify
from jetrl_compile.precision_graph import GEMM_KINDS, Operator, PrecisionGraph
from jetrl_compile.recipe import GEMM_ROLES, Recipe

aten = torch.ops.aten


def annotate(context: Context) -> int:
    """Set `context.annotated`; return the number of GEMMs that are to be FP8."""
    graph, recipe = context.built.graph, context.recipe
    modules = _gemm_modules(graph)
    if not context.prefix and _is_whole_model(graph):
        recipe.check_patterns(sorted(modules))
    context.unmatched = recipe.unmatched(modules)
    context.annotated = annotate_precision(graph, recipe, context.phase)
    context.results = context.gemm_results()
    return sum(map(context.annotated.is_fp8, context.annotated.gemms()))


def _gemm_modules(graph: PrecisionGraph) -> set[str]:
    return {op.module for op in graph.operators if op.kind in GEMM_KINDS}


def _is_whole_model(graph: PrecisionGraph) -> bool:
    """Whether a graph goes from an embedding to an output head.

    Only there is a pattern that matches nothing an error: a graph of a layer, or of a
    part between two graph breaks, does not hold the modules that others name.
    """
    embeds = any(op.kind == "embedding" for op in graph.operators)
    return embeds and "lm_head" in linear_roles(graph).values()


def _vocabulary(graph: Graph) -> str:
    """The numbers of rows of the embedding tables, which tell an output head."""
    nodes = graph.find_nodes(op="call_function", target=aten.embedding.default)
    tables: list[Any] = [node.args[0] for node in nodes]
    sizes = {table.meta["val"].shape[0] for table in tables}
    return " ".join(sorted(str(size) for size in sizes))


# Each pass leaves the graph lint-clean, with the true meta["val"] on every node.
PASSES: tuple[tuple[str, Callable[[Context], int]], ...] = (
    # One spelling first: the next ones match what it writes.
    ("canonicalize", canonicalize),
    # Before annotation, whose graph the lowered one is compared with.
    ("use_exact", use_exact),
    # On the canonical graph, so that verify can compare operator by operator.
    ("annotate_precision", annotate),
    # Before lowering, while every operand is still a node of its own.
    ("insert_quantize", insert_quantize),
    ("lower_gemm", lower_gemm),
    # Of the GEMMs that are left.
    ("use_exact_gemms", use_exact_gemms),
    # On lowered GEMMs: each has a name, a role and its quantized operands.
    ("merge_siblings", merge_siblings),
    # After merging: the gradients of gate and up are quantized as one.
    ("fuse_quantize", fuse_quantize),
    ("cache_weights", cache_weights),
    # It reads the graph that will run.
    ("verify", verify),
    # On that graph.
    ("check_exact", check_exact),
)


@dataclass(frozen=True)
class CompileReport:
    """What the compiler did with one graph.

    Attributes:
        module: Path of the compiled module, "" for a whole model.
        phase: "train" or "rollout".
        training: Whether the graph holds backward.
        recipe: The recipe's name.
        graph: The precision graph of the lowered graph.
        changes: For each pass, what it counted.
        providers: For each lowered GEMM, the provider and why it was chosen.
        unmatched: The recipe's patterns that match no GEMM of this graph; an error if
            the graph is a whole model, from the embedding to the output head.
        notes: What was not merged or fused, and why.
        from_cache: Whether torch's compile cache held the graph, so that the passes
            did not run and the graph is the stored one.
        nodes: For each operator, the FX node of the lowered graph that makes its
            result; empty for a graph from the cache, or with fused operators.
    """

    module: str
    phase: str
    training: bool
    recipe: str
    graph: PrecisionGraph
    changes: Mapping[str, int]
    providers: Mapping[str, str]
    unmatched: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    from_cache: bool = False
    nodes: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def lowered(self) -> dict[str, int]:
        """The number of FP8 GEMMs by role: fprop, dgrad, wgrad."""
        found = Counter(
            op.role.partition(".")[0]
            for op in self.graph.gemms()
            if self.graph.is_fp8(op)
        )
        return {role: found[role] for role in GEMM_ROLES}

    @property
    def kept(self) -> list[Operator]:
        """The GEMMs that stay in high precision, each with its reason."""
        return self.graph.high_precision_gemms()

    def __str__(self) -> str:
        counts = ", ".join(f"{number} {role}" for role, number in self.lowered.items())
        where = self.module or "model"
        stored = " (from the compile cache)" if self.from_cache else ""
        return f"{where}: {self.phase}, recipe {self.recipe}: {counts} in FP8{stored}"


def run_passes(
    graph: Graph,
    placeholders: Mapping[str, PlaceholderInfo],
    recipe: Recipe,
    phase: str,
    *,
    providers: tuple[str, ...] | None = None,
    prefix: str = "",
    meta: Mapping[str, str] | None = None,
    fuse: bool = False,
    saved_gate_up: str = "bf16",
    cache_weights: bool = False,
    cuda_graphs: bool = False,
    exact: bool | str = False,
) -> CompileReport:
    """Run the passes over a joint or inference graph, in place.

    Args:
        graph: The graph; its nodes have `meta["val"]`.
        placeholders: What is known of its placeholders, by name.
        recipe: The recipe.
        phase: "train" or "rollout".
        providers: GEMM providers, the preferred one first; None: by device.
        prefix: Path of the compiled module in the whole model.
        meta: More entries for the precision graph's `meta`.
        fuse: Whether to merge GEMMs of one input and to fuse quantization.
        saved_gate_up: "bf16", or "e4m3": gate and up are kept for backward in FP8.
        cache_weights: Whether codes of weights are kept from call to call.
        cuda_graphs: Whether the graph will run as a CUDA graph.
        exact: As of `Context`.

    Raises:
        LoweringError: A GEMM that the recipe names was not lowered, or an operator of
            an exact graph has no kernel that is independent of the batch.
        ProviderError: No provider accepts a GEMM.
        ModelError: The model has weights that cannot be quantized.
        RecipeError: The graph is a whole model, and a pattern matches nothing in it.
    """
    entries = {"phase": phase, "recipe": recipe.name, **(meta or {})}
    entries["vocabulary"] = _vocabulary(graph)
    context = Context(
        graph,
        placeholders,
        recipe,
        phase,
        providers,
        prefix,
        meta=entries,
        fuse=fuse,
        saved_gate_up=saved_gate_up,
        cache_weights=cache_weights,
        cuda_graphs=cuda_graphs,
        exact=exact,
    )
    changes = {name: run(context) for name, run in PASSES}
    assert context.final is not None
    node_of = context.built.node_of
    return CompileReport(
        module=prefix,
        phase=phase,
        training=any(op.phase == "backward" for op in context.final.operators),
        recipe=recipe.name,
        graph=context.final,
        changes=changes,
        providers={
            name: f"{choice.provider.name}: {choice.reason}"
            for name, choice in context.choices.items()
        },
        unmatched=context.unmatched,
        notes=tuple(context.notes),
        nodes=node_of if context.nodes[-1].graph is graph else {},
    )


@functools.cache
def source_hash(root: Path = Path(__file__).parent) -> str:
    """Return a hash of a package's sources: a new version, a new compile cache."""
    digest = hashlib.sha256()
    found = (  # passes and kernels may be links, which rglob does not follow
        Path(folder) / name
        for folder, _, names in os.walk(root, followlinks=True)
        for name in names
        if name.endswith(".py")
    )
    for path in sorted(found):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()
