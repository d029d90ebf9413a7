"""Which operator a tensor of a captured graph comes from, and what rounded it."""

from collections.abc import Sequence
from dataclasses import dataclass

from jetrl_compile.capture import CapturedGraph, CapturedNode, Ref
from jetrl_compile.formats import FLOATING
from jetrl_compile.op_classes import (
    CASTS,
    CONSTANTS,
    RESHAPES,
    TRANSPOSES,
    VIEWS,
)

_BITS = {name: bits for bits, name in enumerate(FLOATING)}


def narrower(a: str, b: str) -> str:
    """Return the narrower of two floating dtypes; the second where one is neither."""
    if a in _BITS and b in _BITS:
        return a if _BITS[a] <= _BITS[b] else b
    return b


@dataclass(frozen=True, slots=True)
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
            booleans, and floats made from those alone (masks).
        passes: For each node, whether it is a view or a cast.
    """

    def __init__(self, graph: CapturedGraph) -> None:
        self.nodes: Sequence[CapturedNode] = graph.nodes
        self.inputs = [node.inputs() for node in graph.nodes]
        self.users: list[list[int]] = [[] for _ in graph.nodes]
        for index, read in enumerate(self.inputs):
            for source in dict.fromkeys(read):
                self.users[source].append(index)
        self.passes = [self._passes(index) for index in range(len(self.nodes))]
        self.is_index: list[bool] = []
        for index in range(len(self.nodes)):
            self.is_index.append(self._is_index(index))
        self._sources: list[Source] = []
        for index in range(len(self.nodes)):
            self._sources.append(self._source(index))

    def source(self, index: int) -> Source:
        """Return where the tensor of a node comes from."""
        return self._sources[index]

    def weight(self, index: int) -> WeightSource | None:
        """Return the stored weight that a GEMM operand is, or None for an activation.

        Seen through transposes, casts, and reshapes and expansions that keep it the
        same matrix.
        """
        transposed, dtype = False, self.nodes[index].dtype
        while True:
            node = self.nodes[index]
            dtype = narrower(dtype, node.dtype)
            if node.op == "placeholder":
                stored = node.target != "input" and len(node.shape) == 2
                return WeightSource(index, transposed, dtype) if stored else None
            if node.target == "jetrl.dequantize":
                return WeightSource(index, transposed, dtype)
            if node.target in TRANSPOSES:
                transposed = not transposed
            elif not (node.target in CASTS | RESHAPES or node.target == "expand"):
                return None
            if not self.inputs[index]:
                return None
            index = self.inputs[index][0]

    def _passes(self, index: int) -> bool:
        node = self.nodes[index]
        if node.op != "call" or not self.inputs[index]:
            return False
        if node.target in VIEWS or node.target in CASTS or _is_identity(node):
            return True
        return node.target == "cat" and self._cache_append(index) is not None

    def _cache_append(self, index: int) -> int | None:
        """Return what is appended to a key/value cache by a concatenation, or None."""
        parts = self.inputs[index]
        fresh = [
            part
            for part in parts
            if not (
                self.nodes[part].op == "placeholder"
                and self.nodes[part].target == "input"
            )
        ]
        return fresh[0] if len(parts) == 2 and len(fresh) == 1 else None

    def _is_index(self, index: int) -> bool:
        node = self.nodes[index]
        if node.op == "attribute":
            return True
        if node.op != "call":
            return node.op == "placeholder" and bool(node.dtype) and not _floats(node)
        if node.dtype and node.dtype not in FLOATING and not _complex(node):
            return True
        read = self.inputs[index]
        if not read:
            return True
        return all(self.is_index[source] for source in read) or (
            node.target in CONSTANTS
        )

    def _source(self, index: int) -> Source:
        node = self.nodes[index]
        if not self.passes[index]:
            return Source(index, node.dtype)
        parent = self.inputs[index][0]
        if node.target == "cat":
            appended = self._cache_append(index)
            parent = parent if appended is None else appended
        before = self._sources[parent]
        if node.target == "getitem" and not self.nodes[parent].dtype:
            slot = node.args[1] if len(node.args) > 1 else 0
            if before.index == parent and isinstance(slot, int):
                return Source(parent, node.dtype, slot)
        return Source(before.index, narrower(before.dtype, node.dtype), before.slot)


def _floats(node: CapturedNode) -> bool:
    return node.dtype in FLOATING or _complex(node)


def _complex(node: CapturedNode) -> bool:
    return node.dtype.startswith("complex")


def scalar_args(node: CapturedNode) -> list[int | float]:
    """Return the numbers among a node's positional arguments."""
    return [
        arg
        for arg in node.args
        if isinstance(arg, (int, float)) and not isinstance(arg, (bool, Ref))
    ]


def _is_identity(node: CapturedNode) -> bool:
    """Whether a node is a dropout that drops nothing."""
    if node.target != "dropout":
        return False
    p = node.kwargs.get("p", node.args[1] if len(node.args) > 1 else 0.5)
    training = node.kwargs.get("training", node.args[2] if len(node.args) > 2 else True)
    return p == 0 or training is False
