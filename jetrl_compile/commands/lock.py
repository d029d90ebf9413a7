"""`jetrl lock`: write the precision flow of a model to a file that people review."""

from pathlib import Path
from typing import Annotated

import typer

from jetrl_compile.commands._terminal import progress
from jetrl_compile.commands.graph import Phase
from jetrl_compile.files import refuse_inputs


def command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG_DIR|GRAPH.json",
            help="A folder with a Hugging Face config.json, or a precision graph.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="Where to write the lock."),
    ] = Path("precision.lock.json"),
    phase: Annotated[
        Phase | None,
        typer.Option(
            help="The trainer's or the rollout's flow, of a config; default train.",
            show_default=False,
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of a config; default jetrl. `jetrl doctor` lists the recipes.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(metavar="NAME", help="Ask this engine (vllm) with the config."),
    ] = "",
) -> None:
    """Write a model's precision flow to a small sorted file, to be committed.

    `jetrl check --against FILE` then fails when the flow is another one.
    """
    refuse_inputs([output], [source])
    if source.is_file() and (phase is not None or recipe is not None or engine):
        raise typer.BadParameter(
            f"{source} is a graph, which says its phase and recipe itself; leave out "
            "--phase, --recipe and --engine, or give a config's folder"
        )
    with progress("loading"):
        from jetrl_compile.lock import write_lock
        from jetrl_compile.lock_check import make_lock, source_graph
    with progress(f"reading {source}") as step:
        graph = source_graph(
            source,
            phase=(phase or Phase.TRAIN).value,
            recipe=recipe or "jetrl",
            engine=engine,
            progress=step,
        )
        lock = make_lock(graph, path=source, folder=output.parent, live_engine=engine)
        write_lock(lock, output)
    gemms = ", ".join(
        f"{fp8} of {every} {role}" for role, (fp8, every) in lock.facts.gemms().items()
    )
    typer.echo(f"{output} holds {len(lock.facts.operators)} operators")
    typer.echo(f"FP8 GEMMs: {gemms or 'none'}")
