"""Trace a model with repeated decoder layers once a kind, and unfold its graph.

Of n layers, the first, the last and one inner layer of each kind are traced. In the
graph of those, what flows from layer to layer is known for each kind, so the graph of
all n layers follows by renaming. Two layers are of one kind when their modules have
equal classes, attributes, parameter shapes and dtypes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from jetrl_compile.errors import PrecisionFlowError
from jetrl_compile.precision_graph import Edge, Operator, PrecisionGraph

_SMALLEST = 4
_PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True)
class Folding:
    """Which layers of a model are traced, and which of them each layer equals.

    Attributes:
        path: Path of the list of layers, such as "model.layers".
        chosen: Indices of the traced layers, in order: first, inner ones, last.
        stands_for: For each layer of the model, the position in `chosen` of the traced
            layer that it equals.
    """

    path: str
    chosen: tuple[int, ...]
    stands_for: tuple[int, ...]


def find_folding(model: nn.Module, config: Any = None) -> Folding | None:
    """Return how to fold a model, or None where that saves nothing.

    Args:
        model: The model; the outermost list of four or more modules is folded.
        config: Its config: per-layer lists in it (`layer_types`) tell kinds apart too.
    """
    lists = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) >= _SMALLEST
    ]
    if not lists:
        return None
    path, layers = lists[0]
    count = len(layers)
    per_layer = [
        value
        for value in _attributes(config)
        if isinstance(value, (list, tuple)) and len(value) == count
    ]
    kinds = [
        (_fingerprint(layer), tuple(str(value[index]) for value in per_layer))
        for index, layer in enumerate(layers)
    ]
    chosen = [0]
    inner: dict[Any, int] = {}
    for index in range(1, count - 1):
        if kinds[index] not in inner:
            inner[kinds[index]] = len(chosen)
            chosen.append(index)
    chosen.append(count - 1)
    if len(chosen) >= count:
        return None
    positions = [0, *(inner[kinds[index]] for index in range(1, count - 1))]
    return Folding(path, tuple(chosen), (*positions, len(chosen) - 1))


def fold(model: nn.Module, folding: Folding, config: Any = None) -> None:
    """Leave only the chosen layers in a model, in place."""
    layers = model.get_submodule(folding.path)
    assert isinstance(layers, nn.ModuleList)
    count = len(layers)
    kept = nn.ModuleList(layers[index] for index in folding.chosen)
    for position, layer in enumerate(kept):
        for module in layer.modules():
            if isinstance(vars(module).get("layer_idx"), int):
                vars(module)["layer_idx"] = position
    parent, _, name = folding.path.rpartition(".")
    setattr(model.get_submodule(parent), name, kept)
    for holder in (config,):
        for key, value in list(vars(holder).items()) if holder is not None else ():
            if isinstance(value, (list, tuple)) and len(value) == count:
                setattr(holder, key, [value[index] for index in folding.chosen])
            elif key in ("num_hidden_layers", "n_layer") and value == count:
                setattr(holder, key, len(folding.chosen))


def _attributes(config: Any) -> Iterable[Any]:
    return [] if config is None else list(vars(config).values())


def _fingerprint(layer: nn.Module) -> Any:
    """What makes two layers compute the same function of their weights."""
    parts = []
    for path, module in layer.named_modules():
        plain = sorted(
            (key, value)
            for key, value in vars(module).items()
            if isinstance(value, _PLAIN)
            and not key.startswith("_")
            and key not in ("layer_idx", "layer_id", "training")
        )
        tensors = [
            (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            for name, tensor in (
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            )
        ]
        parts.append((path, type(module).__qualname__, repr(plain), repr(tensors)))
    return tuple(parts)


def unfold(graph: PrecisionGraph, folding: Folding) -> PrecisionGraph:
    """Return the graph of all layers from the graph of the chosen ones.

    Raises:
        PrecisionFlowError: Layers exchange something that does not repeat.
    """
    return _Unfolder(graph, folding).run()


class _Unfolder:
    def __init__(self, graph: PrecisionGraph, folding: Folding) -> None:
        self.graph = graph
        self.folding = folding
        self.prefix = folding.path + "."
        self.last = len(folding.chosen) - 1
        self.layers = len(folding.stands_for)
        # What each traced layer hands on: to the next one, and back to the one before.
        self.out: dict[tuple[int, str], str] = {}
        self._learn()

    def position(self, name: str) -> int | None:
        """The traced layer that an operator is in, or None."""
        if not name.startswith(self.prefix):
            return None
        head = name[len(self.prefix) :].partition(".")[0].partition(":")[0]
        return int(head) if head.isdigit() else None

    def rename(self, name: str, old: int, new: int) -> str:
        """Move a name from one layer to another."""
        return f"{self.prefix}{new}{name[len(self.prefix) + len(str(old)) :]}"

    def _learn(self) -> None:
        phases = {op.name: op.phase for op in self.graph.operators}
        for edge in self.graph.edges:
            source, target = self.position(edge.source), self.position(edge.target)
            if source is None or source == target:
                continue
            phase = phases[edge.source]
            step = 1 if phase == "forward" else -1
            ends = (self.last, None) if phase == "forward" else (0, None)
            if (source, target) != ends and target != source + step:
                raise PrecisionFlowError(
                    f"edge '{edge}' leaves its layer but not for the next one, so the "
                    "layers cannot be folded"
                )
            known = self.out.setdefault((source, phase), edge.source)
            if known != edge.source:
                raise PrecisionFlowError(
                    f"layer {source} hands on both {known} and {edge.source}, so the "
                    "layers cannot be folded"
                )

    def run(self) -> PrecisionGraph:
        operators: list[Operator] = []
        done: set[tuple[bool, str]] = set()
        by_layer: dict[tuple[int, bool, str], list[Operator]] = {}
        for op in self.graph.operators:
            position = self.position(op.name)
            if position is not None:
                key = (position, op.kind == "parameter", op.phase)
                by_layer.setdefault(key, []).append(op)
        for op in self.graph.operators:
            if self.position(op.name) is None:
                operators.append(op)
                continue
            segment = (op.kind == "parameter", op.phase)
            if segment not in done:
                done.add(segment)
                operators += self._layers(by_layer, segment)
        incoming: dict[str, list[Edge]] = {op.name: [] for op in self.graph.operators}
        for edge in self.graph.edges:
            incoming[edge.target].append(edge)
        edges: list[Edge] = []
        for op in self.graph.operators:
            position = self.position(op.name)
            if position is None:
                edges += [self._outside(edge) for edge in incoming[op.name]]
        for layer, position in enumerate(self.folding.stands_for):
            for key, members in by_layer.items():
                if key[0] != position:
                    continue
                for op in members:
                    edges += [
                        self._edge(edge, position, layer) for edge in incoming[op.name]
                    ]
        return PrecisionGraph(tuple(operators), tuple(edges), self.graph.meta)

    def _layers(
        self,
        by_layer: dict[tuple[int, bool, str], list[Operator]],
        segment: tuple[bool, str],
    ) -> list[Operator]:
        order = list(enumerate(self.folding.stands_for))
        if segment[1] == "backward":
            order.reverse()
        return [
            replace(
                op,
                name=self.rename(op.name, position, layer),
                module=self.rename(op.module, position, layer) if op.module else "",
            )
            for layer, position in order
            for op in by_layer.get((position, *segment), ())
        ]

    def _outside(self, edge: Edge) -> Edge:
        """An edge into an operator outside: only the end layers have those."""
        position = self.position(edge.source)
        if position is None:
            return edge
        layer = 0 if position == 0 else self.layers - 1
        return replace(edge, source=self.rename(edge.source, position, layer))

    def _edge(self, edge: Edge, position: int, layer: int) -> Edge:
        source = self.position(edge.source)
        target = self.rename(edge.target, position, layer)
        if source is None:
            return replace(edge, target=target)
        if source == position:
            name = self.rename(edge.source, position, layer)
            return replace(edge, target=target, source=name)
        # From a neighbour: what the layer that really stands there hands on.
        neighbour = layer + (source - position)
        stands = self.folding.stands_for[neighbour]
        phase = self.graph.by_name[edge.source].phase
        name = self.rename(self.out[(stands, phase)], stands, neighbour)
        return replace(edge, target=target, source=name)
