"""`jetrl warm-up`: compile the GEMM kernels of a model before it runs."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jetrl_compile.commands._terminal import progress

if TYPE_CHECKING:
    from jetrl_compile.kernels.warm_up import WarmUp

FAILED = 1
MAX_LINES = 8
MOST_TOKENS = 1 << 20


def command(
    config_dir: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG_DIR", help="A folder with a Hugging Face config.json."
        ),
    ],
    tokens: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N|LOW:HIGH",
            help="Tokens of a batch (wgrad has kernels of its own for this number), or "
            "a range; may be given several times; default 8192.",
        ),
    ] = None,
    recipe: Annotated[
        str, typer.Option(metavar="NAME", help="`jetrl doctor` lists the recipes.")
    ] = "jetrl",
    backward: Annotated[
        bool, typer.Option(help="Include the GEMMs of backward.")
    ] = True,
    exact: Annotated[
        bool,
        typer.Option(help="Include the BF16 GEMMs of exact mode: the output head."),
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Processes that compile; default one a core, as free GPU memory "
            "allows.",
        ),
    ] = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where DeepGEMM keeps its kernels."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the GEMMs and compile nothing.")
    ] = False,
) -> None:
    """Compile DeepGEMM's kernels for a model's GEMMs, into a folder that stays."""
    with progress("loading"):
        given = tokens or ["8192"]
        counts = [count for text in given for count in _counts(text)]
        alone = [int(text) for text in given if ":" not in text]
        from jetrl_compile.gemm_shapes import heads_of_graph, shapes_of_graph
        from jetrl_compile.kernels.deep_gemm_cache import CACHE_VARIABLE
        from jetrl_compile.kernels.warm_up import calls_of, warm_up
        from jetrl_compile.tracing import trace_config
    with progress(f"tracing {config_dir}") as step:
        phase = "train" if backward else "rollout"
        graph = trace_config(config_dir, phase=phase, recipe=recipe, progress=step)
        shapes = shapes_of_graph(graph, counts, backward=backward)
        heads = heads_of_graph(graph, counts) if exact else []
    if not shapes and not heads:
        typer.echo(f"recipe {recipe} has no FP8 GEMM in this model: nothing to compile")
        return
    if dry_run:
        calls, rejected = calls_of(shapes, heads)
        for call in calls:
            typer.echo(str(call))
        _print_pairs("not by deep_gemm", rejected)
        return
    with _bar() as show:
        done = warm_up(
            shapes,
            jobs=jobs,
            into=cache_dir,
            progress=show,
            exact_tokens=alone,
            heads=heads,
        )
    _print(done)
    if cache_dir is not None:
        typer.echo(f"export {CACHE_VARIABLE}={done.cache_dir}")
    if done.failed:
        raise typer.Exit(FAILED)


def _counts(text: str) -> list[int]:
    """Read a number of tokens, or a range as the numbers that stand for all in it."""
    from jetrl_compile.kernels.deep_gemm_tiles import token_steps

    low, colon, high = text.partition(":")
    try:
        ends = int(low), int(high if colon else low)
    except ValueError:
        ends = 0, 0
    if not 1 <= ends[0] <= ends[1] <= MOST_TOKENS:
        raise typer.BadParameter(
            f"--tokens {text!r} is no number N and no LOW:HIGH of 1 to {MOST_TOKENS:,}"
        )
    return token_steps(*ends) if colon else [ends[0]]


@contextmanager
def _bar() -> Iterator[Callable[[int, int, str], None]]:
    """Show a bar on a terminal's standard error, a line a step elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, total, what: typer.echo(f"{done}/{total} {what}", err=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    columns = (
        TextColumn("compiling"),
        BarColumn(),
        MofNCompleteColumn(),
        Elapsed(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=what
        )


def _print(done: "WarmUp") -> None:
    typer.echo(
        f"{done.calls} kernels are needed: {done.compiled} compiled in "
        f"{done.seconds:.0f} s, {done.cached} were in {done.cache_dir}"
    )
    _print_pairs("not by deep_gemm", done.rejected)
    _print_pairs("failed", done.failed)


def _print_pairs(title: str, pairs: tuple[tuple[str, str], ...]) -> None:
    for what, why in pairs[:MAX_LINES]:
        typer.echo(f"{title}: {what}: {why}")
    if len(pairs) > MAX_LINES:
        typer.echo(f"{title}: {len(pairs) - MAX_LINES} more")
