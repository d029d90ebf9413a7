"""The report for people, in plain text: the cause first."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from jetrl_compile.containment_report import ContainmentReport, LevelResult
from jetrl_compile.differences import LEVELS
from jetrl_compile.grouping import Cause, group_causes, group_listed
from jetrl_compile.report_cause import Explanation, explain

MAX_PLACES = 20


def text_report(report: ContainmentReport) -> str:
    """Return the report in plain text: verdict, cause, levels, all causes, the rest."""
    found = explain(report)
    lines = [report.verdict(), *_lead(found), ""]
    for item in report.levels:
        line = f"level {item.level} {item.name:9} {item.status:7}  {level_detail(item)}"
        lines.append(line.rstrip())
    for each in found:
        lines += ["", *_cause(each)]
    lines += _section("notes (these do not count)", _notes(report))
    lines += _section("remarks", report.remarks)
    kept = [str(item) for item in group_listed(report.high_precision)]
    lines += _section("GEMMs in high precision", kept)
    unknown = [str(item) for item in group_listed(report.unknown)]
    lines += _section("operators of unknown kind, compared like all others", unknown)
    sizes = [f"{name}: {value}" for name, value in report.counts.items()]
    lines += _section("counts", sizes)
    lines += _section("graphs", graph_lines(report))
    return "".join(f"{shown(line)}\n" for line in lines)


def shown(text: str) -> str:
    """Return a text in one line, with escapes for what a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )


def level_detail(level: LevelResult) -> str:
    """Return why a level was not run, or else what it compared."""
    if level.reason:
        return level.reason
    return ", ".join(
        f"{number} {name if number != 1 else name.removesuffix('s')}"
        for name, number in level.counts.items()
        if number or name != "differences"
    )


def meta_text(meta: Mapping[str, str]) -> str:
    """Return where a graph comes from, in one line."""
    return ", ".join(f"{key} {value}" for key, value in meta.items())


def graph_lines(report: ContainmentReport) -> list[str]:
    """Return a line on where each graph comes from."""
    metas = report.rollout_meta, report.train_meta
    return [
        f"{side}: {meta_text(meta)}"
        for side, meta in zip(report.wording.sides, metas, strict=True)
        if meta
    ]


def cause_heading(cause: Cause) -> str:
    """Return the level, what differs and how often, in one line."""
    names = {item.name for group in cause.groups for item in group.differences}
    places = "1 place" if cause.size == 1 else f"{cause.size} places"
    if len({group.attribute for group in cause.groups}) > 1:
        places = f"{cause.size} differences of {len(names)} operands"
    return f"level {cause.level} {LEVELS[cause.level]}: {cause.title} ({places})"


def shortened(lines: list[str], most: int = MAX_PLACES) -> list[str]:
    """Return the first lines, and how many more there are."""
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], f"and {len(lines) - most + 1} more"]


def _lead(found: Sequence[Explanation]) -> Iterator[str]:
    """The first cause, right behind the verdict."""
    if not found:
        return
    first, *rest = found
    yield f"cause: {first.headline}"
    if first.meaning:
        yield f"means: {first.meaning}"
    if first.fix:
        yield f"fix: {first.fix}"
    if rest:
        yield f"also: {len(rest)} more cause{'' if len(rest) == 1 else 's'}, below"


def _cause(found: Explanation) -> Iterator[str]:
    yield cause_heading(found.cause)
    for line in shortened(found.cause.places()):
        yield f"  {line}"
    if found.meaning:
        yield f"  = {found.meaning}"
    if found.fix:
        yield f"  -> {found.fix}"


def _notes(report: ContainmentReport) -> list[str]:
    return [
        f"{cause.title}: {place}"
        for cause in group_causes(report.notes)
        for place in cause.places()
    ]


def _section(title: str, lines: Iterable[str]) -> list[str]:
    found = shortened(list(lines))
    return ["", f"{title}:", *(f"  {line}" for line in found)] if found else []
