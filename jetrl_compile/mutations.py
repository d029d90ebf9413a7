"""Let every read of a tensor that was written to come from the operator that wrote it.

Dynamo-level graphs write in place: vLLM's attention writes to `output`, its rotary
embedding to q and k, a static cache is filled by `index_copy_`. A read after the write,
of the tensor or of a view of it, is here a read of the writing operator's result. A
write to a part of a tensor becomes `slice_scatter`, as AOTAutograd writes it.
"""

from collections.abc import Mapping
from typing import Any

from jetrl_compile.captured_graph import CapturedGraph, CapturedNode, Ref
from jetrl_compile.op_classes import PARTIAL_VIEWS, SAME_MATRIX, UNINITIALIZED


def without_mutations(graph: CapturedGraph) -> tuple[CapturedGraph, list[int] | None]:
    """Return the graph with each read after a write made a read of the writer.

    An operator that writes to several tensors gets a `getitem` node for each, so nodes
    may be renumbered.

    Args:
        graph: A captured graph; it is not changed.

    Returns:
        The graph without `mutates`, and for each of its nodes the index of the node
        that it was in `graph`, or None where the graph is the same one.
    """
    if not any(node.mutates for node in graph.nodes):
        return graph, None
    worker = _Functionalizer()
    for index, node in enumerate(graph.nodes):
        worker.add(index, node, graph.reads[index])
    nodes = tuple(worker.nodes)
    return CapturedGraph(nodes, worker.reads, graph.level), worker.origin


