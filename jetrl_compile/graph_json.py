"""The precision graph as a JSON file that people can read, diff and commit.

    {"format": "jetrl.precision_graph", "version": 1,
     "meta": {"phase": "train", ...},
     "flows": {"e4m3 1x128 K": {"dtype": "e4m3", "granularity": "1x128", ...}, ...},
     "operators": [
      {"name": "...:fprop", "kind": "gemm", "params": {"K": 64, "N": 64}, "reads": [
       ["x", "<source>", "e4m3 1x128 K"],
       ["w", "<source>", "e4m3 128x128 K"]]}, ...]}

Each flow is written once and named by its content; an operator and each of its edges
take one line. Fields that have their default value are left out. A float that JSON
cannot hold is `{"float": "inf"}` or `{"float": "-inf"}`.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from jetrl_compile.errors import GraphFormatError, PrecisionFlowError
from jetrl_compile.files import write_text
from jetrl_compile.formats import Flow
from jetrl_compile.granularity import Granularity
from jetrl_compile.json_document import Document, is_number, read_document
from jetrl_compile.precision_graph import (
    KINDS,
    OPERATOR_PHASES,
    Edge,
    Operator,
    PrecisionGraph,
    Scalar,
)

FORMAT = "jetrl.precision_graph"
VERSION = 1
REMEDY = "write the graph again with `jetrl graph`"

_FLOW_FIELDS = tuple(field.name for field in fields(Flow))
_OF_QUANTIZED = _FLOW_FIELDS[2:-1]
_OPERATOR_STRINGS = ("module", "compute_dtype", "provider", "reason", "formula")
_OPERATOR_FIELDS = (
    "name", "kind", "module", "params", "compute_dtype", "provider",
    "batch_invariant", "phase", "reason", "formula", "reads",
)  # fmt: skip
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def graph_to_json(graph: PrecisionGraph) -> str:
    """Return the JSON text of a graph; the same graph always gives the same text.

    Edges are written below their target, in the order in which the graph has them.

    Raises:
        GraphFormatError: A value that the format cannot hold, such as a NaN.
    """
    names = _name_flows(graph)
    parts = [
        f'{{\n"format": "{FORMAT}",\n"version": {VERSION},\n"meta": '
        f"{_table(graph.meta)},\n",
        f'"flows": {_table({name: flow_to(flow) for flow, name in names.items()})}',
        ',\n"operators": [',
        ",".join(_operator_lines(graph, names)),
        "]\n}\n",
    ]
    return "".join(parts)


def graph_from_json(text: str | bytes, *, name: str = "the text") -> PrecisionGraph:
    """Return the graph of a JSON text.

    Args:
        text: What `graph_to_json` wrote, or its UTF-8 bytes.
        name: What messages call it.

    Raises:
        GraphFormatError: It is not JSON, is cut off, comes from a newer version, or
            has a missing, misspelt, impossible or dangling part.
    """
    return _read(Document(name, text, REMEDY))


def write_graph(graph: PrecisionGraph, path: Path | str) -> None:
    """Write a graph to a file, whole or not at all.

    Raises:
        GraphFormatError: As `graph_to_json`.
        OutputError: The file cannot be written.
    """
    write_text(path, graph_to_json(graph))


def read_graph(path: Path | str) -> PrecisionGraph:
    """Read a graph that `write_graph` wrote.

    Raises:
        GraphFormatError: As `graph_from_json`, or the file cannot be read.
    """
    return _read(read_document(path, REMEDY))


def _name_flows(graph: PrecisionGraph) -> dict[Flow, str]:
    names: dict[Flow, str] = {}
    used: set[str] = set()
    for edge in graph.edges:
        flow = edge.flow
        if flow in names:
            continue
        names[flow] = unused_name(flow_words(flow), used)
    return names


def flow_words(flow: Flow) -> str:
    """Return the main words of a flow, such as "e4m3 1x128 K"."""
    words = [flow.dtype]
    if flow.granularity is not None:
        words += [str(flow.granularity), str(flow.direction)]
    if flow.scale_format not in (None, "fp32"):
        words.append(str(flow.scale_format))
    if flow.saved_dtype is not None:
        words.append(f"saved {flow.saved_dtype}")
    return " ".join(words)


def unused_name(base: str, used: set[str]) -> str:
    """Return a name that is not used yet, with a number where needed, and note it."""
    name, number = base, 1
    while name in used:
        number += 1
        name = f"{base} #{number}"
    used.add(name)
    return name


def _table(table: Any) -> str:
    rows = ",".join(f"\n {_encode(key)}: {_encode(table[key])}" for key in table)
    return f"{{{rows}\n}}" if rows else "{}"


def flow_to(flow: Flow) -> dict[str, Any]:
    """Return a flow as JSON holds it.

    Raises:
        GraphFormatError: A quantized flow lacks an attribute, or its floor is none.
    """
    values = {key: getattr(flow, key) for key in _FLOW_FIELDS}
    if flow.granularity is not None:
        values["granularity"] = str(flow.granularity)
        missing = [key for key in _OF_QUANTIZED if values[key] is None]
        if missing:
            raise GraphFormatError(
                f"a quantized {flow.dtype} flow has no {', '.join(missing)}; give it "
                "every attribute before the graph is written"
            )
    floor = flow.amax_floor
    if floor is not None and not (math.isfinite(floor) and floor >= 0):
        raise GraphFormatError(
            f"a {flow.dtype} flow has the amax floor {floor}; needed is a finite "
            "number that is not negative"
        )
    return {key: value for key, value in values.items() if value is not None}


def _operator_lines(graph: PrecisionGraph, names: dict[Flow, str]) -> Iterator[str]:
    for op in graph.operators:
        line = f"\n{_encode(operator_to(op))}"
        reads = ",".join(
            f"\n {_encode([edge.operand, edge.source, names[edge.flow]])}"
            for edge in graph.operands[op.name].values()
        )
        yield f'{line[:-1]}, "reads": [{reads}]}}' if reads else line


def operator_to(op: Operator) -> dict[str, Any]:
    """Return an operator as JSON holds it, without what it reads.

    Raises:
        GraphFormatError: A parameter is NaN.
    """
    item: dict[str, Any] = {"name": op.name, "kind": op.kind}
    if op.module:
        item["module"] = op.module
    if op.params:
        item["params"] = {key: _scalar_to(op, val) for key, val in op.params}
    if op.compute_dtype:
        item["compute_dtype"] = op.compute_dtype
    if op.provider:
        item["provider"] = op.provider
    if op.batch_invariant is not None:
        item["batch_invariant"] = op.batch_invariant
    if op.phase != "forward":
        item["phase"] = op.phase
    if op.reason:
        item["reason"] = op.reason
    if op.formula:
        item["formula"] = op.formula
    return item


def _scalar_to(op: Operator, value: Scalar) -> Scalar | dict[str, str]:
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            raise GraphFormatError(
                f"{op.name} has a parameter that is NaN, which equals nothing; give "
                "it a number or a string"
            )
        return {"float": "inf" if value > 0 else "-inf"}
    return value


def _read(doc: Document) -> PrecisionGraph:
    doc.check_header(FORMAT, VERSION, "a precision graph")
    root = doc.root
    known = ("format", "version", "meta", "flows", "operators")
    doc.only(root, known, "the file")
    table = doc.field(root, "flows", dict, "the file")
    flows = {name: flow_from(doc, name, item) for name, item in table.items()}
    operators: list[Operator] = []
    edges: list[Edge] = []
    for index, item in enumerate(doc.field(root, "operators", list, "the file")):
        if type(item) is not dict:
            doc.fail(f"has no object as operator {index}")
        operators.append(operator_from(doc, index, item))
        for read in item.get("reads", ()):
            edges.append(_edge_from(doc, operators[-1].name, read, flows))
    meta = doc.strings(root, "meta", "the file")
    try:
        return PrecisionGraph(tuple(operators), tuple(edges), meta)
    except PrecisionFlowError as error:
        raise GraphFormatError(f"{doc.name}: {error}; {doc.remedy}") from error


def flow_from(doc: Document, name: str, item: Any) -> Flow:
    """Return the flow of an entry of the field "flows".

    Raises:
        GraphFormatError: It has a missing, misspelt or impossible part.
    """
    where = f"flow {name!r}"
    if type(item) is not dict:
        doc.fail(f"has no object as {where}")
    doc.only(item, _FLOW_FIELDS, where)
    values: dict[str, Any] = {"dtype": doc.field(item, "dtype", str, where)}
    for key, value in item.items():
        if key == "amax_floor":
            if not is_number(value) or value < 0:
                doc.fail(
                    f"has {value!r} as 'amax_floor' in {where}; needed is a finite "
                    "number that is not negative"
                )
            try:
                values[key] = float(value)
            except OverflowError:
                doc.fail(f"has a number too large as 'amax_floor' in {where}")
        elif key != "dtype":
            values[key] = doc.field(item, key, str, where)
    if "granularity" in values:
        try:
            values["granularity"] = Granularity.parse(values["granularity"])
        except (PrecisionFlowError, ValueError) as error:
            doc.fail(f"has a wrong granularity in {where}: {error}")
        missing = [key for key in _OF_QUANTIZED if key not in values]
        if missing:
            doc.fail(f"has no field '{missing[0]}' in {where}, which is quantized")
    return Flow(**values)


def operator_from(doc: Document, index: int, item: dict[str, Any]) -> Operator:
    """Return the operator of an entry of the field "operators".

    Raises:
        GraphFormatError: It has a missing, misspelt or impossible part.
    """
    name = doc.field(item, "name", str, f"operator {index}")
    where = f"operator {name!r}"
    kind = doc.field(item, "kind", str, where)
    phase = item.get("phase", "forward")
    invariant = item.get("batch_invariant")
    if not name:
        doc.fail(f"has an empty name in operator {index}")
    if kind not in KINDS:
        doc.fail(f"has the kind {kind!r} in {where}; use one of {', '.join(KINDS)}")
    if phase not in OPERATOR_PHASES:
        doc.fail(f"has the phase {phase!r} in {where}; use forward or backward")
    if invariant is not None and type(invariant) is not bool:
        doc.fail(
            f"has {invariant!r} as 'batch_invariant' in {where}; use true or false"
        )
    doc.only(item, _OPERATOR_FIELDS, where)
    doc.field(item, "reads", list, where, [])
    strings = {key: doc.field(item, key, str, where, "") for key in _OPERATOR_STRINGS}
    params = doc.field(item, "params", dict, where, {})
    pairs = sorted((key, _scalar_from(doc, val, where)) for key, val in params.items())
    return Operator(
        name,
        kind,
        params=tuple(pairs),
        batch_invariant=invariant,
        phase=phase,
        **strings,
    )


def _scalar_from(doc: Document, value: Any, where: str) -> Scalar:
    if type(value) in (str, int, bool) or is_number(value):
        scalar: Scalar = value
        return scalar
    if value == {"float": "inf"} or value == {"float": "-inf"}:
        return float(value["float"])
    doc.fail(f"has {value!r:.60} as a parameter of {where}; needed is a plain value")


def _edge_from(doc: Document, target: str, read: Any, flows: dict[str, Flow]) -> Edge:
    if type(read) is not list or len(read) != 3 or {*map(type, read)} != {str}:
        doc.fail(f"has {read!r:.60} in 'reads' of {target!r}; needed are 3 strings")
    operand, source, flow = read
    if flow not in flows:
        doc.fail(f"has no flow {flow!r}, which {target!r} reads {operand!r} at")
    return Edge(source, target, operand, flows[flow])
