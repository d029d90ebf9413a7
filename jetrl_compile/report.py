"""Containment reports: pure functions from the data to a text in some format."""

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from jetrl_compile.containment_report import ContainmentReport
from jetrl_compile.errors import OutputError
from jetrl_compile.report_github import github_report
from jetrl_compile.report_json import json_report
from jetrl_compile.report_junit import junit_report
from jetrl_compile.report_markdown import markdown_report
from jetrl_compile.report_origin import Origin
from jetrl_compile.report_sarif import sarif_report
from jetrl_compile.report_text import text_report

FORMATS: tuple[str, ...] = ("text", "md", "json", "junit", "github", "sarif")
SUFFIXES: Mapping[str, str] = MappingProxyType(
    {".txt": "text", ".md": "md", ".json": "json", ".xml": "junit", ".sarif": "sarif"}
)
"""The format that a file's name says."""
_PLAIN: Mapping[str, Callable[[ContainmentReport], str]] = MappingProxyType(
    {
        "text": text_report,
        "md": markdown_report,
        "json": json_report,
        "junit": junit_report,
    }
)
_WITH_ORIGIN: Mapping[str, Callable[[ContainmentReport, Origin | None], str]] = (
    MappingProxyType({"github": github_report, "sarif": sarif_report})
)


def format_of(path: Path) -> str:
    """Return the format that a file's name says.

    Raises:
        OutputError: Its ending is none of `SUFFIXES`.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise OutputError(
            f"cannot tell the format of {path}; end the name with {', '.join(SUFFIXES)}"
        )
    return SUFFIXES[path.suffix.lower()]


def render(
    report: ContainmentReport, format_name: str = "text", origin: Origin | None = None
) -> str:
    """Return a report as text that ends with a line break.

    Args:
        report: What `check_containment`, an audit or a comparison with a lock returned.
        format_name: "text" for people, "md" for a pull-request comment, "json" with
            everything; for CI "junit" (XML), "github" (annotations) and "sarif".
        origin: The file that annotations and SARIF results point at.

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
    if format_name in _PLAIN:
        return _PLAIN[format_name](report)
    return _WITH_ORIGIN[format_name](report, origin)
