"""The captured graph as a JSON file, so that one captured elsewhere can be checked.

    {"format": "jetrl.captured_graph", "version": 1, "meta": {"engine": "vllm", ...},
     "nodes": [
      {"name": "x", "op": "placeholder", "target": "input", "dtype": "bf16",
       "shape": [null, 64]},
      {"name": "y", "op": "call", "target": "linear", "args": [{"node": 0},
       {"node": 1}, null], "dtype": "bf16", ...}]}

A node takes one line and refers to earlier ones by their places. Fields that have their
default value are left out. A list stands for a tuple, and `{"float": "inf"}` for a
float that JSON cannot hold.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jetrl_compile.captured_graph import CapturedGraph, CapturedNode, Ref
from jetrl_compile.errors import GraphFormatError
from jetrl_compile.files import write_text
from jetrl_compile.json_document import Document, is_number, read_document

FORMAT = "jetrl.captured_graph"
VERSION = 1
REMEDY = "capture the graph again with `jetrl_compile.capture`"

_OPS = ("placeholder", "call", "attribute", "output")
_PLACEHOLDERS = ("parameter", "buffer", "input")
_STRINGS = ("name", "op", "target", "dtype", "module", "module_class")
_NODE_FIELDS = (
    *("name", "op", "target", "args", "kwargs", "dtype", "shape", "outputs"),
    *("module", "module_class", "backward", "mutates", "attributes"),
)
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


@dataclass(frozen=True)
class Capture:
    """A captured graph and where it comes from.

    Attributes:
        graph: The captured graph.
        meta: Where it comes from: "engine", "model", "description", ...
    """

    graph: CapturedGraph
    meta: Mapping[str, str] = field(default_factory=dict)


def captured_to_json(
    graph: CapturedGraph, meta: Mapping[str, str] | None = None
) -> str:
    """Return the JSON text of a captured graph; the same graph, the same text.

    Args:
        graph: The graph.
        meta: Where it comes from.

    Raises:
        GraphFormatError: An argument that is no plain data.
    """
    table = ",".join(
        f"\n {_encode(key)}: {_encode(value)}" for key, value in (meta or {}).items()
    )
    nodes = ",".join(f"\n{_encode(_node_to(node))}" for node in graph.nodes)
    return (
        f'{{\n"format": "{FORMAT}",\n"version": {VERSION},\n"meta": {{{table}}},\n'
        f'"nodes": [{nodes}]\n}}\n'
    )


def captured_from_json(text: str | bytes, *, name: str = "the text") -> Capture:
    """Return the captured graph of a JSON text.

    Args:
        text: What `captured_to_json` wrote, or its UTF-8 bytes.
        name: What messages call it.

    Raises:
        GraphFormatError: It is not JSON, is cut off, comes from a newer version, or
            has a missing, misspelt, impossible or dangling part.
    """
    return _read(Document(name, text, REMEDY))


def write_captured(
    graph: CapturedGraph, path: Path | str, meta: Mapping[str, str] | None = None
) -> None:
    """Write a captured graph to a file, whole or not at all.

    Raises:
        GraphFormatError: As `captured_to_json`.
        OutputError: The file cannot be written.
    """
    write_text(path, captured_to_json(graph, meta))


def read_captured(path: Path | str) -> Capture:
    """Read a captured graph that `write_captured` wrote.

    Raises:
        GraphFormatError: As `captured_from_json`, or the file cannot be read.
    """
    return _read(read_document(path, REMEDY))


def _node_to(node: CapturedNode) -> dict[str, Any]:
    item: dict[str, Any] = {"name": node.name, "op": node.op, "target": node.target}
    values = {
        "args": [_value_to(node, arg) for arg in node.args],
        "kwargs": {key: _value_to(node, arg) for key, arg in node.kwargs.items()},
        "dtype": node.dtype,
        "shape": list(node.shape),
        "outputs": list(node.outputs),
        "module": node.module,
        "module_class": node.module_class,
        "backward": node.backward,
        "mutates": list(node.mutates),
        "attributes": {k: _value_to(node, v) for k, v in node.attributes.items()},
    }
    return item | {key: value for key, value in values.items() if value}


def _value_to(node: CapturedNode, value: Any) -> Any:
    if isinstance(value, Ref):
        return {"node": value.index}
    if isinstance(value, (tuple, list)):
        return [_value_to(node, item) for item in value]
    if isinstance(value, Mapping):
        if set(value) == {"node"} or set(value) == {"float"}:
            raise GraphFormatError(
                f"{node.name} has an argument {dict(value)}, which the format gives "
                "another meaning; rename its key"
            )
        return {str(key): _value_to(node, item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise GraphFormatError(
        f"{node.name} has an argument of type {type(value).__name__}; a captured graph "
        "holds plain data: capture it with `jetrl_compile.capture`"
    )


def _read(doc: Document) -> Capture:
    doc.check_header(FORMAT, VERSION, "a captured graph")
    doc.only(doc.root, ("format", "version", "meta", "nodes"), "the file")
    nodes: list[CapturedNode] = []
    for index, item in enumerate(doc.field(doc.root, "nodes", list, "the file")):
        if type(item) is not dict:
            doc.fail(f"has no object as node {index}")
        nodes.append(_node_from(doc, index, item))
    meta = doc.strings(doc.root, "meta", "the file")
    return Capture(CapturedGraph(tuple(nodes)), meta)


def _node_from(doc: Document, index: int, item: dict[str, Any]) -> CapturedNode:
    where = f"node {index}"
    strings = {key: doc.field(item, key, str, where, "") for key in _STRINGS}
    for key in ("name", "op", "target"):
        if not strings[key]:
            doc.fail(f"has no '{key}' in {where}")
    where = f"node {index} ({strings['name']})"
    doc.only(item, _NODE_FIELDS, where)
    if strings["op"] not in _OPS:
        doc.fail(f"has the op {strings['op']!r} in {where}; use {', '.join(_OPS)}")
    if strings["op"] == "placeholder" and strings["target"] not in _PLACEHOLDERS:
        doc.fail(
            f"has the placeholder {strings['target']!r} in {where}; use "
            f"{', '.join(_PLACEHOLDERS)}"
        )
    args = doc.field(item, "args", list, where, [])
    kwargs = doc.field(item, "kwargs", dict, where, {})
    shape = doc.field(item, "shape", list, where, [])
    if any(size is not None and not _is_size(size) for size in shape):
        doc.fail(f"has the shape {shape!r:.60} in {where}; needed are sizes or null")
    outputs = doc.field(item, "outputs", list, where, [])
    if any(type(dtype) is not str for dtype in outputs):
        doc.fail(f"has the outputs {outputs!r:.60} in {where}; needed are dtypes")
    read_args = tuple(_value_from(doc, index, arg, where) for arg in args)
    read_kwargs = {k: _value_from(doc, index, v, where) for k, v in kwargs.items()}
    mutates = doc.field(item, "mutates", list, where, [])
    for place in mutates:
        named = type(place) is str and place in kwargs
        if not named and not (_is_size(place) and place < len(args)):
            doc.fail(f"has {place!r:.60} in 'mutates' of {where}, which is no argument")
    attributes = doc.field(item, "attributes", dict, where, {})
    held = {k: _value_from(doc, index, v, where) for k, v in attributes.items()}
    for key, value in held.items():
        if not isinstance(value, (str, int, float, bool)):
            doc.fail(f"has no plain value as attribute {key!r} of {where}")
    return CapturedNode(
        **strings,
        args=read_args,
        kwargs=read_kwargs,
        shape=tuple(shape),
        outputs=tuple(outputs),
        backward=doc.field(item, "backward", bool, where, False),
        mutates=tuple(mutates),
        attributes=held,
    )


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0


def _value_from(doc: Document, index: int, value: Any, where: str) -> Any:
    if type(value) is list:
        return tuple(_value_from(doc, index, item, where) for item in value)
    if type(value) is dict:
        if set(value) == {"node"}:
            place = value["node"]
            if not _is_size(place) or place >= index:
                doc.fail(f"has {place!r:.60} as a node that {where} reads")
            return Ref(place)
        if set(value) == {"float"}:
            if value["float"] not in _FLOATS:
                doc.fail(f"has {value['float']!r:.60} as a float in {where}")
            return _FLOATS[value["float"]]
        return {k: _value_from(doc, index, item, where) for k, item in value.items()}
    if value is None or type(value) in (str, bool) or is_number(value):
        return value
    doc.fail(f"has {value!r:.60} as an argument in {where}; needed is plain data")
