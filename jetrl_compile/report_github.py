"""The report as GitHub workflow commands, which CI shows as annotations."""

from jetrl_compile.containment_report import ContainmentReport
from jetrl_compile.grouping import group_causes
from jetrl_compile.report_text import cause_heading, shortened

MAX_ANNOTATIONS = 10  # of each kind; GitHub drops more than ten a step


def github_report(report: ContainmentReport) -> str:
    """Return one `::error` for each cause, `::notice` for notes and the verdict."""
    lines = []
    for cause in group_causes(report):
        body = [*shortened(cause.places(), 10), cause.remedy]
        lines.append(
            _command("error", cause_heading(cause), "\n".join(filter(None, body)))
        )
    for level in report.levels:
        known = any(item.level == level.level for item in report.differences)
        if level.status == "failed" and not known:
            title = f"level {level.level} {level.name}"
            lines.append(_command("error", title, level.reason or "failed"))
    lines = _limited(lines, "error")
    if report.contained is None:
        lines.append(_command("error", "containment", report.verdict()))
    else:
        lines.append(_command("notice", "containment", report.verdict()))
    notes = [
        _command("notice", f"{cause.title} (does not count)", "\n".join(cause.places()))
        for cause in group_causes(report.notes)
    ]
    return "".join(f"{line}\n" for line in [*lines, *_limited(notes, "notice")])


def _limited(lines: list[str], kind: str) -> list[str]:
    most = MAX_ANNOTATIONS - 1  # one is left for the verdict
    if len(lines) <= most:
        return lines
    rest = f"{len(lines) - most + 1} more are in the full report"
    return [*lines[: most - 1], _command(kind, "more", rest)]


def _command(kind: str, title: str, message: str) -> str:
    title = _escape(f"jetrl check: {title}").replace(":", "%3A").replace(",", "%2C")
    return f"::{kind} title={title}::{_escape(message)}"


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
