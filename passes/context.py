"""What the passes share: the FX graph, what is known of it, and what they decided."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from jetrl_compile.capture import PlaceholderInfo, capture
from jetrl_compile.graph_builder import BuiltGraph, build_precision_graph
from jetrl_compile.kernels.dispatch import PROVIDERS, Choice
from jetrl_compile.precision_graph import PrecisionGraph
from jetrl_compile.recipe import Recipe

# Metadata that a new node takes from the node that it is inserted for.
_KEPT_META = (
    "nn_module_stack",
    "fwd_nn_module_stack",
    "stack_trace",
    "seq_nr",
    "partitioner_tag",
    "recompute",
    "ac_graph_id",
    "source_fn_stack",
    "fwd_source_fn_stack",
)


@dataclass(frozen=True, slots=True)
class Quantized:
    """The nodes of a quantized matrix: codes, and their scales."""

    codes: Node
    scales: Node


@dataclass
class Context:
    """The state of one run of the pipeline over one FX graph.

    Attributes:
        graph: The joint or inference graph; the passes change it in place.
        placeholders: What is known of its placeholders, by name.
        recipe: The recipe.
        phase: "train" or "rollout".
        providers: GEMM providers, the preferred one first.
        prefix: Path of the compiled module in the whole model.
        built: The precision graph as last built, and `nodes` the FX nodes by the
            index that `built` knows them by.
        annotated: The precision graph with the recipe on every edge.
        operands: For each GEMM to lower, its two quantized operands.
        unmatched: The recipe's patterns that match no GEMM of the graph.
        choices: For each lowered GEMM operator, the provider and why.
        final: The precision graph read back from the lowered graph.
    """

    graph: Graph
    placeholders: Mapping[str, PlaceholderInfo]
    recipe: Recipe
    phase: str
    providers: tuple[str, ...] = ("reference",)
    prefix: str = ""
    meta: Mapping[str, str] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    annotated: PrecisionGraph | None = None
    unmatched: tuple[str, ...] = ()
    operands: dict[Node, tuple[Quantized, Quantized]] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)
    final: PrecisionGraph | None = None
    _built: BuiltGraph | None = None

    @property
    def built(self) -> BuiltGraph:
        """The precision graph of the FX graph as it is now."""
        if self._built is None:
            self.nodes = list(self.graph.nodes)
            invariant = {p.name: p.batch_invariant for p in PROVIDERS.values()}
            self._built = build_precision_graph(
                capture(self.graph, self.placeholders, prefix=self.prefix),
                invariant,
                **self.meta,
            )
        return self._built

    def changed(self) -> None:
        """Forget the built graph: a pass changed the FX graph."""
        self._built = None


def copy_graph(graph: Graph) -> Graph:
    """Return a graph with the same nodes; their metadata are shallow copies."""
    copied = Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied


def emit(graph: Graph, target: Any, args: tuple[Any, ...], anchor: Node) -> Node:
    """Insert a call at the graph's insertion point, with its true `meta["val"]`.

    Args:
        graph: The graph.
        target: An operator that has a fake implementation.
        args: Its arguments; nodes have `meta["val"]`.
        anchor: The node for which it is inserted: module path, phase and
            recomputation tags are taken from it.
    """
    node = graph.call_function(target, args)
    node.meta = {key: anchor.meta[key] for key in _KEPT_META if key in anchor.meta}
    values = torch.fx.map_arg(args, lambda read: read.meta["val"])
    node.meta["val"] = target(*values)
    return node
