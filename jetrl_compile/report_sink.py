"""Where the compiler's reports go: to the user's callable or folder, and a tally.

The tally counts lowered GEMMs a module and phase, so that a phase that runs fewer FP8
GEMMs than another is seen: old log-probs in FP8 and training in BF16, for example.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jetrl_compile.graph_json import write_graph
from jetrl_compile.options import CompileOptions
from jetrl_compile.pipeline import CompileReport

_collectors: list[list[CompileReport]] = []


@contextmanager
def collect_reports() -> Iterator[list[CompileReport]]:
    """Collect the reports of every graph that is compiled inside the block."""
    found: list[CompileReport] = []
    _collectors.append(found)
    try:
        yield found
    finally:
        _collectors.remove(found)


def publish(report: CompileReport, options: CompileOptions) -> None:
    """Hand a report to whoever asked for it."""
    for collector in _collectors:
        collector.append(report)
    if isinstance(options.report, Path):
        options.report.mkdir(parents=True, exist_ok=True)
        kind = "training" if report.training else "inference"
        name = f"{report.module or 'model'}.{report.phase}.{kind}.json"
        write_graph(report.graph, options.report / name)
    elif options.report is not None:
        options.report(report)


def fprop_by_phase(reports: list[CompileReport]) -> dict[str, int]:
    """Return the number of FP8 fprop GEMMs of each phase, training and inference apart.

    A model whose phases agree has one number everywhere.
    """
    found: dict[str, int] = {}
    for report in reports:
        kind = "training" if report.training else "inference"
        key = f"{report.phase}/{kind}"
        found[key] = found.get(key, 0) + report.lowered["fprop"]
    return found
