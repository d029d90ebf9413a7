"""Which operator a tensor of a captured graph comes from, and what rounded it."""

from collections.abc import Sequence
from dataclasses import dataclass

from jetrl_compile.captured_graph import CapturedGraph, CapturedNode, Ref
from jetrl_compile.formats import FLOATING
from jetrl_compile.matrix_views import is_transposed
from jetrl_compile.op_classes import (
    CACHE_WRITES,
    CASTS,
    CONSTANTS,
    JOINS,
    LOOKUPS,
    LOWERED_DEQUANTIZE,
    SAME_MATRIX,
    VIEWS,
)

_BITS = {name: bits for bits, name in enumerate(FLOATING)}
# A complex number is a pair of floats, and a view of one.
_BITS |= {"complex64": _BITS["fp32"], "complex128": _BITS["fp64"]}
_ONE_INPUT = VIEWS | CASTS
_SEEN_THROUGH = CASTS | SAME_MATRIX | {"expand"}
ROPE_TABLE = "cos_sin_cache"  # vLLM's buffer of cosines and sines


def narrower(a: str, b: str) -> str:
    """Return the narrower of two floating dtypes; the second where one is neither."""
    if a == b:
        return a
    if a in _BITS and b in _BITS:
        return a if _BITS[a] <= _BITS[b] else b
    return b


@dataclass(slots=True)
class Source:
    """Where a tensor comes from.

    Attributes:
        index: The node that makes it, seen through views and casts.
        dtype: Short name of the narrowest dtype between there and here: what the
            values were rounded to. Widening casts are exact and leave no trace.
        slot: Which of the maker's results it is.
    """

    index: int
    dtype: str
    slot: int = 0


@dataclass(frozen=True, slots=True)
class WeightSource:
    """A GEMM operand that is a stored weight.

    Attributes:
        index: The parameter's node (or the `jetrl.dequantize` of stored codes).
        transposed: Whether the operand is the stored matrix transposed.
        dtype: Short name of the dtype that it was rounded to.
    """

    index: int
    transposed: bool
    dtype: str


