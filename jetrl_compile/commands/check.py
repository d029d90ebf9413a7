"""`jetrl check`: is a rollout graph contained in a training graph?"""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from jetrl_compile.commands._terminal import progress, write_output


class ReportFormat(str, Enum):
    """The formats of `jetrl_compile.report`."""

    TEXT = "text"
    MD = "md"
    JSON = "json"
    JUNIT = "junit"
    GITHUB = "github"
    SARIF = "sarif"


def command(
    rollout: Annotated[
        Path,
        typer.Argument(metavar="ROLLOUT.json", help="The rollout's precision graph."),
    ],
    train: Annotated[
        Path,
        typer.Argument(metavar="TRAIN.json", help="The trainer's precision graph."),
    ],
    report_format: Annotated[
        ReportFormat, typer.Option("--format", "-f", help="How to report.")
    ] = ReportFormat.TEXT,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Also compare the kernel of every operator."),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the report here."),
    ] = None,
) -> None:
    """Check that the rollout graph is contained in the training forward graph.

    Exit status: 0 contained, 1 not contained, 2 could not tell (or an error).
    """
    with progress("loading"):
        from jetrl_compile.containment import check_containment
        from jetrl_compile.graph_json import read_graph
        from jetrl_compile.report import render
    with progress(f"reading {rollout}") as step:
        left = read_graph(rollout)
        step(f"reading {train}")
        right = read_graph(train)
        step(f"checking {len(left.operators)} operators")
        report = check_containment(left, right, strict=strict)
        text = render(report, report_format.value)
    write_output(text, output)
    if output is not None:
        typer.echo(f"{report.verdict()}; the report is in {output}")
    raise typer.Exit(report.exit_status)
