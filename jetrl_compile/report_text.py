"""The report for people, in plain text."""

from collections.abc import Iterable, Iterator, Mapping

from jetrl_compile.containment_report import ContainmentReport, LevelResult
from jetrl_compile.differences import LEVELS
from jetrl_compile.grouping import Cause, group_causes, group_listed

MAX_PLACES = 20


def text_report(report: ContainmentReport) -> str:
    """Return the report in plain text: the verdict, levels, causes, the rest."""
    lines = [report.verdict(), ""]
    for item in report.levels:
        line = f"level {item.level} {item.name:9} {item.status:7}  {level_detail(item)}"
        lines.append(line.rstrip())
    for cause in group_causes(report):
        lines += ["", *_cause(cause)]
    lines += _section("notes (these do not count)", _notes(report))
    lines += _section("remarks", report.remarks)
    kept = [str(item) for item in group_listed(report.high_precision)]
    lines += _section("GEMMs in high precision", kept)
    unknown = [str(item) for item in group_listed(report.unknown)]
    lines += _section("operators of unknown kind, compared like all others", unknown)
    sizes = [f"{name}: {value}" for name, value in report.counts.items()]
    lines += _section("counts", sizes)
    graphs = [
        f"{side}: {meta_text(meta)}"
        for side, meta in (
            ("rollout", report.rollout_meta),
            ("train", report.train_meta),
        )
        if meta
    ]
    lines += _section("graphs", graphs)
    return "".join(f"{line}\n" for line in lines)


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


def cause_heading(cause: Cause) -> str:
    """Return the level, what differs and how often, in one line."""
    places = "1 place" if cause.size == 1 else f"{cause.size} places"
    return f"level {cause.level} {LEVELS[cause.level]}: {cause.title} ({places})"


def shortened(lines: list[str], most: int = MAX_PLACES) -> list[str]:
    """Return the first lines, and how many more there are."""
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], f"and {len(lines) - most + 1} more"]


def _cause(cause: Cause) -> Iterator[str]:
    yield cause_heading(cause)
    for line in shortened(cause.places()):
        yield f"  {line}"
    if cause.remedy:
        yield f"  -> {cause.remedy}"


def _notes(report: ContainmentReport) -> list[str]:
    return [
        f"{cause.title}: {place}"
        for cause in group_causes(report.notes)
        for place in cause.places()
    ]


def _section(title: str, lines: Iterable[str]) -> list[str]:
    found = shortened(list(lines))
    return ["", f"{title}:", *(f"  {line}" for line in found)] if found else []
