"""How `jetrl bench` prints what it found."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from jetrl_compile.commands._terminal import console

if TYPE_CHECKING:
    from jetrl_compile.bench.results import Results, Row
    from jetrl_compile.bench.targets import Verdict

# How values are shown; others with two decimals.
_FORMATS = {
    "GB/s": "{:,.0f}",
    "TFLOP/s": "{:,.1f}",
    "of copy": "{:.0%}",
    "peak GiB": "{:.2f}",
    "graphs": "{:.0f}",
    "parameters": "{:.0f}",
    "median dB": "{:.1f}",
    "min dB": "{:.1f}",
}


# Ratios come first, the baselines in this order.
_FIRST = ("over eager", "over compile", "over torchao", "over BF16")


def check_outputs(model: str, *outputs: Path | None) -> None:
    """Check that files can be written, before minutes are spent on what they get.

    Args:
        model: A shape's name, or a config folder, whose config is no output.
        outputs: Files that will be written; None: not asked for.

    Raises:
        OutputError: One cannot be written, two are one, or one is the model's config.
    """
    from jetrl_compile.errors import OutputError
    from jetrl_compile.files import refuse_inputs

    given = [path for path in outputs if path is not None]
    refuse_inputs(given, [Path(model) / "config.json"])
    for path in given:
        folder = Path(os.path.realpath(path)).parent
        reason = "it is a folder" if path.is_dir() else ""
        if not folder.is_dir():
            reason = f"there is no folder {folder}"
        elif not os.access(folder, os.W_OK):
            reason = f"the folder {folder} is read-only"
        if len({os.path.realpath(other) for other in given}) < len(given):
            reason = "another result goes there too"
        if reason:
            raise OutputError(
                f"cannot write {path}: {reason}; name a file in a folder that exists "
                "and can be written"
            )


def print_results(results: "Results") -> None:
    """Print the tables, the notes below each, and where all was measured."""
    out = console()
    for title in dict.fromkeys(row.table for row in results.rows):
        rows = [row for row in results.rows if row.table == title]
        _print_table(title or results.kind, rows)
        out.print()
    found = results.environment
    versions = ", ".join(f"{k} {v}" for k, v in found.versions.items() if v)
    settings = ", ".join(
        f"{k} {v}" for k, v in results.settings.items() if not isinstance(v, list)
    )
    driver = f", driver {found.driver}" if found.driver else ""
    out.print(f"{results.model}: {settings}")
    out.print(f"{found.device}{driver}; python {found.python}, {versions}")
    out.print(f"{found.date}  {found.command}")


def _print_table(title: str, rows: "list[Row]") -> None:
    from rich.table import Table

    found = list(dict.fromkeys(name for row in rows for name in row.values))
    names = [name for name in _FIRST if name in found]
    names += [name for name in found if name not in names]
    timed = any(row.timing for row in rows)
    table = Table(box=None, pad_edge=False)
    table.add_column(title, no_wrap=True)
    table.add_column("way", no_wrap=True)
    for name in (*(("ms", "spread") if timed else ()), *names, "note"):
        table.add_column(name, justify="right", no_wrap=True)
    notes: list[str] = []
    last = ""
    for row in rows:
        cells = [row.case if row.case != last else "", row.way]
        if timed:
            cells += _times(row)
        cells += [_shown(name, row) for name in names]
        cells.append(_reference(row, notes))
        table.add_row(*cells)
        last = row.case
    out = console()
    out.print(table)
    for number, note in enumerate(notes, start=1):
        out.print(f"[{number}] {note}")


def _reference(row: "Row", notes: list[str]) -> str:
    """Return the number of a row's note among the notes below the table."""
    if not row.note:
        return ""
    text = f"failed: {row.note}" if row.failed else row.note
    if text not in notes:
        notes.append(text)
    return f"[{notes.index(text) + 1}]"


def print_verdicts(verdicts: "list[Verdict]") -> None:
    """Print each target, whether it was reached, and by what."""
    from rich.table import Table

    table = Table("target", "way", "", "needed", "measured", "", box=None)
    for verdict in verdicts:
        target = verdict.target
        measured = "none" if verdict.measured is None else f"{verdict.measured:.4g}"
        table.add_row(
            target.case,
            target.way,
            target.value,
            f"{target.bound} {target.number:g}",
            measured,
            "reached" if verdict.reached else f"MISSED {verdict.reason}".strip(),
        )
    out = console()
    out.print()
    out.print(table)


def _times(row: "Row") -> list[str]:
    if row.timing is None:
        return ["failed" if row.failed else "", ""]
    return [f"{row.timing.median:.4g}", f"{row.timing.spread:.1%}"]


def _shown(name: str, row: "Row") -> str:
    if name not in row.values:
        return ""
    text = _FORMATS.get(name, "{:.2f}").format(row.values[name])
    return f"{text}x" if name.startswith("over ") else text
