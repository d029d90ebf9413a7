"""How `jetrl bench` prints what it found."""

from typing import TYPE_CHECKING

from jetrl_compile.commands._terminal import console

if TYPE_CHECKING:
    from jetrl_compile.bench.results import Results, Row
    from jetrl_compile.bench.targets import Verdict

# Values that are not in the row's own unit, and how they are shown.
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


def print_results(results: "Results") -> None:
    """Print a table of all rows, and where they were measured."""
    from rich.table import Table

    out = console()
    names = list(dict.fromkeys(name for row in results.rows for name in row.values))
    timed = any(row.timing for row in results.rows)
    table = Table(box=None, pad_edge=False)
    table.add_column(results.kind, no_wrap=True)
    table.add_column("way", no_wrap=True)
    if timed:
        table.add_column("ms", justify="right")
        table.add_column("spread", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("")
    last = ""
    for row in results.rows:
        cells = [row.case if row.case != last else "", row.way]
        if timed:
            cells += _times(row)
        cells += [_shown(name, row) for name in names]
        cells.append(f"failed: {row.note}" if row.failed else row.note)
        table.add_row(*cells)
        last = row.case
    out.print(table)
    found = results.environment
    versions = ", ".join(f"{k} {v}" for k, v in found.versions.items() if v)
    settings = ", ".join(
        f"{k} {v}" for k, v in results.settings.items() if not isinstance(v, list)
    )
    driver = f", driver {found.driver}" if found.driver else ""
    out.print(f"\n{results.model}: {settings}")
    out.print(f"{found.device}{driver}; python {found.python}, {versions}")
    out.print(f"{found.date}  {found.command}")


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
        return ["", ""]
    return [f"{row.timing.median:.4g}", f"{row.timing.spread:.1%}"]


def _shown(name: str, row: "Row") -> str:
    if name not in row.values:
        return ""
    text = _FORMATS.get(name, "{:.2f}").format(row.values[name])
    return f"{text}x" if name.startswith("over ") else text
