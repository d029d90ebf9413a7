"""`jetrl doctor`: what this machine has, and which providers it can run."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from jetrl_compile.commands._terminal import console, progress

if TYPE_CHECKING:
    from jetrl_compile.doctor import Diagnosis


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show versions, GPUs, providers (and why one is not usable) and recipes."""
    with progress("looking at this machine"):
        from jetrl_compile.doctor import diagnose

        found = diagnose()
    if as_json:
        table = {"format": "jetrl.doctor", "version": 1, **asdict(found)}
        typer.echo(json.dumps(table, indent=1))
    else:
        _print(found)


def _print(found: "Diagnosis") -> None:
    from rich.table import Table

    out = console()
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("python", f"{found.python} on {found.system}")
    for name, version in found.versions.items():
        table.add_row(name, version or "not installed")
    table.add_row("CUDA", found.cuda or "none")
    for gpu in found.gpus:
        overlap = "kernels overlap" if gpu.overlap else "kernels do not overlap"
        facts = f"{gpu.name}, {gpu.capability}, {gpu.memory_gib} GiB, {overlap}"
        table.add_row("GPU", facts)
    if found.gpu_problem:
        table.add_row("GPU", f"none: {found.gpu_problem}")
    table.add_row('backend="jetrl"', found.backend or "known to torch.compile")
    out.print(table)

    table = Table("provider", "usable", "same bits in any batch", "", box=None)
    for provider in found.providers:
        table.add_row(
            provider.name,
            "yes" if provider.usable else "no",
            "yes" if provider.batch_invariant else "no",
            provider.reason or provider.description,
        )
    out.print()
    out.print(table)

    table = Table("on", "GEMMs", "providers, in this order", "", box=None)
    for order in found.orders:
        names = ", ".join(order.order)
        table.add_row(order.device_type or "else", order.gemms, names, order.measured)
    out.print()
    out.print(table)

    table = Table("recipe", "train", "rollout", "", box=None)
    for recipe in found.recipes:
        precisions = ("FP8" if on else "BF16" for on in (recipe.train, recipe.rollout))
        table.add_row(recipe.name, *precisions, recipe.description)
    out.print()
    out.print(table)
