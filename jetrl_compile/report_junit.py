"""The report as JUnit XML: one test case a level."""

import re
import xml.etree.ElementTree as ET

from jetrl_compile.containment_report import ContainmentReport, LevelResult
from jetrl_compile.report_cause import explain
from jetrl_compile.report_text import cause_heading, shortened

_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_report(report: ContainmentReport) -> str:
    """Return the report as JUnit XML.

    A level that failed is a failure. Level 1 or 2 without a result is an error, since
    containment could then not be told; another level that was not run is skipped.
    """
    root = ET.Element("testsuites")
    suite = ET.SubElement(root, "testsuite", name=_suite(report))
    properties = ET.SubElement(suite, "properties")
    metas = report.rollout_meta, report.train_meta
    for side, meta in zip(report.wording.sides, metas, strict=True):
        for key, value in meta.items():
            ET.SubElement(
                properties,
                "property",
                name=_legal(f"{side.removeprefix('the ')}.{key}"),
                value=_legal(value),
            )
    for level in report.levels:
        _test_case(suite, report, level)
    kinds = [child.tag for case in suite.iter("testcase") for child in case]
    suite.set("tests", str(len(report.levels)))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped",) * 2):
        suite.set(name, str(kinds.count(tag)))
    ET.SubElement(suite, "system-out").text = _legal(report.verdict())
    ET.indent(root)
    text = ET.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _test_case(
    suite: ET.Element, report: ContainmentReport, level: LevelResult
) -> None:
    name = f"level {level.level} {level.name}"
    case = ET.SubElement(suite, "testcase", classname=_suite(report), name=name)
    if level.status == "failed":
        found = [each for each in explain(report) if each.cause.level == level.level]
        lines = [level.reason] if level.reason else []
        for each in found:
            lines.append(cause_heading(each.cause))
            lines += [f"  {line}" for line in shortened(each.cause.places())]
            lines += [f"  = {each.meaning}"] if each.meaning else []
            lines += [f"  -> {each.fix}"] if each.fix else []
        headings = [each.headline for each in found] or [level.reason]
        message = headings[0]
        if len(headings) > 1:
            message += f", and {len(headings) - 1} more"
        failure = ET.SubElement(case, "failure", message=_legal(message))
        failure.set("type", level.name)
        failure.text = _legal("\n".join(lines))
    elif level.status == "not run":
        tag = "error" if level.level in (1, 2) else "skipped"
        ET.SubElement(case, tag, message=_legal(level.reason))


def _suite(report: ContainmentReport) -> str:
    return f"jetrl.{report.wording.check}"


def _legal(text: str) -> str:
    """Return a text without the characters that XML 1.0 cannot hold."""
    return _ILLEGAL.sub("", text)
