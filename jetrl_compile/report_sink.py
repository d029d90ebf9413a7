"""Where the compiler's reports go: the user's callable or folder; what they add up to.

`check_phases` sees a phase that runs fewer FP8 GEMMs than another: old log-probs in FP8
and training in BF16, for example.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jetrl_compile.errors import LoweringError
from jetrl_compile.graph_json import write_graph
from jetrl_compile.options import CompileOptions
from jetrl_compile.pipeline import CompileReport

_collectors: list[list[CompileReport]] = []
_written: Counter[tuple[Path, str]] = Counter()


@contextmanager
def collect_reports() -> Iterator[list[CompileReport]]:
    """Collect the reports of every graph that is compiled inside the block."""
    found: list[CompileReport] = []
    _collectors.append(found)
    try:
        yield found
    finally:
        # By identity: two empty lists are equal.
        _collectors[:] = [each for each in _collectors if each is not found]


def publish(report: CompileReport, options: CompileOptions) -> None:
    """Hand a report to whoever asked for it.

    In a folder, the first graph of a module, phase and kind is `NAME.json`; the later
    ones of this process (other shapes, parts behind a graph break) are `NAME.2.json`
    and so on.
    """
    for collector in _collectors:
        collector.append(report)
    if isinstance(options.report, Path):
        options.report.mkdir(parents=True, exist_ok=True)
        kind = "training" if report.training else "inference"
        name = f"{report.module or 'model'}.{report.phase}.{kind}"
        key = (options.report.resolve(), name)
        _written[key] += 1
        suffix = f".{_written[key]}" if _written[key] > 1 else ""
        write_graph(report.graph, options.report / f"{name}{suffix}.json")
    elif options.report is not None:
        options.report(report)


def fprop_by_phase(reports: Iterable[CompileReport]) -> dict[str, set[str]]:
    """Return the layers with an FP8 fprop, by phase, training and inference apart.

    The keys are "train/training", "train/inference" and "rollout/inference". A model
    whose phases agree has one set everywhere.
    """
    found: dict[str, set[str]] = {}
    for report in reports:
        kind = "training" if report.training else "inference"
        names = {
            op.module for op in report.graph.gemms("fprop") if report.graph.is_fp8(op)
        }
        found.setdefault(f"{report.phase}/{kind}", set()).update(names)
    return found


def check_phases(reports: Iterable[CompileReport]) -> None:
    """Check that every phase that was compiled runs the same layers in FP8.

    A whole model that is compiled under activation checkpointing without `fullgraph`
    loses its decoder layers in training, and in training only.

    Args:
        reports: Of one model, as `collect_reports` collects them: at least one training
            step and one forward without gradients.

    Raises:
        LoweringError: A phase has fewer FP8 layers than another; they are named.
    """
    found = fprop_by_phase(reports)
    everything = set().union(*found.values())
    for phase, names in found.items():
        missing = sorted(everything - names)
        if missing:
            others = ", ".join(key for key in found if missing[0] in found[key])
            raise LoweringError(
                f"{len(missing)} layers are FP8 in {others} but not in {phase}: "
                f"{', '.join(missing[:5])}; compile each decoder layer with "
                "fullgraph=True, inside activation checkpointing"
            )