class TensorSources:
    """Sources of every tensor of a graph; linear in its size.

    Attributes:
        nodes: The graph's nodes.
        inputs: For each node, the nodes that it reads.
        users: For each node, the nodes that read it.
        is_index: For each node, whether it carries no activation or weight: integers,
            booleans, sizes, and floats made from those alone (masks).
        parent: For each node that is a view, a cast, or a write into a cache, the one
            tensor that it reads its values from; else -1.
        passes: For each node, whether it is one of these.
        of_parameters: For each node, whether it is a parameter or made of parameters
            alone: a merged adapter, a weight that is scaled or joined from parts.
    """

    def __init__(self, graph: CapturedGraph) -> None:
        self.nodes: Sequence[CapturedNode] = graph.nodes
        self.inputs = graph.reads
        self.users: list[list[int]] = [[] for _ in graph.nodes]
        for index, read in enumerate(self.inputs):
            for source in read if len(read) < 2 else dict.fromkeys(read):
                self.users[source].append(index)
        self.parent: list[int] = []
        self.passes: list[bool] = []
        self.is_index: list[bool] = []
        self.of_parameters: list[bool] = []
        self._sources: list[Source] = []
        for index, node in enumerate(graph.nodes):
            parent = self._passed(index, node) if node.op == "call" else -1
            self.parent.append(parent)
            self.passes.append(parent >= 0)
            self.is_index.append(self._is_index(index, node))
            self.of_parameters.append(self._of_parameters(index, node))
            self._sources.append(self._source(index, node, parent))

    def source(self, index: int) -> Source:
        """Return where the tensor of a node comes from."""
        return self._sources[index]

    def weight(self, index: int) -> WeightSource | None:
        """Return the stored weight that a GEMM operand is, or None for an activation.

        Seen through transposes, casts, and reshapes and expansions that keep it the
        same matrix: a view that mixes rows and columns, such as one that permutes
        heads, makes another matrix.
        """
        dtype = self.nodes[index].dtype
        views: list[CapturedNode] = []
        while True:
            node = self.nodes[index]
            dtype = narrower(dtype, node.dtype)
            if node.op == "placeholder":
                if node.target == "input" or len(node.shape) != 2:
                    return None
                break
            if node.target == LOWERED_DEQUANTIZE:
                break
            if node.target not in _SEEN_THROUGH or not self.inputs[index]:
                return None
            views.append(node)
            index = self.inputs[index][0]
        transposed = is_transposed(self.nodes[index].shape, views[::-1])
        return None if transposed is None else WeightSource(index, transposed, dtype)

    def is_parameter(self, index: int) -> bool:
        """Return whether a tensor is a parameter or a buffer, seen through views."""
        node = self.nodes[self._sources[index].index]
        return node.op == "placeholder" and node.target != "input"

    def _passed(self, index: int, node: CapturedNode) -> int:
        """Return the node whose values a call passes on, or -1 if it computes."""
        read = self.inputs[index]
        if not read:
            return -1
        target = node.target
        if target in _ONE_INPUT or (target == "dropout" and _drops_nothing(node)):
            return read[0]
        if target in JOINS:
            return self._appended(read) if len(read) == 2 else -1
        if target in CACHE_WRITES:
            place = CACHE_WRITES[target]
            value = node.args[place] if place < len(node.args) else None
            if isinstance(value, Ref) and (target == "copy" or self._cache(read[0])):
                return value.index
        if target in LOOKUPS and self._is_rope_table(read):
            return next(i for i in read if self._is_rope_table([i]))
        return -1

    def _cache(self, index: int) -> bool:
        """Whether a tensor is an input or buffer, or a part or an update of one."""
        while self.nodes[index].op == "call":
            node = self.nodes[index]
            writes = node.target in CACHE_WRITES and self.passes[index]
            if not (node.target in VIEWS or writes) or not self.inputs[index]:
                return False
            index = self.inputs[index][0]
        return self.nodes[index].target in ("input", "buffer")

    def _appended(self, parts: list[int]) -> int:
        """Return what a concatenation appends to a key/value cache, or -1.

        A cache that is made anew in the graph begins as an empty tensor.
        """
        fresh = [
            part
            for part in parts
            if 0 not in self.nodes[part].shape
            and not (
                self.nodes[part].op == "placeholder"
                and self.nodes[part].target == "input"
            )
        ]
        return fresh[0] if len(fresh) == 1 else -1

    def _is_rope_table(self, read: list[int]) -> bool:
        nodes, sources = self.nodes, self._sources
        return any(nodes[sources[i].index].module.endswith(ROPE_TABLE) for i in read)

    def _is_index(self, index: int, node: CapturedNode) -> bool:
        if node.op == "attribute":
            return True
        if node.op == "placeholder":
            return node.dtype not in _BITS
        if node.op != "call":
            return False
        if node.dtype not in _BITS and (node.dtype or not any(node.outputs)):
            return True  # integers, booleans; a size, or nothing
        is_index = self.is_index
        return node.target in CONSTANTS or all(is_index[i] for i in self.inputs[index])

    def _of_parameters(self, index: int, node: CapturedNode) -> bool:
        if node.op == "placeholder":
            return node.target == "parameter"
        if node.op != "call":
            return False
        read = [i for i in self.inputs[index] if not self._is_constant(i)]
        return bool(read) and all(self.of_parameters[i] for i in read)

    def _is_constant(self, index: int) -> bool:
        node = self.nodes[index]
        return node.op == "attribute" or (node.op == "call" and not self.inputs[index])

    def _source(self, index: int, node: CapturedNode, parent: int) -> Source:
        if parent < 0:
            return Source(index, node.dtype)
        before = self._sources[parent]
        if node.target == "getitem" and not self.nodes[parent].dtype:
            slot = node.args[1] if len(node.args) > 1 else 0
            if before.index == parent and isinstance(slot, int):
                return Source(parent, node.dtype, slot)
        if before.dtype == node.dtype:
            return before
        return Source(before.index, narrower(before.dtype, node.dtype), before.slot)


def scalar_args(node: CapturedNode) -> list[int | float]:
    """Return the numbers among a node's positional arguments."""
    return [
        arg
        for arg in node.args
        if isinstance(arg, (int, float)) and not isinstance(arg, bool)
    ]


def _drops_nothing(node: CapturedNode) -> bool:
    p = node.kwargs.get("p", node.args[1] if len(node.args) > 1 else 0.5)
    training = node.kwargs.get("training", node.args[2] if len(node.args) > 2 else True)
    return p == 0 or training is False
