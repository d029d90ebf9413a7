"""The report as GitHub workflow commands, which CI shows as annotations."""

from jetrl_compile.containment_report import ContainmentReport
from jetrl_compile.differences import LEVELS
from jetrl_compile.grouping import group_causes
from jetrl_compile.report_cause import Explanation, explain
from jetrl_compile.report_origin import Origin
from jetrl_compile.report_text import shortened, shown

MAX_ANNOTATIONS = 10  # of each kind; GitHub drops more than ten a step
MAX_TITLE = 255  # characters, as GitHub's API for annotations has it
MAX_MESSAGE = 4000  # characters; GitHub cuts at 64 KiB, people much earlier


def github_report(report: ContainmentReport, origin: Origin | None = None) -> str:
    """Return one `::error` for each cause, `::notice` for notes and the verdict.

    Args:
        report: What was found.
        origin: The file that annotations point at; none without it.
    """
    place = origin or Origin()
    lines = [_error(report, found, place) for found in explain(report)]
    for level in report.levels:
        known = any(item.level == level.level for item in report.differences)
        if level.status == "failed" and not known:
            title = f"level {level.level} {level.name}"
            lines.append(_command("error", title, [level.reason or "failed"]))
    lines = _limited(lines, "error")
    kind = "error" if report.contained is None else "notice"
    lines.append(_command(kind, report.wording.check, [report.verdict()]))
    notes = [
        _command("notice", f"{cause.title} (does not count)", cause.places())
        for cause in group_causes(report.notes)
    ]
    return "".join(f"{line}\n" for line in [*lines, *_limited(notes, "notice")])


def _error(report: ContainmentReport, found: Explanation, origin: Origin) -> str:
    cause = found.cause
    body = [found.summary, found.meaning, found.fix and f"fix: {found.fix}"]
    if len(cause.groups) > 1:
        body += shortened(cause.places(), 10)
    title = f"level {cause.level} {LEVELS[cause.level]}: {cause.title}"
    line = origin.line(cause.groups[0].differences[0])
    return _command("error", title, body, origin.file, line)


def _limited(lines: list[str], kind: str) -> list[str]:
    most = MAX_ANNOTATIONS - 1  # one is left for the verdict
    if len(lines) <= most:
        return lines
    rest = f"{len(lines) - most + 1} more are in the full report"
    return [*lines[: most - 1], _command(kind, "more", [rest])]


def _command(
    kind: str, title: str, body: list[str], file: str = "", line: int = 1
) -> str:
    message = "\n".join(shown(text) for text in body if text)
    properties = {"title": cut(f"jetrl check: {shown(title)}", MAX_TITLE)}
    if file:
        properties = {"file": shown(file), "line": str(line), **properties}
    text = ",".join(
        f"{key}={_escape(value).replace(':', '%3A').replace(',', '%2C')}"
        for key, value in properties.items()
    )
    return f"::{kind} {text}::{_escape(cut(message, MAX_MESSAGE))}"


def cut(text: str, most: int) -> str:
    """Return a text of at most some characters, with dots where it was cut."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
