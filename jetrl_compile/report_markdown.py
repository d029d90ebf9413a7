"""The report as Markdown, for a pull-request comment: short, the rest folded.

GitHub refuses a comment of more than 65,536 characters. What does not fit is left out,
the last first, and a note says what.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jetrl_compile.containment_report import ContainmentReport
from jetrl_compile.differences import LEVELS
from jetrl_compile.grouping import group_causes, group_listed
from jetrl_compile.report_cause import Explanation, explain
from jetrl_compile.report_text import graph_lines, level_detail, shortened, shown

MAX_LINES = 40  # of each folded list
MAX_CAUSES = 12
MAX_CHARACTERS = 65_536  # of a comment on GitHub
MAX_CELL = 240  # characters of one text, so that one long name does not take all
_NOTE_ROOM = 400


@dataclass(frozen=True, slots=True)
class _Block:
    """A folded part."""

    title: str
    number: int
    lines: list[str]

    def text(self) -> str:
        summary = f"{escape(self.title)} ({self.number})".replace("\\", "")
        items = "".join(f"- {line}\n" for line in self.lines)
        return (
            f"\n<details><summary>{summary}</summary>\n\n{items}\n</details>\n"
            if self.lines
            else ""
        )


def markdown_report(report: ContainmentReport) -> str:
    """Return the report as GitHub Markdown: a verdict, two tables, folded details."""
    text = "".join(f"{line}\n" for line in _head(report))
    left_out: list[str] = []
    for block in _blocks(report):
        more = block.text()
        if len(text) + len(more) > MAX_CHARACTERS - _NOTE_ROOM:
            left_out.append(escape(block.title))
        else:
            text += more
    if left_out:
        names = ", ".join(shortened(left_out, 4))
        text += "\n" + _cut(
            f"Cut to fit GitHub's {MAX_CHARACTERS:,} characters. Left out: {names}",
            _NOTE_ROOM - 80,
        )
        text += "; `--format text` or `json` has everything.\n"
    return text


def escape(text: str) -> str:
    """Return a text that Markdown shows as it is, in one line, in a table too."""
    text = _cut(shown(" ".join(text.split())), MAX_CELL)
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_|\[\]~#@!$])", r"\\\1", text)


def code(text: str) -> str:
    """Return a text as inline code, in one line; a bar in it would end a table cell."""
    text = _cut(shown(" ".join(text.split())), MAX_CELL)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}"


def _head(report: ContainmentReport) -> Iterator[str]:
    found = explain(report)
    yield from (f"### {report.wording.heading}", "")
    yield from (f"**{escape(report.verdict())}**", "")
    if found:
        yield f"Cause: {escape(found[0].headline)}"
        if found[0].meaning:
            yield f"({escape(found[0].meaning)})"
        yield ""
        yield from ("| level | what differs | places | where | what to do |",)
        yield "|---|---|---|---|---|"
        yield from map(_row, found[:MAX_CAUSES])
        if len(found) > MAX_CAUSES:
            yield from ("", f"and {len(found) - MAX_CAUSES} more")
        yield ""
    yield from ("| level | result | |", "|---|---|---|")
    for item in report.levels:
        detail = escape(level_detail(item))
        yield f"| {item.level} {item.name} | {item.status} | {detail} |"


def _row(found: Explanation) -> str:
    cause = found.cause
    cells = [
        f"{cause.level} {LEVELS[cause.level]}",
        escape(cause.title),
        str(cause.size),
        escape(found.summary),
        escape(found.fix),
    ]
    return f"| {' | '.join(cells)} |"


def _blocks(report: ContainmentReport) -> Iterator[_Block]:
    for found in explain(report)[:MAX_CAUSES]:
        cause = found.cause
        lines = [escape(found.meaning)] if found.meaning else []
        lines += map(code, shortened(cause.places(), MAX_LINES))
        yield _Block(f"Level {cause.level}: {cause.title}", cause.size, lines)
    notes = [
        code(f"{cause.title}: {place}")
        for cause in group_causes(report.notes)
        for place in cause.places()
    ]
    yield _folded("Notes, which do not count", len(report.notes), notes)
    yield _folded("Remarks", len(report.remarks), map(escape, report.remarks))
    for title, listed in (
        ("GEMMs in high precision", report.high_precision),
        ("Operators of unknown kind", report.unknown),
    ):
        items = (
            f"{code(group.where)} in {' and '.join(map(escape, group.sides))}"
            + (f": {escape(group.reason)}" if group.reason else "")
            for group in group_listed(listed)
        )
        yield _folded(title, len(listed), items)
    facts = [f"{escape(name)}: {value}" for name, value in report.counts.items()]
    facts += map(escape, graph_lines(report))
    yield _folded("What was compared", len(facts), facts)


def _folded(title: str, number: int, lines: Iterable[str]) -> _Block:
    return _Block(title, number, shortened(list(lines), MAX_LINES))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
