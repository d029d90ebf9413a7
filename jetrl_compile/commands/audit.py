"""`jetrl audit`: check all four levels on a live trainer and rollout model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from jetrl_compile.commands._terminal import console, progress, write_output
from jetrl_compile.commands.check import ReportFormat

if TYPE_CHECKING:
    from jetrl_compile.audit import Audit
    from jetrl_compile.engines import EngineAudit

POSITIONS = 8  # rows of the table of log-prob gaps


def command(
    trainer: Annotated[
        Path,
        typer.Argument(
            metavar="TRAINER_DIR", help="A Hugging Face folder: config and weights."
        ),
    ],
    rollout: Annotated[
        Path | None,
        typer.Argument(
            metavar="[ROLLOUT_DIR]",
            help="The weights that the rollout model is made from; the trainer's.",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Audit this engine (vllm) on what it samples, with TRAINER_DIR.",
        ),
    ] = None,
    recipe: Annotated[
        str, typer.Option(metavar="NAME", help="`jetrl doctor` lists the recipes.")
    ] = "jetrl",
    sequences: Annotated[int, typer.Option(min=1, help="Sequences of tokens.")] = 2,
    length: Annotated[int, typer.Option(min=2, help="Tokens a sequence.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the random tokens.")] = 0,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest log-prob gap allowed, in nats.")
    ] = 0.0,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Audit exact mode: decode token by token, and compare bits and "
            "kernels.",
        ),
    ] = False,
    report_format: Annotated[
        ReportFormat, typer.Option("--format", "-f", help="How to report.")
    ] = ReportFormat.TEXT,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the report here."),
    ] = None,
    pictures: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Write pictures of the mismatch and a page here."
        ),
    ] = None,
) -> None:
    """Check structure, flow, bytes and log-probs of a trainer and its rollout model.

    The rollout model is made from the second folder's weights (or the first's), in
    plain PyTorch, or is a live engine's. Exit status: 0 contained, 1 not, 2 could not
    tell (or an error).
    """
    if engine is not None:
        _audit_engine(
            engine,
            trainer,
            report_format,
            output,
            recipe=recipe,
            sequences=sequences,
            length=length,
            seed=seed,
            tolerance=tolerance,
            **({"exact": True} if exact else {}),
        )
    with progress("loading") as step:
        import torch

        from jetrl_compile.audit import audit
        from jetrl_compile.model_loading import load_causal_model
        from jetrl_compile.rollout import make_rollout_model

        step(f"loading {trainer}")
        model = load_causal_model(trainer)
        source = model if rollout is None else load_causal_model(rollout)
        if exact:
            from jetrl_compile.exact_attention import use_exact_attention

            for each in (model, source):
                use_exact_attention(cast(Any, each))
        step("quantizing the rollout model's weights")
        pair = make_rollout_model(source, recipe)
        generator = torch.Generator().manual_seed(seed)
        causal: Any = model
        vocabulary = int(causal.get_input_embeddings().weight.shape[0])
        tokens = torch.randint(vocabulary, (sequences, length), generator=generator)
        found = audit(
            model,
            pair,
            tokens,
            recipe=recipe,
            tolerance=tolerance,
            progress=step,
            exact=exact,
        )
        if pictures is not None:
            from jetrl_compile.show.audit_files import write_audit

            step(f"drawing into {pictures}")
            write_audit(found, pictures)
    _report(found, report_format, output)


def _audit_engine(
    engine: str,
    trainer: Path,
    report_format: ReportFormat,
    output: Path | None,
    **settings: Any,
) -> None:
    """Audit a live engine."""
    with progress(f"starting {engine}") as step:
        from jetrl_compile.engines import load_engine

        found = load_engine(engine).audit(trainer, progress=step, **settings)
    _report(found, report_format, output)


def _report(
    found: "Audit | EngineAudit", report_format: ReportFormat, output: Path | None
) -> None:
    """Write the report, and leave with its exit status."""
    from jetrl_compile.report import render

    write_output(render(found.report, report_format.value), output)
    if output is not None:
        typer.echo(f"{found.report.verdict()}; the report is in {output}")
    if report_format is ReportFormat.TEXT and output is None:
        console().print(_gaps(found))
        console().print(f"{100 * found.equal:.2f}% of log-probs are equal in bits")
    raise typer.Exit(found.report.exit_status)


def _gaps(found: "Audit | EngineAudit") -> Any:
    """The log-prob gap by position, as a table."""
    from rich.table import Table

    table = Table(title="log-prob gap by position, nats", title_justify="left")
    for column in ("positions", "mean", "max"):
        table.add_column(column, justify="right")
    gap = found.log_prob_gap
    width = max(1, -(-gap.shape[1] // POSITIONS))
    for low in range(0, gap.shape[1], width):
        part = gap[:, low : low + width]
        high = low + part.shape[1]
        table.add_row(f"{low + 1}-{high}", f"{part.mean():.3g}", f"{part.max():.3g}")
    return table
