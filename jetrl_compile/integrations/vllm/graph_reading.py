"""Read graphs of vLLM's models: what their inputs are, and their precision graph."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from jetrl_compile.capture import PlaceholderInfo, canonical_path, capture, op_name
from jetrl_compile.captured_graph import CapturedGraph
from jetrl_compile.graph_builder import BuiltGraph, build_precision_graph
from jetrl_compile.integrations.vllm.sharding import (
    META,
    WholeShapes,
    with_whole_shapes,
    without_sums,
)
from jetrl_compile.kernels.dispatch import PROVIDERS
from jetrl_compile.op_classes import TRANSPOSES
from jetrl_compile.passes.context import Context
from jetrl_compile.passes.expand_fused import expand_fused
from jetrl_compile.precision_graph import Scalar

GEMM_PARTS = "jetrl.gemm_parts"
_LOOKUPS = ("index_select", "index", "embedding")


def infos_by_reader(graph: Graph) -> dict[str, PlaceholderInfo]:
    """Return which inputs of a piece of a model are weights, and of which modules.

    A piece is compiled by itself, and Inductor renames its inputs. Its weights are the
    inputs whose sizes are all known and that a module reads as one: a matrix of codes
    or scales, a vector, a table. Isomorphic pieces share one compiled graph, so that
    names are those of the first.
    """
    found = {}
    for node in graph.nodes:
        if node.op != "placeholder" or not isinstance(
            node.meta.get("val"), torch.Tensor
        ):
            continue
        value = node.meta["val"]
        if not value.is_floating_point() or any(
            not isinstance(size, int) for size in value.shape
        ):
            continue
        info = _weight(node, value)
        if info is not None:
            found[node.name] = info
    return found


def _weight(node: Node, value: torch.Tensor) -> PlaceholderInfo | None:
    readers = [user for user in node.users if user.op == "call_function"]
    if not readers:
        return None
    reader = readers[0]
    name, module = op_name(reader.target), _module(reader)
    if value.dtype is torch.float8_e4m3fn:
        return PlaceholderInfo("parameter", f"{module}.weight")
    if name in ("jetrl.gemm", GEMM_PARTS) and reader.args[3] is node:
        return PlaceholderInfo("parameter", f"{module}.weight_scale_inv")
    if name in _LOOKUPS and reader.args[0] is node:
        table = "weight" if name == "embedding" else "cos_sin_cache"
        kind = "parameter" if name == "embedding" else "buffer"
        return PlaceholderInfo(kind, f"{module}.{table}")
    if value.dim() == 2 and name in TRANSPOSES and "Linear" in _module_class(reader):
        return PlaceholderInfo("parameter", f"{module}.weight")  # a layer in BF16
    if value.dim() == 1:
        is_bias = name == "add"
        return PlaceholderInfo(
            "parameter", f"{module}.{'bias' if is_bias else 'weight'}"
        )
    return None


def _module(node: Node) -> str:
    stack = node.meta.get("nn_module_stack")
    return canonical_path(next(reversed(stack.values()))[0]) if stack else ""


def _module_class(node: Node) -> str:
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    kind = next(reversed(stack.values()))[1]
    return kind if isinstance(kind, str) else str(kind.__name__)


class EngineContext(Context):
    """The state of one run of the passes over a graph of vLLM's.

    Attributes:
        attributes: What the engine knows of opaque operators, by module.
        strict: Whether another precision than the recipe's is an error.
        whole: N and K of whole layers by module, to read a rank's graph as that of the
            whole model; None: as it is.
    """

    strict: bool = True
    whole: WholeShapes | None = None
    attributes: Mapping[str, Mapping[str, Scalar]] | None = None

    @property
    def built(self) -> BuiltGraph:
        """The precision graph of the FX graph as it is now."""
        if self._built is None:
            graph = expand_fused(self.graph)
            self.nodes = list(graph.nodes)
            captured = capture(
                graph,
                self.placeholders,
                prefix=self.prefix,
                attributes=self.attributes,
            )
            self._built = build(captured, self.meta, self.whole)
        return self._built


def build(
    captured: CapturedGraph, meta: Mapping[str, Any], whole: WholeShapes | None = None
) -> BuiltGraph:
    """Return the precision graph of a captured graph of vLLM's.

    Args:
        captured: The graph.
        meta: Of the precision graph.
        whole: N and K of whole layers by module, to read a rank's graph as that of the
            whole model; None: as it is.
    """
    for node in captured.nodes:
        if node.target == GEMM_PARTS:  # one GEMM, whose scales tell its parts
            node.target = "jetrl.gemm"
            node.args = (*node.args[:4], *node.args[5:])
    invariant = {p.name: p.batch_invariant for p in PROVIDERS.values()}
    if whole is None:
        return build_precision_graph(captured, invariant, **meta)
    sums = without_sums(captured)
    said = {META: f"{sums} sums over ranks, of BF16 results"} if sums else {}
    built = build_precision_graph(captured, invariant, **{**meta, **said})
    return with_whole_shapes(built, whole)
