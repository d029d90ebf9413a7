"""Let every read of a tensor that was written to come from the operator that wrote it.

Dynamo-level graphs write in place: vLLM's attention writes to `output`, its rotary
embedding to q and k, a static cache is filled by `index_copy_`. A read after the write,
of the tensor or of a view of it, is here a read of the writing operator's result.
"""

from dataclasses import replace
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
        worker.add(index, node)
    return CapturedGraph(tuple(worker.nodes)), worker.origin


class _Functionalizer:
    def __init__(self) -> None:
        self.nodes: list[CapturedNode] = []
        self.origin: list[int] = []
        self.new: dict[int, int] = {}  # old index -> new one
        self.base: dict[int, int] = {}  # old index -> the first of its equal views
        self.parent: dict[int, int] = {}  # partial view -> what it is a part of
        # For each tensor: who wrote all of it last, and who wrote any part of it.
        self.written: dict[int, int] = {}
        self.touched: dict[int, int] = {}
        self.time: dict[int, int] = {}  # new index of a writer -> old index

    def add(self, index: int, node: CapturedNode) -> None:
        inputs = node.inputs()
        self.base[index] = index
        if node.op == "call" and inputs and not node.mutates:
            if node.target in SAME_MATRIX and node.target != "clone":
                self.base[index] = self.base[inputs[0]]
            elif node.target in PARTIAL_VIEWS:
                self.parent[index] = self.base[inputs[0]]
        targets = [self._written_argument(node, place) for place in node.mutates]
        written = [ref.index for ref in targets if ref is not None]
        unread = {
            i for i in written if self.nodes[self._now(i)].target in UNINITIALIZED
        }
        unread |= {i for i in written if self._root_target(i) in UNINITIALIZED}
        self.new[index] = len(self.nodes)
        item = replace(
            node,
            args=self._rewrite(node.args, unread),
            kwargs=self._rewrite(node.kwargs, unread),
            mutates=(),
        )
        self._append(index, item)
        if len(written) == 1:
            old = self.nodes[self._now(written[0])]
            if not item.dtype:
                item.dtype, item.shape, item.outputs = old.dtype, old.shape, ()
            self.base[index] = self.base[written[0]]
            self._wrote(index, written[0], self.new[index])
        elif written:
            held = [self.nodes[self._now(i)] for i in written]
            item.outputs = tuple(old.dtype for old in held)
            maker = self.new[index]
            for slot, (target, old) in enumerate(zip(written, held, strict=True)):
                part = CapturedNode(
                    name=f"{node.name}_{slot}",
                    op="call",
                    target="getitem",
                    args=(Ref(maker), slot),
                    dtype=old.dtype,
                    shape=old.shape,
                    module=node.module,
                    module_class=node.module_class,
                    backward=node.backward,
                )
                self._append(index, part)
                self._wrote(index, target, len(self.nodes) - 1)

    def _append(self, index: int, node: CapturedNode) -> None:
        self.nodes.append(node)
        self.origin.append(index)

    def _written_argument(self, node: CapturedNode, place: int | str) -> Ref | None:
        value: Any = None
        if isinstance(place, str):
            value = node.kwargs.get(place)
        elif place < len(node.args):
            value = node.args[place]
        return value if isinstance(value, Ref) else None

    def _root_target(self, index: int) -> str:
        """What made the memory that a tensor is all of."""
        base = self.base[index]
        return "" if base in self.written else self.nodes[self.new[base]].target

    def _wrote(self, index: int, target: int, writer: int) -> None:
        base = self.base[target]
        self.time[writer] = index
        self.written[base] = writer
        self.touched[base] = writer
        while base in self.parent:
            base = self.parent[base]
            if self.nodes[self.new[base]].dtype:  # the parts of a split are apart
                self.touched[base] = writer

    def _now(self, index: int) -> int:
        """The new index of what a read of an old node gives at this point."""
        base = self.base[index]
        found = self.touched.get(base)
        if found is not None and self.time[found] >= index:
            return found
        while base in self.parent:
            base = self.parent[base]
            found = self.written.get(base)
            if found is not None and self.time[found] >= index:
                return found
        return self.new[index]

    def _rewrite(self, value: Any, unread: set[int]) -> Any:
        if isinstance(value, Ref):
            return None if value.index in unread else Ref(self._now(value.index))
        if isinstance(value, (tuple, list)):
            return tuple(self._rewrite(item, unread) for item in value)
        if isinstance(value, dict):
            return {key: self._rewrite(item, unread) for key, item in value.items()}
        return value
