"""A captured graph: an FX graph's operators as data, free of torch objects.

The precision graph is built from this form, whatever the FX graph was (AOTAutograd's
joint or inference graph, or Dynamo's), and whether it was captured now or read from a
JSON file that was captured on another machine.
"""

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from jetrl_compile.formats import short_name

_ROOT = re.compile(r"""^[LG]\[(?:'[^']*'|"[^"]*")\]""")
_CLOSURE = re.compile(r"^\.__closure__\[\d+\]\.cell_contents")
_CONTAINER = re.compile(r"\.?_(modules|parameters|buffers)(?=\[)")
_INDEX = re.compile(r"""\[['"]?([^\]'"]+)['"]?\]""")
_WRAPPERS = frozenset(
    ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
)


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to the node of that index in `CapturedGraph.nodes`."""

    index: int


@dataclass(slots=True)
class CapturedNode:
    """One operator or placeholder.

    Attributes:
        name: Its name in the FX graph.
        op: "placeholder", "call", "attribute" (a constant of the module) or "output".
        target: Its name as `op_name` gives it; for a placeholder "parameter", "buffer"
            or "input"; for an attribute "constant".
        args: Positional arguments, nodes as `Ref`.
        kwargs: Keyword arguments, likewise.
        dtype: Short name of its (first) result's dtype, or "" if it is no tensor.
        shape: The result's shape, None for a dynamic dimension.
        outputs: The dtypes of a result that is a tuple of tensors.
        module: The canonical path of the module that ran it; for a placeholder the
            path of the parameter or buffer, such as "lm_head.weight".
        module_class: That module's class name.
        backward: Whether it runs in backward.
    """

    name: str
    op: str
    target: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = ""
    shape: tuple[int | None, ...] = ()
    outputs: tuple[str, ...] = ()
    module: str = ""
    module_class: str = ""
    backward: bool = False

    def inputs(self) -> list[int]:
        """Return the indices of the nodes that it reads, in order, repeats included."""
        found: list[int] = []
        _collect(self.args, found)
        _collect(self.kwargs, found)
        return found


@dataclass(frozen=True)
class CapturedGraph:
    """Nodes in execution order; each reads only earlier ones."""

    nodes: tuple[CapturedNode, ...]


@dataclass(frozen=True, slots=True)
class PlaceholderInfo:
    """What is known of a graph input.

    Attributes:
        kind: "parameter", "buffer" or "input".
        path: The canonical path of a parameter or buffer; "" for an input.
    """

    kind: str
    path: str = ""


def op_name(target: Any) -> str:
    """Return the name of an FX node's target.

    aten, prims and torch functions lose namespace and overload, methods are their own
    name, other operators keep their namespace: "mm", "linear", "view", "jetrl.gemm".
    """
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    if isinstance(target, torch._ops.OpOverloadPacket):
        namespace, _, name = target._qualified_op_name.partition("::")
        return name if namespace in ("aten", "prims") else f"{namespace}.{name}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target.name()
    name = getattr(target, "__name__", str(target))
    return "getitem" if target is operator.getitem else name.strip("_")


def canonical_path(path: str, prefix: str = "") -> str:
    """Return a module path as Hugging Face spells it.

    Args:
        path: As Dynamo writes it: "L['self'].model.layers.0", or
            "L['self']._modules['model']._parameters['weight']".
        prefix: Path of the compiled module in the whole model, "" for the model.
    """
    rest = _CLOSURE.sub("", _ROOT.sub("", path))
    if rest != path:
        rest = re.sub(r"^(\[\d+\])+", "", rest)
    rest = _INDEX.sub(r".\1", _CONTAINER.sub("", rest))
    parts: list[str] = []
    for part in rest.split("."):
        if part and part not in _WRAPPERS and not part.startswith("slice("):
            parts.append(part)
    return ".".join(([prefix] if prefix else []) + parts)


def _collect(value: Any, found: list[int]) -> None:
    if isinstance(value, Ref):
        found.append(value.index)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found)


def _plain(value: Any, index: Mapping[torch.fx.Node, int]) -> Any:
    """Return an FX argument as data."""
    if isinstance(value, torch.fx.Node):
        return Ref(index[value])
    if isinstance(value, (tuple, list)):
        return tuple(_plain(item, index) for item in value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, index) for key, item in value.items()}
    if isinstance(value, torch.dtype):
        return short_name(value)
    if isinstance(value, slice):
        bounds = (value.start, value.stop, value.step)
        return {"slice": tuple(_plain(bound, index) for bound in bounds)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def _value(node: torch.fx.Node) -> Any:
    value = node.meta.get("val")
    return node.meta.get("example_value") if value is None else value


def _shape(value: torch.Tensor) -> tuple[int | None, ...]:
    return tuple(int(d) if isinstance(d, int) else None for d in value.shape)


def _module_of(node: torch.fx.Node, prefix: str) -> tuple[str, str]:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return (prefix, "")
    path, cls = list(stack.values())[-1]
    name = cls if isinstance(cls, str) else getattr(cls, "__name__", "")
    return (canonical_path(path, prefix), name.rpartition(".")[2])


def capture(
    graph: torch.fx.Graph,
    placeholders: Mapping[str, PlaceholderInfo] | None = None,
    *,
    prefix: str = "",
) -> CapturedGraph:
    """Return an FX graph as data.

    Args:
        graph: A joint, inference or Dynamo graph whose nodes have `meta["val"]` (or
            Dynamo's `meta["example_value"]`).
        placeholders: What is known of the placeholders, by their names in `graph`;
            one that is not named is an input.
        prefix: Path of the compiled module in the whole model.
    """
    known = placeholders or {}
    index: dict[torch.fx.Node, int] = {}
    nodes: list[CapturedNode] = []
    for node in graph.nodes:
        index[node] = len(nodes)
        value = _value(node)
        tensor = value if isinstance(value, torch.Tensor) else None
        outputs: tuple[str, ...] = ()
        if isinstance(value, (tuple, list)):
            outputs = tuple(
                short_name(v.dtype) if isinstance(v, torch.Tensor) else ""
                for v in value
            )
        item = CapturedNode(
            name=node.name,
            op="call",
            target="",
            args=_plain(node.args, index),
            kwargs=_plain(node.kwargs, index),
            dtype="" if tensor is None else short_name(tensor.dtype),
            shape=() if tensor is None else _shape(tensor),
            outputs=outputs,
            backward=node.meta.get("partitioner_tag") == "is_backward",
        )
        if node.op == "placeholder":
            info = known.get(node.name, PlaceholderInfo("input"))
            item.op, item.target, item.module = "placeholder", info.kind, info.path
            item.args = ()
            item.backward = node.name.startswith("tangents_")
        elif node.op == "get_attr":
            item.op, item.target, item.module = "attribute", "constant", node.target
        elif node.op == "output":
            item.op, item.target = "output", "output"
        else:
            item.target = op_name(node.target)
            item.module, item.module_class = _module_of(node, prefix)
        nodes.append(item)
    return CapturedGraph(tuple(nodes))
