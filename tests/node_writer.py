"""Write the nodes of a captured graph by hand, for descriptions of graphs."""

from collections.abc import Mapping
from typing import Any

from jetrl_compile.captured_graph import CapturedNode, Ref

Shape = tuple[int | None, ...]


class NodeWriter:
    """Writes nodes down in order.

    Attributes:
        nodes: What was written.
        module: Path and class of the module that calls belong to.
    """

    def __init__(self) -> None:
        self.nodes: list[CapturedNode] = []
        self.module = ("model", "")
        self._counts: dict[str, int] = {}

    def _add(self, node: CapturedNode) -> Ref:
        self.nodes.append(node)
        return Ref(len(self.nodes) - 1)

    def placeholder(
        self, kind: str, path: str, dtype: str, shape: Shape, **attributes: Any
    ) -> Ref:
        name = path.replace(".", "_")
        module = "" if kind == "input" else path
        node = CapturedNode(name, "placeholder", kind, dtype=dtype, shape=shape)
        node.module, node.attributes = module, attributes
        return self._add(node)

    def call(
        self,
        target: str,
        *args: Any,
        dtype: str = "bf16",
        shape: Shape = (),
        outputs: tuple[str, ...] = (),
        mutates: tuple[int | str, ...] = (),
        attributes: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Ref:
        number = self._counts[target] = self._counts.get(target, -1) + 1
        name = target.rpartition(".")[2] + (f"_{number}" if number else "")
        module, module_class = self.module
        node = CapturedNode(name, "call", target, args, kwargs, dtype, shape, outputs)
        node.module, node.module_class = module, module_class
        node.mutates, node.attributes = mutates, dict(attributes or {})
        return self._add(node)

    def shape(self, ref: Ref) -> Shape:
        return self.nodes[ref.index].shape

    def view(self, x: Ref, *sizes: int) -> Ref:
        return self.call("view", x, *sizes, shape=(None, *sizes[1:]))

    def last(self, x: Ref, low: int | None, high: int | None) -> Ref:
        """x[..., low:high], for a last dimension that is known."""
        *lead, size = self.shape(x)
        assert size is not None
        width = (size if high is None else high) - (low or 0)
        key = ("...", {"slice": (low, high, None)})
        return self.call("getitem", x, key, shape=(*lead, width))
