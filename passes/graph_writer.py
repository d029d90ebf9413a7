"""Copy a graph in which some nodes are written in another form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from jetrl_compile.errors import LoweringError
from jetrl_compile.kernels import ops
from jetrl_compile.passes.graph_nodes import call_key, emit, emit_item

aten = torch.ops.aten
ORIGIN = "jetrl_origin"  # of a fused node: metadata of what it replaced, by role
EXACT = "exact"  # in ORIGIN: whether it stands for operators of exact mode
SUM = "jetrl_sum"  # of a GEMM over several contractions: its parts and their additions


@dataclass(frozen=True)
class Parts:
    """A tensor that is written as several, side by side.

    Attributes:
        nodes: One for each part.
        dim: The dimension along which they lie.
    """

    nodes: tuple[Node, ...]
    dim: int


class Origin:
    """Stands for the node that an operator replaced: its metadata."""

    def __init__(self, node: Node, role: str) -> None:
        known = node.meta.get(ORIGIN, {})
        self.meta: Mapping[str, Any] = known.get(role, node.meta)


Value = Any  # a Node, Parts, or a tuple of these


class GraphWriter:
    """Copies a graph; what is written anew may be there, or be several parts."""

    def __init__(self, graph: Graph) -> None:
        self.source = graph
        self.graph = Graph()
        self.made: dict[Node, Value] = {}
        # By what makes two calls the same: what the fused operator at hand wrote; what
        # all wrote; what was copied, of which a fused operator may be a later copy.
        self.own: dict[Any, Node] = {}
        self.written: dict[Any, list[Node]] = {}
        self.copied: dict[Any, list[Node]] = {}
        self.joined: dict[Node, Node] = {}

    def node(self, node: Node) -> Node:
        """The copy of a node; parts are joined."""
        value = self.made[node]
        if isinstance(value, Parts):
            if node not in self.joined:
                args = (list(value.nodes), value.dim)
                self.joined[node] = emit(self.graph, aten.cat.default, args, node)
            return self.joined[node]
        if not isinstance(value, Node):
            raise LoweringError(
                f"{node} is read as one tensor, and is none; this is a fault of the "
                "compiler, please report it"
            )
        return value

    def copy(self, node: Node) -> Node:
        """Copy a node, unless a fused operator wrote it already."""
        if node.op != "call_function" or node.kwargs:
            return self.graph.node_copy(node, self.node)
        # What was fused may still be read: by backward, say.
        key = call_key(node.target, self.args(node), node)
        same = self.written.get(key)
        if same:
            return same.pop(0) if len(same) > 1 else same[0]
        made = self.graph.node_copy(node, self.node)
        self.copied.setdefault(key, []).append(made)
        return made

    def write(self, target: Any, args: tuple[Any, ...], origin: Any) -> Node:
        """Emit a node of the model; the same one for the same arguments."""
        key = call_key(target, args, origin)
        if key not in self.own:
            left = self.copied.get(key)
            made = left.pop(0) if left else emit(self.graph, target, args, origin)
            self.own[key] = made
            self.written.setdefault(key, []).append(made)
        return self.own[key]

    def args(self, node: Node) -> Any:
        """The arguments of a node's copy."""
        return torch.fx.map_arg(node.args, self.node)

    def args_and_after(self, node: Node) -> Any:
        """The arguments of an operator whose last one only orders it in backward."""
        *args, after = node.args
        value = self.made[after] if isinstance(after, Node) else None
        first = value.nodes[0] if isinstance(value, Parts) else value
        return (*torch.fx.map_arg(tuple(args), self.node), first)

    def quantize(
        self, x: Node, flow: Sequence[Any], transpose: bool, after: Any, origin: Any
    ) -> tuple[Node, Node]:
        """Emit one quantize; `flow` is rows, cols, scale format and amax floor."""
        rows, cols, scale_format, floor = flow
        args = (x, rows, cols, transpose, scale_format, floor, after)
        made = emit(self.graph, ops.quantize, args, origin)
        return (
            emit_item(self.graph, made, 0, origin),
            emit_item(self.graph, made, 1, origin),
        )

    def each(
        self,
        parts: Sequence[Any],
        dim: int,
        flow: Sequence[Any],
        transpose: bool,
        after: Any,
        origin: Any,
    ) -> tuple[Value, Value]:
        """Quantize parts one by one."""
        made = [self.quantize(x, flow, transpose, after, origin) for x in parts]
        if len(made) == 1:
            return made[0]
        where = 1 - dim if transpose else dim
        codes, scales = zip(*made, strict=True)
        return Parts(codes, where), Parts(scales, where)
