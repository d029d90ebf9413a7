"""What the passes share: the FX graph, what is known of it, and what they decided."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from jetrl_compile.capture import PlaceholderInfo, capture
from jetrl_compile.graph_builder import BuiltGraph, build_precision_graph
from jetrl_compile.kernels.dispatch import PROVIDERS, Choice, GemmShape
from jetrl_compile.passes.expand_fused import expand_fused
from jetrl_compile.precision_graph import PrecisionGraph
from jetrl_compile.recipe import Recipe

aten = torch.ops.aten
# What leaves a GEMM's result what it is.
_SEEN_THROUGH = (
    aten.permute.default,
    aten.t.default,
    aten.transpose.int,
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    torch.ops.prims.convert_element_type.default,
)


@dataclass(frozen=True, slots=True)
class Quantized:
    """The nodes of a quantized matrix: codes, and their scales."""

    codes: Node
    scales: Node


@dataclass(frozen=True, slots=True)
class LoweredGemm:
    """A `jetrl.gemm` of the lowered graph.

    Attributes:
        names: Of its operators: several for a GEMM of several layers.
        role: "fprop", "dgrad" or "wgrad".
        module: Path of the layer; of the first, if it has several.
        shape: What its provider was chosen by.
    """

    names: tuple[str, ...]
    role: str
    module: str
    shape: GemmShape


@dataclass
class Context:
    """The state of one run of the pipeline over one FX graph.

    Attributes:
        graph: The joint or inference graph; the passes change it in place.
        placeholders: What is known of its placeholders, by name.
        recipe: The recipe.
        phase: "train" or "rollout".
        providers: GEMM providers, the preferred one first; None: by device.
        prefix: Path of the compiled module in the whole model.
        built: The precision graph as last built, fused operators written out, and
            `nodes` the FX nodes by the index that `built` knows them by.
        annotated: The precision graph with the recipe on every edge.
        results: Of that graph: the GEMM that each result is, "" for another one.
        operands: For each GEMM to lower, its two quantized operands.
        unmatched: The recipe's patterns that match no GEMM of the graph.
        choices: For each lowered GEMM operator, the provider and why.
        fuse: Whether to merge GEMMs and to fuse quantization into what precedes it.
        saved_gate_up: "bf16", or "e4m3": gate and up are kept for backward in FP8.
        cache_weights: Whether codes of weights are kept from call to call.
        cuda_graphs: Whether the graph will run as a CUDA graph.
        outside: Modules of the graph whose operators something else runs, as they are.
        exact: Whether forward is to give a row the same bits in every batch: True,
            False, or "report": what does not is noted, and no error.
        lowered: What is known of each `jetrl.gemm` node.
        notes: What was not merged or fused, and why.
        final: The precision graph read back from the lowered graph.
    """

    graph: Graph
    placeholders: Mapping[str, PlaceholderInfo]
    recipe: Recipe
    phase: str
    providers: tuple[str, ...] | None = None
    prefix: str = ""
    meta: Mapping[str, str] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    annotated: PrecisionGraph | None = None
    results: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    operands: dict[Node, tuple[Quantized, Quantized]] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)
    fuse: bool = False
    saved_gate_up: str = "bf16"
    cache_weights: bool = False
    cuda_graphs: bool = False
    exact: bool | str = False
    outside: frozenset[str] = frozenset()
    lowered: dict[Node, LoweredGemm] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    final: PrecisionGraph | None = None
    _built: BuiltGraph | None = None

    @property
    def built(self) -> BuiltGraph:
        """The precision graph of the FX graph as it is now."""
        if self._built is None:
            graph = expand_fused(self.graph)
            self.nodes = list(graph.nodes)
            invariant = {p.name: p.batch_invariant for p in PROVIDERS.values()}
            self._built = build_precision_graph(
                capture(graph, self.placeholders, prefix=self.prefix),
                invariant,
                **self.meta,
            )
        return self._built

    def gemm_results(self) -> tuple[str, ...]:
        """Return the GEMM that each result of the graph is, "" for another one.

        The gradient of a weight is read by no operator, so no edge says whose it is.
        """
        names: dict[Node, str] = {}
        for name, site in self.built.gemms.items():
            names.setdefault(self.nodes[site.node], name)
        found: list[str] = []
        for node in tree_leaves(self.nodes[-1].args):
            while isinstance(node, Node) and node.target in _SEEN_THROUGH:
                node = node.args[0]
            found.append(names.get(node, "") if isinstance(node, Node) else "")
        return tuple(found)

    def changed(self) -> None:
        """Forget the built graph: a pass changed the FX graph."""
        self._built = None
