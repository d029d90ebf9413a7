"""The report as JSON, with everything in it, and back."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from jetrl_compile.containment_report import (
    STATUSES,
    ContainmentReport,
    LevelResult,
    Listed,
)
from jetrl_compile.differences import LEVELS, Difference
from jetrl_compile.json_document import Document, read_document

FORMAT = "jetrl.containment_report"
VERSION = 1
REMEDY = "write the report again with `jetrl check --format json`"
_DERIVED = ("contained", "verdict")  # for readers; not read back
_NAMES = tuple(field.name for field in fields(ContainmentReport))
_encode = json.JSONEncoder(ensure_ascii=False).encode


def json_report(report: ContainmentReport) -> str:
    """Return the report as JSON text, one line for each difference."""
    called = report.wording.fields
    table: dict[str, Any] = {
        "format": f"jetrl.{report.wording.check}_report",
        "version": VERSION,
        report.wording.contained: report.contained,
        "verdict": report.verdict(),
    }
    parts = [f'"{key}": {_encode(value)}' for key, value in table.items()]
    for field_name in _NAMES:
        name = called.get(field_name, field_name)
        if name is None:
            continue
        value = getattr(report, field_name)
        if isinstance(value, tuple):
            rows = [_encode(_renamed(_plain(item), called)) for item in value]
            text = f"[\n {f',{chr(10)} '.join(rows)}\n]" if rows else "[]"
        else:
            text = _encode(_plain(value))
        parts.append(f'"{name}": {text}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def report_from_json(text: str | bytes, *, name: str = "the text") -> ContainmentReport:
    """Return the report of a JSON text.

    Args:
        text: What `json_report` wrote, or its UTF-8 bytes.
        name: What messages call it.

    Raises:
        GraphFormatError: It is not JSON, is cut off, comes from a newer version, or
            has a missing, misspelt or impossible part.
    """
    return _read(Document(name, text, REMEDY))


def read_report(path: Path | str) -> ContainmentReport:
    """Read a report that was written as JSON.

    Raises:
        GraphFormatError: As `report_from_json`, or the file cannot be read.
    """
    return _read(read_document(path, REMEDY))


def _renamed(item: Any, called: Mapping[str, str | None]) -> Any:
    """Return a plain value with the keys of an object called as JSON calls them."""
    if not isinstance(item, dict) or not called:
        return item
    return {called.get(key) or key: value for key, value in item.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, (Difference, Listed)):
        return asdict(value)
    if isinstance(value, LevelResult):
        return {
            "level": value.level,
            "name": value.name,
            "status": value.status,
            "reason": value.reason,
            "counts": dict(value.counts),
        }
    return value if isinstance(value, (str, bool)) else dict(value)


def _read(doc: Document) -> ContainmentReport:
    doc.check_header(FORMAT, VERSION, "a containment report")
    root = doc.root
    doc.only(root, ("format", "version", *_DERIVED, *_NAMES), "the file")
    return ContainmentReport(
        levels=tuple(_level(doc, item) for item in _objects(doc, "levels")),
        differences=_differences(doc, "differences"),
        notes=_differences(doc, "notes"),
        remarks=_strings(doc, doc.field(root, "remarks", list, "the file"), "remarks"),
        counts=_counts(doc, root, "the file"),
        high_precision=_listed(doc, "high_precision"),
        unknown=_listed(doc, "unknown"),
        rollout_meta=doc.strings(root, "rollout_meta", "the file"),
        train_meta=doc.strings(root, "train_meta", "the file"),
        strict=doc.field(root, "strict", bool, "the file"),
        undecided=doc.field(root, "undecided", str, "the file"),
    )


def _objects(doc: Document, key: str) -> list[dict[str, Any]]:
    items = doc.field(doc.root, key, list, "the file")
    for item in items:
        if type(item) is not dict:
            doc.fail(f"has an entry of '{key}' that is no object")
    return items


def _level_number(doc: Document, item: dict[str, Any], where: str) -> int:
    number = doc.field(item, "level", int, where)
    if number not in LEVELS:
        doc.fail(f"has the level {number} in {where}; levels are 1 to {len(LEVELS)}")
    return number


def _level(doc: Document, item: dict[str, Any]) -> LevelResult:
    number = _level_number(doc, item, "levels")
    where = f"level {number}"
    doc.only(item, ("level", "name", "status", "reason", "counts"), where)
    status = doc.field(item, "status", str, where)
    if status not in STATUSES:
        doc.fail(f"has the status {status!r} in {where}; use {', '.join(STATUSES)}")
    reason = doc.field(item, "reason", str, where)
    return LevelResult(number, status, reason, _counts(doc, item, where))


def _counts(doc: Document, item: dict[str, Any], where: str) -> dict[str, int]:
    counts = doc.field(item, "counts", dict, where)
    if any(type(value) is not int for value in counts.values()):
        doc.fail(f"has a count in {where} that is no integer")
    return counts


def _differences(doc: Document, key: str) -> tuple[Difference, ...]:
    found = []
    for item in _objects(doc, key):
        doc.only(item, [field.name for field in fields(Difference)], key)
        values = {}
        for name in ("rollout", "train"):
            if item.get(name) is not None or name not in item:
                values[name] = doc.field(item, name, str, key)
        found.append(
            Difference(
                _level_number(doc, item, key),
                doc.field(item, "operator", str, key),
                doc.field(item, "attribute", str, key),
                values.get("rollout"),
                values.get("train"),
                doc.field(item, "message", str, key),
                doc.field(item, "operand", str, key),
            )
        )
    return tuple(found)


def _listed(doc: Document, key: str) -> tuple[Listed, ...]:
    found = []
    for item in _objects(doc, key):
        doc.only(item, ("name", "sides", "reason"), key)
        name = doc.field(item, "name", str, key)
        sides = _strings(doc, doc.field(item, "sides", list, key), key)
        found.append(Listed(name, sides, doc.field(item, "reason", str, key)))
    return tuple(found)


def _strings(doc: Document, items: list[Any], where: str) -> tuple[str, ...]:
    if any(type(item) is not str for item in items):
        doc.fail(f"has an entry of '{where}' that is no string")
    return tuple(items)
