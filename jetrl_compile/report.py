"""Containment reports: pure functions from the data to a text in some format."""

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from jetrl_compile.containment_report import ContainmentReport
from jetrl_compile.errors import OutputError
from jetrl_compile.report_github import github_report
from jetrl_compile.report_json import json_report
from jetrl_compile.report_junit import junit_report
from jetrl_compile.report_markdown import markdown_report
from jetrl_compile.report_text import text_report

FORMATS: Mapping[str, Callable[[ContainmentReport], str]] = MappingProxyType(
    {
        "text": text_report,
        "md": markdown_report,
        "json": json_report,
        "junit": junit_report,
        "github": github_report,
    }
)


def render(report: ContainmentReport, format_name: str = "text") -> str:
    """Return a report as text that ends with a line break.

    Args:
        report: What `check_containment` or an audit returned.
        format_name: "text" for people, "md" for a pull-request comment, "json" with
            everything, "junit" (XML) or "github" (annotations) for CI.

    Raises:
        OutputError: The format is unknown.
    """
    if format_name not in FORMATS:
        near = difflib.get_close_matches(format_name, FORMATS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise OutputError(
            f"report format {format_name!r} is unknown; {hint}known: "
            f"{', '.join(FORMATS)}"
        )
    return FORMATS[format_name](report)
