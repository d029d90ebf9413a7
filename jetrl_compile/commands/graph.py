"""`jetrl graph`: build the precision graph of a model from its config."""

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jetrl_compile.commands._terminal import console, progress

if TYPE_CHECKING:
    from jetrl_compile.graph_summary import GraphSummary

MAX_LINES = 12


class Phase(str, Enum):
    """Whose graph it is."""

    TRAIN = "train"
    ROLLOUT = "rollout"


def command(
    config_dir: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG_DIR", help="A folder with a Hugging Face config.json."
        ),
    ],
    phase: Annotated[
        Phase, typer.Option(help="The trainer's or the rollout's graph.")
    ] = Phase.TRAIN,
    recipe: Annotated[
        str, typer.Option(metavar="NAME", help="`jetrl doctor` lists the recipes.")
    ] = "jetrl",
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Load the model into this engine (vllm), and ask it."
        ),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="As it runs in exact mode.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the graph here."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON.")
    ] = False,
) -> None:
    """Build a model's precision graph without its weights and without a GPU.

    With --engine it is the graph that a live engine runs, for which the engine is
    started here with random weights.
    """
    with progress("loading"):
        from jetrl_compile.graph_json import write_graph
        from jetrl_compile.graph_summary import summarize, summary_json
        from jetrl_compile.tracing import trace_config
    more: dict[str, Any] = {"exact": True} if exact else {}
    with progress(f"tracing {config_dir}") as step:
        if engine is not None:
            from jetrl_compile.engines import load_engine

            graph = load_engine(engine).graph(
                config_dir, recipe=recipe, progress=step, **more
            )
        else:
            graph = trace_config(
                config_dir,
                phase=phase.value,
                recipe=recipe,
                progress=step,
                **more,
            )
        if output is not None:
            step(f"writing {output}")
            write_graph(graph, output)
    summary = summarize(graph)
    if as_json:
        typer.echo(summary_json(summary), nl=False)
        return
    _print(summary)
    if output is not None:
        typer.echo(f"the graph is in {output}")


def _print(summary: "GraphSummary") -> None:
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in summary.meta.items():
        table.add_row(key, value)
    table.add_row("operators", f"{summary.operators:,}")
    table.add_row("edges", f"{summary.edges:,}")
    for role, (fp8, every) in summary.gemms.items():
        table.add_row(f"FP8 GEMMs, {role}", f"{fp8} of {every}")
    for title, groups in (
        ("in high precision", summary.high_precision),
        ("of unknown kind", summary.unknown),
    ):
        lines = [str(group) for group in groups]
        if len(lines) > MAX_LINES:
            more = len(lines) - MAX_LINES + 1
            lines = [*lines[: MAX_LINES - 1], f"and {more} more (--json has all)"]
        table.add_row(title, "\n".join(lines) or "none")
    console().print(table)
