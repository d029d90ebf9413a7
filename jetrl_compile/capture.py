"""Capture an FX graph as data: AOTAutograd's joint or inference graph, or Dynamo's."""

import operator
import re
from collections.abc import Mapping
from typing import Any

import torch

from jetrl_compile.captured_graph import (
    CapturedGraph,
    CapturedNode,
    PlaceholderInfo,
    Ref,
)
from jetrl_compile.formats import short_name
from jetrl_compile.functionalized import unwrap_functionalized
from jetrl_compile.precision_graph import Scalar

__all__ = [
    "CapturedGraph",
    "CapturedNode",
    "PlaceholderInfo",
    "Ref",
    "canonical_path",
    "capture",
    "op_name",
    "tensor_shape",
]

_ROOT = re.compile(r"""^[LG]\[(?:'[^']*'|"[^"]*")\]""")
_CLOSURE = re.compile(r"^\.__closure__\[\d+\]\.cell_contents")
_CONTAINER = re.compile(r"\.?_(modules|parameters|buffers)(?=\[)")
_INDEX = re.compile(r"""\[['"]?([^\]'"]+)['"]?\]""")
_WRAPPERS = frozenset(
    ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
)
# Functions that AOTAutograd has under another name; in-place ones write to their first.
_PYTHON_NAMES = {
    operator.getitem: "getitem",
    operator.setitem: "setitem",
    operator.truediv: "div",
    operator.itruediv: "div",
    operator.iadd: "add",
    operator.isub: "sub",
    operator.imul: "mul",
    operator.ipow: "pow",
    torch.conv1d: "convolution",
    torch.nn.functional.pad: "constant_pad_nd",
}
_IN_PLACE = frozenset(
    (
        operator.setitem,
        operator.itruediv,
        operator.iadd,
        operator.isub,
        operator.imul,
        operator.ipow,
    )
)


def op_name(target: Any) -> str:
    """Return the name of an FX node's target.

    aten, prims and torch functions lose namespace and overload, methods are their own
    name, an in-place form is called as the other one; other operators keep their
    namespace: "mm", "linear", "view", "add", "jetrl.gemm".
    """
    if isinstance(target, str):
        return target.rstrip("_") or target
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    if isinstance(target, torch._ops.OpOverloadPacket):
        namespace, _, name = target._qualified_op_name.partition("::")
        known = namespace in ("aten", "prims")
        return name.rstrip("_") if known else f"{namespace}.{name}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return str(target.name())  # type: ignore[no-untyped-call]
    if (python := _PYTHON_NAMES.get(target)) is not None:
        return python
    return str(getattr(target, "__name__", target)).strip("_")


def mutated(target: Any, node: torch.fx.Node) -> tuple[int | str, ...]:
    """Return the arguments that a call writes to, by position or keyword."""
    if isinstance(target, str):
        return (0,) if target.endswith("_") and not target.endswith("__") else ()
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = target.overloads()  # type: ignore[no-untyped-call]
        target = getattr(target, overloads[0]) if len(overloads) == 1 else None
    if isinstance(target, torch._ops.OpOverload):
        found: list[int | str] = []
        for place, argument in enumerate(target._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            if place < len(node.args):
                found.append(place)
            elif argument.name in node.kwargs:
                found.append(argument.name)
        return tuple(found)
    try:
        if target in _IN_PLACE:
            return (0,)
    except TypeError:  # a target that cannot be hashed
        return ()
    name = getattr(target, "__name__", "")
    return (0,) if name.endswith("_") and not name.endswith("__") else ()


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
    return "..." if value is Ellipsis else str(value)


def _value(node: torch.fx.Node) -> Any:
    value = node.meta.get("val")
    return node.meta.get("example_value") if value is None else value


def _by_tensor(key: Any) -> bool:
    """Whether an index is or holds a tensor or a list: a gather, not a view."""
    if isinstance(key, torch.fx.Node):
        return isinstance(_value(key), torch.Tensor)
    return isinstance(key, list) or (
        isinstance(key, tuple) and any(map(_by_tensor, key))
    )


def tensor_shape(value: torch.Tensor) -> tuple[int | None, ...]:
    """Return a tensor's shape, None for a dynamic dimension."""
    return tuple(int(d) if isinstance(d, int) else None for d in value.shape)


def _module_of(
    node: torch.fx.Node, prefix: str, known: dict[str, str]
) -> tuple[str, str]:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return (prefix, "")
    path, cls = next(reversed(stack.values()))
    if path not in known:
        known[path] = canonical_path(path, prefix)
    name = cls if isinstance(cls, str) else getattr(cls, "__name__", "")
    return (known[path], name.rpartition(".")[2])


def capture(
    graph: torch.fx.Graph,
    placeholders: Mapping[str, PlaceholderInfo] | None = None,
    *,
    prefix: str = "",
    attributes: Mapping[str, Mapping[str, Scalar]] | None = None,
) -> CapturedGraph:
    """Return an FX graph as data.

    Args:
        graph: A joint, inference or Dynamo graph whose nodes have `meta["val"]` (or
            Dynamo's `meta["example_value"]`).
        placeholders: What is known of the placeholders, by their names in `graph`;
            one that is not named is an input.
        prefix: Path of the compiled module in the whole model.
        attributes: What the engine knows of opaque operators by the path of the module
            that runs them, and of parameters and buffers by theirs.
    """
    known = placeholders or {}
    index: dict[torch.fx.Node, int] = {}
    paths: dict[str, str] = {}
    own_results: dict[torch.fx.Node, int] = {}
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
            shape=() if tensor is None else tensor_shape(tensor),
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
            item.module, item.module_class = _module_of(node, prefix, paths)
            item.mutates = mutated(node.target, node)
            if node.target is getattr:
                item.target, item.args = str(item.args[1]), item.args[:1]
            if item.target == "getitem" and _by_tensor(node.args[1:]):
                item.target = "index"
            unwrap_functionalized(node, item, own_results, op_name)
        if attributes and item.module in attributes:
            item.attributes = dict(attributes[item.module])
        nodes.append(item)
    return CapturedGraph(tuple(nodes), level=_level(graph))


def _level(graph: torch.fx.Graph) -> str:
    """Return "aten" for a graph of AOTAutograd's: of its operators, without methods."""
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    own = any(
        isinstance(target, torch._ops.OpOverload)
        and target.namespace in ("aten", "prims")
        for target in targets
    )
    methods = any(node.op == "call_method" for node in graph.nodes)
    return "aten" if own and not methods else ""
