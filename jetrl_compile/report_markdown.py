"""The report as Markdown, for a pull-request comment: short, the rest folded."""

import re
from collections.abc import Iterable, Iterator

from jetrl_compile.containment_report import ContainmentReport
from jetrl_compile.differences import LEVELS
from jetrl_compile.grouping import Cause, group_causes, group_listed
from jetrl_compile.report_text import level_detail, meta_text, shortened

MAX_LINES = 40  # of each folded list; a comment on GitHub has 65,536 characters
MAX_CAUSES = 12


def markdown_report(report: ContainmentReport) -> str:
    """Return the report as GitHub Markdown: a verdict, two tables, folded details."""
    causes = group_causes(report)
    lines = ["### Precision flow of rollout and training", ""]
    lines += [f"**{escape(report.verdict())}**", ""]
    lines += ["| level | result | |", "|---|---|---|"]
    lines += [
        f"| {item.level} {item.name} | {item.status} | {escape(level_detail(item))} |"
        for item in report.levels
    ]
    if causes:
        lines += ["", "| level | what differs | places | what to do |"]
        lines += ["|---|---|---|---|", *map(_row, causes[:MAX_CAUSES])]
        if len(causes) > MAX_CAUSES:
            lines += ["", f"and {len(causes) - MAX_CAUSES} more"]
    for cause in causes[:MAX_CAUSES]:
        title = f"Level {cause.level}: {cause.title}"
        lines += _folded(title, cause.size, map(code, cause.places()))
    notes = [
        f"{c.title}: {place}"
        for c in group_causes(report.notes)
        for place in c.places()
    ]
    lines += _folded("Notes, which do not count", len(report.notes), map(code, notes))
    lines += _folded("Remarks", len(report.remarks), map(escape, report.remarks))
    for title, listed in (
        ("GEMMs in high precision", report.high_precision),
        ("Operators of unknown kind", report.unknown),
    ):
        items = (
            f"{code(group.where)} in {' and '.join(group.sides)}"
            + (f": {escape(group.reason)}" if group.reason else "")
            for group in group_listed(listed)
        )
        lines += _folded(title, len(listed), items)
    facts = [f"{escape(name)}: {value}" for name, value in report.counts.items()]
    for side, meta in (("rollout", report.rollout_meta), ("train", report.train_meta)):
        if meta:
            facts.append(f"{side}: {escape(meta_text(meta))}")
    lines += _folded("What was compared", len(facts), facts)
    return "".join(f"{line}\n" for line in lines)


def escape(text: str) -> str:
    """Return a text that Markdown shows as it is, in one line, in a table too."""
    text = " ".join(text.split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_|\[\]~#@])", r"\\\1", text)


def code(text: str) -> str:
    """Return a text as inline code, in one line, in a table too."""
    text = " ".join(text.split()).replace("|", "\\|")
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}"


def _row(cause: Cause) -> str:
    level = f"{cause.level} {LEVELS[cause.level]}"
    return (
        f"| {level} | {escape(cause.title)} | {cause.size} | {escape(cause.remedy)} |"
    )


def _folded(title: str, number: int, lines: Iterable[str]) -> Iterator[str]:
    items = shortened(list(lines), MAX_LINES)
    if items:
        summary = escape(title).replace("\\", "")
        yield from ("", f"<details><summary>{summary} ({number})</summary>", "")
        yield from (f"- {item}" for item in items)
        yield from ("", "</details>")
