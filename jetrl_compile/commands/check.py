"""`jetrl check`: is the rollout's graph in the trainer's; is a model as its lock?"""

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jetrl_compile.commands._terminal import progress, write_output
from jetrl_compile.files import refuse_inputs

if TYPE_CHECKING:
    from jetrl_compile.containment_report import ContainmentReport
    from jetrl_compile.report_origin import Origin


class ReportFormat(str, Enum):
    """The formats of `jetrl_compile.report`."""

    TEXT = "text"
    MD = "md"
    JSON = "json"
    JUNIT = "junit"
    GITHUB = "github"
    SARIF = "sarif"


class Schema(str, Enum):
    """The JSON schemas of `jetrl_compile.schemas`."""

    CONTAINMENT_REPORT = "containment_report"
    LOCK_REPORT = "lock_report"
    PRECISION_GRAPH = "precision_graph"
    PRECISION_LOCK = "precision_lock"
    GRAPH_DIFF = "graph_diff"
    GRAPH_SUMMARY = "graph_summary"


def _print_schema(wanted: Schema | None) -> None:
    if wanted is not None:
        from jetrl_compile.schemas import schema_text

        write_output(schema_text(wanted.value), None)
        raise typer.Exit


def command(
    rollout: Annotated[
        Path | None,
        typer.Argument(
            metavar="ROLLOUT.json",
            help="The rollout's precision graph; with --against, a model's config "
            "folder or graph (the lock's own, if it is left out).",
            show_default=False,
        ),
    ] = None,
    train: Annotated[
        Path | None,
        typer.Argument(
            metavar="TRAIN.json",
            help="The trainer's precision graph.",
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="LOCK",
            help="Compare with a lock that `jetrl lock` wrote, instead.",
        ),
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="With --against: write the lock anew.")
    ] = False,
    report_format: Annotated[
        ReportFormat, typer.Option("--format", "-f", help="How to report.")
    ] = ReportFormat.TEXT,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Also compare the kernel of every operator."),
    ] = False,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Also ask for kernels whose bits do not depend on the batch, the same "
            "on both sides.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the report here."),
    ] = None,
    reports: Annotated[
        list[Path] | None,
        typer.Option(
            "--report",
            metavar="FILE",
            help="Also write a report here, in the format that its ending says: .md, "
            ".json, .xml (JUnit), .sarif, .txt. May be given several times.",
        ),
    ] = None,
    schema: Annotated[
        Schema | None,
        typer.Option(
            "--schema",
            callback=_print_schema,
            is_eager=True,
            help="Print the JSON schema of a file that jetrl writes, and exit.",
        ),
    ] = None,
) -> None:
    """Check that the rollout graph is contained in the training forward graph.

    With --against, check instead that a model's precision flow is what a lock says.
    Exit status: 0 contained (or unchanged), 1 not, 2 could not tell (or an error).
    """
    extra = list(reports or ())
    refuse_inputs([output, *extra], [rollout, train, against])
    if extra:  # a wrong ending is said before anything takes time
        from jetrl_compile.report import format_of

        for path in extra:
            format_of(path)
    if against is None:
        if rollout is None or train is None:
            raise typer.BadParameter("give ROLLOUT.json and TRAIN.json, or --against")
        if update:
            raise typer.BadParameter("--update needs --against: it writes the lock")
        report, origin = _containment(rollout, train, strict, exact)
    else:
        if train is not None or strict or exact:
            what = "--strict" if strict else "--exact"
            what = what if train is None else "a second graph"
            raise typer.BadParameter(f"--against does not go with {what}")
        report, origin = _lock(against, rollout, update)
    _write(report, origin, report_format.value, output, extra)
    if against is not None and update and report.contained is not None:
        raise typer.Exit(0)
    raise typer.Exit(report.exit_status)


def _containment(
    rollout: Path, train: Path, strict: bool, exact: bool
) -> "tuple[ContainmentReport, Origin]":
    with progress("loading"):
        from jetrl_compile.containment import check_containment
        from jetrl_compile.graph_json import read_graph
        from jetrl_compile.report_origin import Origin, graph_lines
    with progress(f"reading {rollout}") as step:
        left = read_graph(rollout)
        step(f"reading {train}")
        right = read_graph(train)
        step(f"checking {len(left.operators)} operators")
        report = check_containment(left, right, strict=strict, exact=exact)
        lines = {}
        if report.differences or report.notes:
            lines = graph_lines(rollout.read_text("utf-8-sig"))
    return report, Origin(_below_here(rollout), lines)


def _lock(
    path: Path, source: Path | None, update: bool
) -> "tuple[ContainmentReport, Origin]":
    with progress("loading"):
        from jetrl_compile.lock import lock_to_json, read_lock, write_lock
        from jetrl_compile.lock_check import (
            check_lock,
            lock_lines,
            locked_graph,
            make_lock,
        )
        from jetrl_compile.report_origin import Origin
    with progress(f"reading {path}") as step:
        lock = read_lock(path)
        graph = locked_graph(lock, path, source, step)
        step("comparing")
        report = check_lock(lock, graph)
        text = path.read_text("utf-8-sig")
        lines = lock_lines(text) if report.differences else {}
        origin = Origin(_below_here(path), lines)
        if update and report.contained is not None:
            made = source or path.parent / lock.source.get("path", "")
            asked = lock.source.get("live_engine", "")
            new = make_lock(graph, path=made, folder=path.parent, live_engine=asked)
            if lock_to_json(new) != text:
                write_lock(new, path)
                typer.echo(f"{path} was written anew", err=True)
    return report, origin


def _below_here(path: Path) -> str:
    """A path relative to this folder, as CI wants it; "" for a file outside of it."""
    resolved, here = path.resolve(), Path.cwd()
    if not resolved.is_relative_to(here):
        return ""
    return resolved.relative_to(here).as_posix()


def _write(
    report: "ContainmentReport",
    origin: "Origin",
    format_name: str,
    output: Path | None,
    extra: list[Path],
) -> None:
    from jetrl_compile.report import format_of, render
    from jetrl_compile.report_text import shown

    others = [(path, format_of(path)) for path in extra]
    write_output(render(report, format_name, origin), output)
    for path, name in others:
        write_output(render(report, name, origin), path)
    if output is not None:
        typer.echo(f"{shown(report.verdict())}; the report is in {output}")
