"""The report as SARIF 2.1.0, which code scanning shows beside the code.

Source: Static Analysis Results Interchange Format (SARIF) Version 2.1.0, OASIS, with
errata 01.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any
from urllib.parse import quote

from jetrl_compile.containment_report import ContainmentReport
from jetrl_compile.differences import LEVELS, attribute_label
from jetrl_compile.grouping import Cause, group_causes
from jetrl_compile.report_cause import Explanation, explain, fix, meaning, summary
from jetrl_compile.report_origin import Origin
from jetrl_compile.report_text import shown

SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/"
    "sarif-schema-2.1.0.json"
)
MAX_PLACES = 100  # of one result; code scanning shows one and keeps few


def sarif_report(report: ContainmentReport, origin: Origin | None = None) -> str:
    """Return the report as SARIF: a result for each cause, the notes as notes.

    Args:
        report: What was found.
        origin: The file that results point at. Code scanning shows no result without.
    """
    place = origin or Origin()
    notes = [
        Explanation(cause, summary(cause), meaning(cause), fix(cause))
        for cause in group_causes(report.notes)
    ]
    found = explain(report)
    rules = list(dict.fromkeys(_rule_id(each.cause) for each in (*found, *notes)))
    results = [_result(each, "error", rules, place) for each in found]
    results += [_result(each, "note", rules, place) for each in notes]
    first = {
        _rule_id(each.cause): each for each in (*reversed(notes), *reversed(found))
    }
    run: dict[str, Any] = {
        "tool": {"driver": _driver(rules, first)},
        # Two checks of one commit are two categories, not a newer and an older one.
        "automationDetails": {"id": f"jetrl/{report.wording.check}/"},
        "invocations": [_invocation(report)],
        "results": results,
        "columnKind": "unicodeCodePoints",
        "properties": {
            "verdict": shown(report.verdict()),
            "levels": {
                level.name: {"status": level.status, "reason": shown(level.reason)}
                for level in report.levels
            },
        },
    }
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=1, ensure_ascii=False) + "\n"


def _driver(rules: Iterable[str], first: Mapping[str, Explanation]) -> dict[str, Any]:
    driver: dict[str, Any] = {"name": "jetrl"}
    with contextlib.suppress(metadata.PackageNotFoundError):  # run from sources alone
        driver["version"] = metadata.version("jetrl-compile")
    driver["rules"] = [_rule(rule, first[rule]) for rule in rules]
    return driver


def _rule_id(cause: Cause) -> str:
    return shown(f"{LEVELS[cause.level]}/{cause.attribute}")


def _rule(rule: str, found: Explanation) -> dict[str, Any]:
    label = shown(attribute_label(found.cause.attribute))
    table: dict[str, Any] = {
        "id": rule,
        "shortDescription": {"text": f"Precision flow: {label} differs"},
        "defaultConfiguration": {"level": "error"},
    }
    if found.fix:
        table["help"] = {"text": shown(found.fix)}
    return table


def _result(
    found: Explanation, level: str, rules: list[str], origin: Origin
) -> dict[str, Any]:
    cause = found.cause
    differences = [item for group in cause.groups for item in group.differences]
    text = [found.headline, found.meaning, found.fix and f"fix: {found.fix}"]
    rule = _rule_id(cause)
    names = list(dict.fromkeys(shown(item.name) for item in differences))
    location: dict[str, Any] = {
        "logicalLocations": [
            {"fullyQualifiedName": name, "kind": "member"}
            for name in names[:MAX_PLACES]
        ]
    }
    if origin.file:
        location["physicalLocation"] = {
            "artifactLocation": {"uri": quote(origin.file)},
            "region": {"startLine": origin.line(differences[0])},
        }
    return {
        "ruleId": rule,
        "ruleIndex": rules.index(rule),
        "level": level,
        "message": {"text": "\n".join(shown(line) for line in text if line)},
        "locations": [location],
        "occurrenceCount": cause.size,
        "partialFingerprints": {"cause/v1": _fingerprint(cause)},
        "properties": {"places": [shown(place) for place in cause.places()]},
    }


def _fingerprint(cause: Cause) -> str:
    """Equal for the same cause at the same places, whatever the number of layers."""
    parts = [
        (group.level, group.attribute, group.rollout, group.train, group.place)
        for group in cause.groups
    ]
    return hashlib.sha256(repr(sorted(map(repr, parts))).encode()).hexdigest()


def _invocation(report: ContainmentReport) -> dict[str, Any]:
    table: dict[str, Any] = {
        "executionSuccessful": report.contained is not None,
        "exitCode": report.exit_status,
    }
    if report.contained is None:
        notice = {"level": "error", "message": {"text": shown(report.verdict())}}
        table["toolExecutionNotifications"] = [notice]
    return table
