"""Every file that jetrl writes, against the schemas that it publishes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hostile import hostile_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_graphs import decoder_graph, without_fp8
from test_cli import run
from test_report import REPORTS, any_reports

from jetrl_compile import schemas
from jetrl_compile.commands.check import Schema
from jetrl_compile.containment import ContainmentReport
from jetrl_compile.graph_json import graph_to_json, write_graph
from jetrl_compile.graph_summary import summarize, summary_json
from jetrl_compile.lock import lock_to_json
from jetrl_compile.lock_check import check_lock, make_lock
from jetrl_compile.precision_graph import KINDS
from jetrl_compile.report import render
from jetrl_compile.report_json import report_from_json

TABLES = {name: json.loads(schemas.schema_text(name)) for name in schemas.NAMES}
VALIDATORS = {
    name: jsonschema.Draft202012Validator(table) for name, table in TABLES.items()
}
GOLDENS = Path(__file__).parent / "golden"


def check(text: str) -> Any:
    """Validate a JSON text against the schema of the format that it names."""
    table = json.loads(text)
    VALIDATORS[table["format"].removeprefix("jetrl.")].validate(table)
    return table


@pytest.mark.parametrize("name", schemas.NAMES)
def test_schemas_are_valid_and_printed(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(TABLES[name])
    assert TABLES[name]["properties"]["format"] == {"const": f"jetrl.{name}"}
    status, out, err = run("check", "--schema", name)
    assert (status, json.loads(out), err) == (0, TABLES[name], "")


def test_every_schema_file_has_a_name() -> None:
    folder = Path(schemas.__file__).parent
    found = {path.name.removesuffix(".schema.json") for path in folder.glob("*.json")}
    assert found == set(schemas.NAMES) == {item.value for item in Schema}
    for name in ("precision_graph", "precision_lock"):
        kinds = TABLES[name]["$defs"]["operator"]["properties"]["kind"]["enum"]
        assert kinds == list(KINDS)


@pytest.mark.parametrize("path", sorted(GOLDENS.rglob("*.json.txt")))
def test_golden_reports(path: Path) -> None:
    check(path.read_text())


@given(any_reports)
@settings(max_examples=60, deadline=None)
def test_any_report(report: ContainmentReport) -> None:
    check(render(report, "json"))


@pytest.mark.parametrize("phase", ["train", "rollout"])
def test_graphs_and_what_is_made_of_them(phase: str, tmp_path: Path) -> None:
    graph = decoder_graph(phase, 3)
    other = without_fp8(graph, lambda name: "up_proj" in name)
    check(graph_to_json(graph))
    check(summary_json(summarize(graph)))
    lock = make_lock(graph, path="model")
    check(lock_to_json(lock))
    assert check(render(check_lock(lock, graph), "json"))["unchanged"] is True
    changed = check(render(check_lock(lock, other), "json"))
    assert changed["unchanged"] is False
    assert {item["before"] for item in changed["differences"]} == {"e4m3"}
    assert {item["after"] for item in changed["differences"]} == {"bf16"}
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path, each in zip(paths, (graph, other), strict=True):
        write_graph(each, path)
    check(run("diff", *paths, "--json")[1])


def test_hostile_graph() -> None:
    graph = hostile_graph()
    check(graph_to_json(graph))
    check(lock_to_json(make_lock(graph)))


PLACES = st.sampled_from(
    ["contained", "levels", "differences", "counts", "strict", "undecided", "remarks"]
)


@given(PLACES, st.sampled_from([None, 7, "x", [1], {"a": -1}]))
@settings(max_examples=60, deadline=None)
def test_what_the_schema_takes_the_reader_takes(key: str, value: object) -> None:
    """The schema is as strict as the reader, but for fields that are not read back."""
    table = json.loads(render(REPORTS["audited"], "json"))
    table[key] = value
    validator = VALIDATORS["containment_report"]
    text = json.dumps(table)
    try:
        report_from_json(text)
    except ValueError:
        assert not validator.is_valid(table)
    else:
        assert validator.is_valid(table) or key in ("contained", "counts")


def test_a_misspelt_field_is_no_report() -> None:
    table = json.loads(render(REPORTS["mixed"], "json"))
    validator = VALIDATORS["containment_report"]
    assert not validator.is_valid({**table, "verdikt": ""})
    assert not validator.is_valid({**table, "version": 2})
    graph = json.loads(graph_to_json(decoder_graph("train")))
    del next(f for f in graph["flows"].values() if "granularity" in f)["direction"]
    assert not VALIDATORS["precision_graph"].is_valid(graph)
    report = check_lock(make_lock(decoder_graph("train")), decoder_graph("train"))
    table = json.loads(render(replace(report, strict=True), "json"))
    assert "strict" not in table
