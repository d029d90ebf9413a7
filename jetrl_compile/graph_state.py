"""The precision graph while it is built: operators, and edges whose sources are open.

An edge is kept as the captured tensor that it reads until every operator is known,
because a mask or a gradient may be made by an operator that stands later.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jetrl_compile.captured_graph import CapturedGraph
from jetrl_compile.formats import Flow
from jetrl_compile.fused_layers import FusedLayers
from jetrl_compile.gemm_sites import GemmSite, GemmSites
from jetrl_compile.node_groups import Grouping
from jetrl_compile.op_classes import ADD_NORMS, ROPES
from jetrl_compile.precision_graph import Edge, Operator
from jetrl_compile.tensor_sources import TensorSources

_SLOTTED = ADD_NORMS | ROPES


class GraphState:
    """What is known of a captured graph, and what was made of it so far.

    Attributes:
        level: Its level, as formulas name it.
        sources: Where its tensors come from.
        nodes: Its nodes.
        sites: Its weight GEMMs.
        grouping: Its other operators, as groups of nodes.
        fused: Its fused linear layers.
        batch_invariant: For each GEMM provider whether a row's result is independent
            of the batch.
        operators: Those made so far, in execution order.
        made: For each node that ends an operator, the operators of its results: one,
            one a slot, or one for each part of a fused layer.
        gemms: The weight GEMMs, by the names of their operators.
        node_of: For each operator, the name of the captured node that ends it.
    """

    def __init__(
        self, captured: CapturedGraph, batch_invariant: Mapping[str, bool]
    ) -> None:
        self.batch_invariant = batch_invariant
        self.level = captured.level
        self.sources = TensorSources(captured)
        self.nodes = self.sources.nodes
        self.sites = GemmSites(self.sources)
        self.grouping = Grouping(self.sources, self.sites)
        self.fused = FusedLayers(self.sources, self.sites)
        self.operators: list[Operator] = []
        self.made: dict[int, list[str]] = {}
        self.gemms: dict[str, GemmSite] = {}
        self.node_of: dict[str, str] = {}
        self._names: Counter[str] = Counter()
        # target, operand, tensor read or name of the source, flow, part, parts
        self._open: list[_Open] = []
        self._flows: dict[str, Flow] = {}

    def operator(self, index: int, name: str, kind: str, **fields: Any) -> str:
        """Add an operator that ends at a node; return its name, made unique."""
        node = self.nodes[index]
        self._names[name] += 1
        seen = self._names[name]
        if seen > 1:
            name = f"{name}.{seen - 1}"
        if "module" not in fields:
            fields["module"] = node.module
        phase = "backward" if node.backward else "forward"
        self.operators.append(Operator(name, kind, phase=phase, **fields))
        self.made[index] = [name]
        self.node_of[name] = node.name
        return name

    def edge(self, target: str, operand: str, read: int) -> None:
        """Add an operand; several edges where parts of a fused layer made it."""
        self._open.append((target, operand, read, None, 0, 0))

    def part_edge(
        self,
        target: str,
        operand: str,
        read: int,
        flow: Flow | None,
        part: int,
        of: int,
    ) -> None:
        """Add an operand of the `part`-th of `of` layers that one GEMM computes."""
        self._open.append((target, operand, read, flow, part, of))

    def link(self, source: str, target: str, operand: str, flow: Flow) -> None:
        """Add an edge between two known operators."""
        self._open.append((target, operand, source, flow, 0, 0))

    def flow(self, dtype: str) -> Flow:
        """Return the flow without scales of a dtype; the same object each time."""
        found = self._flows.get(dtype)
        if found is None:
            found = self._flows[dtype] = Flow(dtype or "int64")
        return found

    def edges(self) -> list[Edge]:
        """Return every edge added, each operand of a target under a name of its own.

        What a target reads of masks and positions comes last: it may be read before or
        after the rest, as versions of a model's code have it.
        """
        found: list[Edge] = []
        counts: dict[tuple[str, str], int] = {}
        for target, operand, read, flow, part, parts in _indices_last(self._open):
            if isinstance(read, str):
                names = [read]
            else:
                names = self.sources_of(read)
                if parts > 1 and len(names) == parts:
                    names = [names[part]]
                if flow is None:
                    flow = self.flow(self.sources.source(read).dtype)
            assert flow is not None
            for name in names:
                key = (target, operand)
                seen = counts.get(key, 0)
                counts[key] = seen + 1
                label = f"{operand}.{seen}" if seen else operand
                found.append(Edge(name, target, label, flow))
        return found

    def sources_of(self, read: int) -> list[str]:
        """Return the operators that make a tensor: those parts that it holds."""
        source = self.sources.source(read)
        made = self.makers(source.index, source.slot)
        if len(made) > 1:
            parts = self.fused.parts_read(read)
            if parts is not None:
                return [made[part] for part in parts if part < len(made)]
        return made

    def makers(self, index: int, slot: int) -> list[str]:
        """Return the operators that a node's result is made by."""
        group = self.grouping.group_of.get(index)
        if group is not None:
            index_of = group.nodes[0 if group.shape == "index" else -1]
            made = self.made.get(index_of)
        else:
            made = self.made.get(index)
        if made is None:
            # Stored codes seen through a dequantize: the parameter that holds them.
            inner = self.sources.inputs[index]
            return self.makers(self.sources.source(inner[0]).index, 0)
        if len(made) > 1 and self.nodes[index].target in _SLOTTED:
            return [made[min(max(slot, 0), len(made) - 1)]]
        return made

    def module_of(self, read: int) -> str:
        """Return the module of the operator that makes a tensor."""
        source = self.sources.source(read)
        group = self.grouping.group_of.get(source.index)
        open_still = group is not None and group.nodes[-1] not in self.made
        if group is not None and open_still and group.shape != "index":
            return group.module  # it ends later
        made = self.makers(source.index, source.slot)[-1]
        return made.rpartition(":")[0] or made


_Open = tuple[str, str, int | str, Flow | None, int, int]


def _indices_last(open_edges: Sequence[_Open]) -> Iterator[_Open]:
    """Yield edges by target, in the targets' order, those called "index" last."""
    held: list[_Open] = []
    target = ""
    for edge in open_edges:
        if edge[0] != target:
            yield from held
            held.clear()
            target = edge[0]
        if edge[1] == "index":
            held.append(edge)
        else:
            yield edge
    yield from held