class _Functionalizer:
    def __init__(self) -> None:
        self.nodes: list[CapturedNode] = []
        self.reads: list[list[int]] = []
        self.origin: list[int] = []
        self.new: list[int] = []  # old index -> new one
        self.base: list[int] = []  # old index -> the first of its equal views
        self.parent: dict[int, int] = {}  # partial view -> what it is a part of
        # Who wrote all of a tensor last, and who wrote to parts of it since then.
        self.written: dict[int, int] = {}
        self.parts: dict[int, list[int]] = {}
        self.joined: dict[int, int] = {}  # a tensor with the parts written to it
        self.time: dict[int, int] = {}  # new index of a writer -> old index
        self.children: dict[int, list[int]] = {}
        self.stale: set[int] = set()  # tensors of which a read may be another now

    def add(self, index: int, node: CapturedNode, inputs: list[int]) -> None:
        base = index
        if node.op == "call" and inputs and not node.mutates:
            if node.target in SAME_MATRIX and node.target != "clone":
                base = self.base[inputs[0]]
            elif node.target in PARTIAL_VIEWS:
                parent = self.parent[index] = self.base[inputs[0]]
                self.children.setdefault(parent, []).append(index)
        self.base.append(base)
        written: list[int] = []
        if node.mutates:
            found = (_argument(node, place) for place in node.mutates)
            written = [i for i in found if i >= 0]
        if not written and self._is_current(inputs):
            self.nodes.append(node)
            self.reads.append(inputs)
            self.origin.append(index)
            self.new.append(index)
            return
        unread = {i for i in written if self._is_unset(i)}
        item = _copy(
            node,
            self._rewrite(node.args, unread),
            self._rewrite(node.kwargs, unread) if node.kwargs else {},
        )
        held = [self.nodes[self._now(i)] for i in written]
        self._append(index, item)
        self.new.append(len(self.nodes) - 1)
        if len(written) == 1:
            if not item.dtype:
                item.dtype, item.shape, item.outputs = held[0].dtype, held[0].shape, ()
            self.base[index] = self.base[written[0]]
            self._wrote(index, written[0], self.new[index])
        elif written:
            self._wrote_several(index, item, written, held)

    def _is_current(self, inputs: list[int]) -> bool:
        """Whether a node is kept as it is: nothing renumbered, nothing stale read."""
        if len(self.nodes) != len(self.new):
            return False
        return self.stale.isdisjoint([self.base[i] for i in inputs])

    def _append(self, index: int, node: CapturedNode) -> None:
        self.nodes.append(node)
        self.reads.append(node.inputs())
        self.origin.append(index)

    def _wrote_several(
        self,
        index: int,
        item: CapturedNode,
        written: list[int],
        held: list[CapturedNode],
    ) -> None:
        """Make each tensor that an operator wrote to one of its results."""
        item.outputs = tuple(old.dtype for old in held)
        for slot, (target, old) in enumerate(zip(written, held, strict=True)):
            args = (Ref(self.new[index]), slot)
            part = self._made(f"{item.name}_{slot}", "getitem", args, old, item)
            self._append(index, part)
            self._wrote(index, target, len(self.nodes) - 1)

    def _made(
        self,
        name: str,
        target: str,
        args: tuple[Any, ...],
        like: CapturedNode,
        at: CapturedNode,
    ) -> CapturedNode:
        node = CapturedNode(name, "call", target, args, {}, like.dtype, like.shape)
        node.module, node.module_class = at.module, at.module_class
        node.backward = at.backward
        return node

    def _is_unset(self, index: int) -> bool:
        """Whether a tensor holds nothing yet: memory that was only made."""
        base = self.base[index]
        if base in self.written or base in self.parts or base in self.joined:
            return False
        return self.nodes[self.new[base]].target in UNINITIALIZED

    def _wrote(self, index: int, target: int, writer: int) -> None:
        base = self.base[target]
        self.time[writer] = index
        self.written[base] = writer
        self.parts.pop(base, None)
        self.joined.pop(base, None)
        below = [base]
        while below:
            self.stale.add(below[-1])
            below += self.children.get(below.pop(), ())
        while base in self.parent:
            base = self.parent[base]
            self.stale.add(base)
            self.parts.setdefault(base, []).append(writer)

    def _now(self, index: int) -> int:
        """The new index of what a read of an old node gives at this point."""
        base = self.base[index]
        for writer in self.parts.pop(base, ()):
            self._join(base, writer)
        for found in (self.joined.get(base), self.written.get(base)):
            if found is not None and self.time[found] >= index:
                return found
        while base in self.parent:
            base = self.parent[base]
            found = self.written.get(base)
            if found is not None and self.time[found] >= index:
                return found
        return self.new[index]

    def _join(self, base: int, writer: int) -> None:
        """Write a part into a tensor that is about to be read."""
        before = self.joined.get(base, self.written.get(base, self.new[base]))
        whole, part = self.nodes[before], self.nodes[writer]
        if not whole.dtype:
            return  # the results of a split are apart
        unset = whole.target in UNINITIALIZED
        args = (None if unset else Ref(before), Ref(writer))
        name = f"{part.name}_into_{whole.name}"
        node = self._made(name, "slice_scatter", args, whole, part)
        self._append(self.time[writer], node)
        self.joined[base] = len(self.nodes) - 1
        self.time[self.joined[base]] = self.time[writer]

    def _rewrite(self, value: Any, unread: set[int]) -> Any:
        kind = type(value)
        if kind is Ref:
            return None if value.index in unread else Ref(self._now(value.index))
        if kind is tuple:
            return tuple([self._rewrite(item, unread) for item in value])
        if kind is dict:
            return {key: self._rewrite(item, unread) for key, item in value.items()}
        return value


def _copy(
    node: CapturedNode, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> CapturedNode:
    """Return a node with other arguments, which writes to none of them."""
    return CapturedNode(
        node.name,
        node.op,
        node.target,
        args,
        kwargs,
        node.dtype,
        node.shape,
        node.outputs,
        node.module,
        node.module_class,
        node.backward,
        (),
        node.attributes,
    )


def _argument(node: CapturedNode, place: int | str) -> int:
    """The node that an argument is, or -1 if it is none."""
    value: Any = None
    if isinstance(place, str):
        value = node.kwargs.get(place)
    elif place < len(node.args):
        value = node.args[place]
    return value.index if isinstance(value, Ref) else -1
