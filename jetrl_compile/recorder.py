"""Record what each operator of a precision graph computed, while its graph runs.

For the audit: the lowering "aot" hands its graphs to `Recorder.interpret`, which runs
them node by node and keeps the values of the nodes at which operators end.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from jetrl_compile.pipeline import CompileReport


class Recorder:
    """Values by operator name, in the order in which they were computed.

    Attributes:
        values: The first value of each operator since the last `clear`.
        layers: Where decoder layers share a compiled graph: for the address of each of
            their parameters and buffers, the path of the layer that owns it.
    """

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.layers: dict[int, str] = {}

    def clear(self) -> None:
        """Forget all values."""
        self.values.clear()

    def interpret(
        self, module: GraphModule, report: CompileReport
    ) -> Callable[..., Any]:
        """Return a function that runs a graph and records its operators."""
        names: dict[str, list[str]] = {}
        for operator, node in report.nodes.items():
            if report.graph.by_name[operator].kind not in ("parameter", "output"):
                names.setdefault(node, []).append(operator)
        runner = _Recording(module, names, self.values)

        def run(*args: Any) -> Any:
            runner.prefix = (report.module, self._layer(args) or report.module)
            return runner.run(*args)

        return run

    def _layer(self, args: Sequence[Any]) -> str | None:
        """The layer whose parameters a graph was called with."""
        for value in args:
            if isinstance(value, Tensor) and value.data_ptr() in self.layers:
                return self.layers[value.data_ptr()]
        return None

    def watch(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> list[Any]:
        """Record a model whose decoder layers are compiled one by one.

        Args:
            model: The model.
            layers: Its compiled layers by path.

        Returns:
            Hooks on the modules outside the layers, to be removed when done. They
            record a module's result under its path.
        """
        inside = {id(m) for layer in layers.values() for m in layer.modules()}
        for path, layer in layers.items():
            for tensor in (*layer.parameters(), *layer.buffers()):
                self.layers[tensor.data_ptr()] = path

        def hook(path: str) -> Callable[..., None]:
            def record(_: nn.Module, __: Any, result: Any) -> None:
                value = result[0] if isinstance(result, tuple) else result
                if isinstance(value, Tensor):
                    self.values.setdefault(path, value.detach().clone())

            return record

        return [
            module.register_forward_hook(hook(path))
            for path, module in model.named_modules()
            if id(module) not in inside and not any(module.children())
        ]


class _Recording(Interpreter):
    def __init__(
        self,
        module: GraphModule,
        names: Mapping[str, Sequence[str]],
        values: dict[str, Tensor],
    ) -> None:
        super().__init__(module)
        self.names = names
        self.values = values
        self.prefix = ("", "")

    def run_node(self, n: Node) -> Any:
        """Run a node; keep its value if an operator ends there."""
        result = super().run_node(n)
        for operator in self.names.get(n.name, ()):
            value = result[0] if isinstance(result, (tuple, list)) else result
            if isinstance(value, Tensor):
                old, new = self.prefix
                name = new + operator[len(old) :] if old else operator
                self.values.setdefault(name, value.detach().clone())
        return result


def first_difference(
    order: Sequence[str], a: Mapping[str, Tensor], b: Mapping[str, Tensor]
) -> tuple[str, int, int] | None:
    """Return the first operator whose values differ in bits, or None.

    Args:
        order: Operator names in execution order; those recorded on both sides count.
        a: Values of one side.
        b: Values of the other.

    Returns:
        The operator, how many of its elements differ, and of how many.
    """
    for name in order:
        if name not in a or name not in b:
            continue
        left, right = a[name], b[name]
        if left.shape != right.shape or left.dtype != right.dtype:
            return name, left.numel(), left.numel()
        differ = ~((left == right) | (left.isnan() & right.isnan()))
        count = int(differ.sum())
        if count:
            return name, count, left.numel()
    return None
