"""`jetrl demo`: a real model through FP8 reinforcement learning, checked."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from jetrl_compile.commands._terminal import console

if TYPE_CHECKING:
    from jetrl_compile.examples.demo import DemoResult


def command(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="A Hugging Face causal model; SmolLM2-135M-Instruct if not given.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="GRPO steps.")] = 2,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where graphs and reports are left.")
    ] = Path("jetrl-demo"),
    seed: Annotated[int, typer.Option(help="Of tasks and sampling.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON.")
    ] = False,
) -> None:
    """Take a real model through FP8 GRPO steps with one precision flow, checked.

    Exit status: 0 the rollouts are contained in the trainer's forward at all four
    levels, 1 they are not, 2 an error.
    """
    # Where other programs use the cores too, threads that spin while they wait make
    # every operator slower, by an order of magnitude. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with _Bar(60.0 + 31.0 * steps) as bar:
        with bar.stage("loading torch and transformers", 4):
            from jetrl_compile.examples.demo import DemoOptions, run_demo
            from jetrl_compile.examples.demo_output import (
                make_folder,
                summary_json,
                write_result,
            )
        make_folder(out)  # before minutes of work
        options = DemoOptions(model=model, steps=steps, seed=seed)
        result = run_demo(options, bar.stage, _Show(bar, quiet=as_json))
    files = write_result(result, out)
    if as_json:
        typer.echo(summary_json(result), nl=False)
    else:
        typer.echo(f"\n{len(files)} files in {out}, {result.seconds:.0f} s")
    assert result.audit is not None
    raise typer.Exit(result.audit.exit_status)


class _Show:
    """Prints results as they come, and lets the progress bar go on below them."""

    def __init__(self, bar: "_Bar", quiet: bool) -> None:
        self.bar, self.quiet = bar, quiet

    def graphs(self, result: "DemoResult") -> None:
        """Print containment of the graphs."""
        from jetrl_compile.report import render

        self._print(f"{result.options.name}, recipe jetrl, precision graphs:\n")
        self._print(render(result.containment["jetrl"], "text"))

    def step(self, result: "DemoResult") -> None:
        """Print the last GRPO step and its best answer."""
        from jetrl_compile.examples.demo_output import step_line

        done = result.steps[-1]
        self._print(step_line(done, len(result.steps)))
        best = max(done.answers, key=lambda answer: answer.reward)
        self._print(f"  best answer: {best.question}")
        self._print(f"  -> {best.response!r} (reward {best.reward:.2f})")

    def end(self, result: "DemoResult") -> None:
        """Print the audit and the mismatch table."""
        from rich.box import SIMPLE
        from rich.table import Table

        from jetrl_compile.examples.demo_output import COLUMNS, mismatch_rows
        from jetrl_compile.report_text import level_detail

        assert result.audit is not None
        self._print(f"\nafter the last refit: {result.audit.verdict()}")
        for item in result.audit.levels:
            name = f"level {item.level} {item.name:9} {item.status:7}"
            self._print(f"{name}  {level_detail(item)}".rstrip())
        heading, *rows = mismatch_rows(result)
        title = "mismatch of trainer and rollouts on the same tokens; kl, ppl in nats"
        table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 0))
        for text in heading:
            justify: Literal["left", "right"] = "right" if text in COLUMNS else "left"
            table.add_column(text.replace(" ", "\n"), justify=justify)
        for row in rows:
            table.add_row(*row)
        self._print("")
        self._print(table)

    def _print(self, what: Any) -> None:
        if not self.quiet:
            with self.bar.hidden():
                console().print(what)


class _Bar:
    """One progress bar for everything; lines where standard error is no terminal."""

    def __init__(self, total: float) -> None:
        """Make it; `total` is what all stages are expected to take, in seconds."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        errors = Console(stderr=True)
        self.terminal = errors.is_terminal
        self.bar = Progress(
            TextColumn("{task.percentage:>3.0f}%"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=errors,
            transient=True,
            disable=not self.terminal,
        )
        self.task = self.bar.add_task("starting", total=total)
        self.spent = 0.0

    def __enter__(self) -> "_Bar":
        """Show it."""
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Take it away."""
        self.bar.stop()

    @contextmanager
    def stage(self, name: str, cost: float) -> Iterator[Callable[[int, int], None]]:
        """Show a stage that takes about `cost` seconds; yield what moves it on."""
        self.bar.update(self.task, description=name)
        if not self.terminal:
            print(name, file=sys.stderr, flush=True)

        def told(done: int, total: int) -> None:
            part = cost * min(1.0, done / total)
            self.bar.update(self.task, completed=self.spent + part)

        yield told
        self.spent += cost
        self.bar.update(self.task, completed=self.spent)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Take the bar away while something is printed to standard output."""
        self.bar.stop()
        try:
            yield
        finally:
            self.bar.start()
