"""The precision lock: a graph's facts in a small file that people review.

    {"format": "jetrl.precision_lock", "version": 1,
     "source": {"path": "model", "phase": "train", "recipe": "jetrl", "model": "qwen3"},
     "gemms": {"fprop": "252 of 253 FP8", ...},
     "flows": {"e4m3 1x128 K": {"dtype": "e4m3", "granularity": "1x128", ...}, ...},
     "operators": [
      {"name": "model.layers.[0-35].mlp.up_proj:fprop", "kind": "gemm", ..., "reads": [
       ["w", "model.layers.[=].mlp.up_proj.weight", "e4m3 128x128 K"],
       ["x", "model.layers.[=].post_attention_layernorm:norm", "e4m3 1x128 K"]]}, ...]}

It is sorted, one fact a line, with repeated layers folded (`lock_names`), and holds
what `lock_facts` keeps: the same model and recipe give the same file.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jetrl_compile.errors import GraphFormatError
from jetrl_compile.files import write_text
from jetrl_compile.formats import Flow
from jetrl_compile.graph_json import (
    flow_from,
    flow_to,
    flow_words,
    operator_from,
    operator_to,
    unused_name,
)
from jetrl_compile.json_document import Document, read_document
from jetrl_compile.lock_facts import Facts
from jetrl_compile.lock_names import (
    absolute_name,
    fold_numbers,
    folded_name,
    relative_name,
    split_name,
    unfold_name,
)
from jetrl_compile.precision_graph import Edge, Operator

FORMAT = "jetrl.precision_lock"
VERSION = 1
DEFAULT_NAME = "precision.lock.json"
REMEDY = "write it again with `jetrl lock`, or take it from version control"
MAX_OPERATORS = 500_000  # that a lock may stand for
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


@dataclass(frozen=True)
class Lock:
    """A precision lock.

    Attributes:
        facts: What it fixes.
        source: How it was made: "path" (of the config or graph, from the lock's
            folder), "phase", "recipe", "engine" and "model", where they are known, and
            "live_engine" where an engine was asked.
    """

    facts: Facts
    source: Mapping[str, str] = field(default_factory=dict)


def lock_to_json(lock: Lock) -> str:
    """Return the text of a lock; equal locks have equal texts.

    Raises:
        GraphFormatError: A value that the format cannot hold, such as a NaN.
    """
    names = _flow_names(lock.facts)
    flows = {name: flow_to(flow) for flow, name in names.items()}
    gemms = {role: _share(*numbers) for role, numbers in lock.facts.gemms().items()}
    parts = [
        f'"format": "{FORMAT}",\n"version": {VERSION}',
        f'"source": {_table(lock.source)}',
        f'"gemms": {_table(gemms)}',
        f'"flows": {_table(flows)}',
        f'"operators": [{",".join(_rows(lock.facts, names))}]',
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def lock_from_json(text: str | bytes, *, name: str = "the text") -> Lock:
    """Return the lock of a JSON text.

    Raises:
        GraphFormatError: It is not JSON, is cut off, comes from a newer version, or
            has a missing, misspelt, impossible or dangling part.
    """
    return _read(Document(name, text, REMEDY))


def read_lock(path: Path | str) -> Lock:
    """Read a lock.

    Raises:
        GraphFormatError: There is none, or as `lock_from_json`.
    """
    if not Path(path).exists():
        raise GraphFormatError(
            f"there is no lock at {path}; make one with `jetrl lock CONFIG_DIR -o "
            f"{path}` and commit it"
        )
    return _read(read_document(path, REMEDY))


def write_lock(lock: Lock, path: Path | str) -> None:
    """Write a lock, whole or not at all.

    Raises:
        GraphFormatError: As `lock_to_json`.
        OutputError: The file cannot be written.
    """
    write_text(path, lock_to_json(lock))


def _flow_names(facts: Facts) -> dict[Flow, str]:
    """Name each flow by its main words, or by all where these name two."""
    flows = {edge.flow for reads in facts.reads.values() for edge in reads.values()}
    by_words: dict[str, list[Flow]] = {}
    for flow in flows:
        by_words.setdefault(flow_words(flow), []).append(flow)
    names: dict[Flow, str] = {}
    used: set[str] = set()
    for words, same in sorted(by_words.items()):
        for flow in sorted(same, key=_everything):
            base = words if len(same) == 1 else _everything(flow)
            names[flow] = unused_name(base, used)
    return names


def _everything(flow: Flow) -> str:
    return ", ".join(f"{key} {value}" for key, value in flow_to(flow).items())


def _table(table: Mapping[str, Any]) -> str:
    rows = (f"\n {_encode(key)}: {_encode(table[key])}" for key in sorted(table))
    return f"{{{','.join(rows)}\n}}" if table else "{}"


def _share(fp8: int, every: int) -> str:
    return f"{fp8} of {every} FP8"


def _rows(facts: Facts, names: Mapping[Flow, str]) -> Iterator[str]:
    """The lines of each operator, equal ones of repeated layers folded, sorted."""
    groups: dict[tuple[Any, ...], set[tuple[int, ...]]] = {}
    for name, op in facts.operators.items():
        pieces, numbers = split_name(name)
        item = operator_to(op)
        del item["name"]
        reads = sorted(
            [key, relative_name(edge.source, numbers), names[edge.flow]]
            for key, edge in facts.reads[name].items()
        )
        lines = ",".join(f"\n {_encode(read)}" for read in reads)
        head = _encode(item)[1:-1]
        text = f'{head}, "reads": [{lines}]' if reads else head
        groups.setdefault((pieces, text), set()).add(numbers)
    found = [
        (folded_name(pieces, texts), text)
        for (pieces, text), rows in groups.items()
        for texts in fold_numbers(rows)
    ]
    for name, text in sorted(found):
        yield f'\n{{"name": {_encode(name)}, {text}}}'


def _read(doc: Document) -> Lock:
    doc.check_header(FORMAT, VERSION, "a precision lock")
    root = doc.root
    doc.only(
        root, ("format", "version", "source", "gemms", "flows", "operators"), "the file"
    )
    table = doc.field(root, "flows", dict, "the file")
    flows = {name: flow_from(doc, name, item) for name, item in table.items()}
    operators: dict[str, Operator] = {}
    reads: dict[str, dict[str, Edge]] = {}
    for index, item in enumerate(doc.field(root, "operators", list, "the file")):
        if type(item) is not dict:
            doc.fail(f"has no object as operator {index}")
        op = operator_from(doc, index, item)
        try:
            room = MAX_OPERATORS - len(operators)
            for name, numbers in unfold_name(op.name, room):
                if name in operators:
                    doc.fail(f"has the operator {name!r:.80} twice")
                operators[name] = replace(op, name=name)
                reads[name] = {}
                for read in item.get("reads", ()):
                    edge = _edge(doc, name, numbers, read, flows)
                    if edge.operand in reads[name]:
                        doc.fail(f"reads {edge.operand!r:.40} of {name!r:.80} twice")
                    reads[name][edge.operand] = edge
        except GraphFormatError:
            raise
        except ValueError as error:
            doc.fail(f"has a wrong name: {error}")
    facts = Facts(operators, reads)
    said = doc.strings(root, "gemms", "the file")
    counted = {role: _share(*numbers) for role, numbers in facts.gemms().items()}
    if said != counted:
        doc.fail(
            f"says {_encode(said)[:80]} of its GEMMs, but lists "
            f"{_encode(counted)[:80]}: it was edited or merged by hand"
        )
    return Lock(facts, doc.strings(root, "source", "the file"))


def _edge(
    doc: Document,
    target: str,
    numbers: tuple[int, ...],
    read: Any,
    flows: Mapping[str, Flow],
) -> Edge:
    if type(read) is not list or len(read) != 3 or {*map(type, read)} != {str}:
        doc.fail(f"has {read!r:.60} in 'reads' of {target!r:.80}; needed are 3 strings")
    operand, source, flow = read
    if flow not in flows:
        doc.fail(f"has no flow {flow!r:.60}, which {target!r:.80} reads")
    return Edge(absolute_name(source, numbers), target, operand, flows[flow])
