"""`jetrl bench`: how fast kernels, layers and decoder stacks are, and how exact."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jetrl_compile.commands._bench_output import (
    check_outputs,
    print_results,
    print_verdicts,
)
from jetrl_compile.commands._terminal import progress, write_output

if TYPE_CHECKING:
    from jetrl_compile.bench.results import Results

command = typer.Typer(
    help="Measure kernels, layers, decoder stacks and gradients, against BF16.",
    no_args_is_help=True,
)


class Device(str, Enum):
    """Where to measure."""

    CUDA = "cuda"
    CPU = "cpu"


class Graphs(str, Enum):
    """What runs as CUDA graphs."""

    NONE = "none"
    INDUCTOR = "inductor"
    STEP = "step"


class Part(str, Enum):
    """Which kernels to measure."""

    QUANTIZE = "quantize"
    GEMM = "gemm"


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="qwen3-4b, qwen3-8b, qwen3-32b, llama3.1-8b, qwen2.5-7b, or a folder.",
    ),
]
OnDevice = Annotated[Device, typer.Option(help="Where to measure.")]
Shapes = Annotated[
    list[str],
    typer.Option("--shape", metavar="BxS", help="Sequences x tokens; may be repeated."),
]
Layers = Annotated[
    int | None, typer.Option(min=1, help="Keep this many decoder layers.")
]
Ways = Annotated[
    list[str],
    typer.Option(
        "--way",
        metavar="NAME[:KEY=VALUE,...]",
        help="One more way (a recipe, or options of the backend jetrl), or other "
        "options of eager, compile, torchao, jetrl.",
    ),
]
Skip = Annotated[list[str], typer.Option(metavar="WAY", help="Leave a way out.")]
Rounds = Annotated[int, typer.Option(min=1, help="Samples of each.")]
ForwardOnly = Annotated[bool, typer.Option(help="Leave the backward pass out.")]
WithGraphs = Annotated[
    Graphs,
    typer.Option(help="CUDA graphs: Inductor's, or one a step, of all layers."),
]
Profile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Where the time of one way goes.")
]
ProfileWay = Annotated[str, typer.Option(metavar="WAY", help="Which way to profile.")]
Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the results here.")
]
Check = Annotated[
    bool, typer.Option("--check", help="Exit with 1 if a target is missed.")
]


@command.command()
def kernels(
    model: Model = "qwen3-8b",
    m: Annotated[
        list[int],
        typer.Option(
            "--m",
            min=1,
            help="Tokens; may be repeated (decode: 1 to 256); quantizers: the first.",
        ),
    ] = [8192],  # noqa: B006
    only: Annotated[Part | None, typer.Option(help="Measure these alone.")] = None,
    device: OnDevice = Device.CUDA,
    rounds: Rounds = 15,
    output: Json = None,
    check: Check = False,
) -> None:
    """Quantize and fused kernels in GB/s, GEMMs in TFLOP/s by provider and role."""
    with _measuring(model, output) as say:
        from jetrl_compile.bench.runs import run_kernels

        parts = [only.value] if only else [part.value for part in Part]
        results = run_kernels(model, device.value, m, rounds, parts, say)
    _finish(results, output, check)


@command.command()
def layer(
    model: Model,
    shape: Shapes = ["4x2048"],  # noqa: B006
    way: Ways = [],  # noqa: B006
    skip: Skip = [],  # noqa: B006
    device: OnDevice = Device.CUDA,
    rounds: Rounds = 15,
    forward_only: ForwardOnly = False,
    graphs: WithGraphs = Graphs.NONE,
    profile: Profile = None,
    profile_way: ProfileWay = "jetrl",
    output: Json = None,
    check: Check = False,
) -> None:
    """Time one decoder layer: BF16 eager and compiled, torchao's FP8, jetrl."""
    with _measuring(model, output, profile) as say:
        from jetrl_compile.bench import runs, targets

        if check:
            targets.check_model("layer", model)
        options = runs.RunOptions(
            model,
            device.value,
            tuple(shape),
            ways=tuple(way),
            skip=tuple(skip),
            rounds=rounds,
            forward_only=forward_only,
            graphs=graphs.value,
            profile=str(profile) if profile else None,
            profile_way=profile_way,
        )
        results = runs.run_layer(options, say)
    _finish(results, output, check)


@command.command()
def stack(
    model: Model,
    shape: Shapes = ["4x2048"],  # noqa: B006
    layers: Layers = None,
    way: Ways = [],  # noqa: B006
    skip: Skip = [],  # noqa: B006
    device: OnDevice = Device.CUDA,
    rounds: Rounds = 7,
    forward_only: ForwardOnly = False,
    graphs: WithGraphs = Graphs.NONE,
    profile: Profile = None,
    profile_way: ProfileWay = "jetrl",
    output: Json = None,
    check: Check = False,
) -> None:
    """Time a decoder stack and tell its memory: BF16 eager and compiled, jetrl."""
    with _measuring(model, output, profile) as say:
        from jetrl_compile.bench import runs, targets

        if check:
            targets.check_model("stack", model)
        options = runs.RunOptions(
            model,
            device.value,
            tuple(shape),
            layers=layers,
            ways=tuple(way),
            skip=tuple(skip),
            rounds=rounds,
            forward_only=forward_only,
            graphs=graphs.value,
            profile=str(profile) if profile else None,
            profile_way=profile_way,
        )
        results = runs.run_stack(options, say)
    _finish(results, output, check)


@command.command()
def gradients(
    model: Model,
    shape: Annotated[
        str, typer.Option(metavar="BxS", help="Sequences x tokens.")
    ] = "2x1024",
    layers: Layers = 4,
    way: Ways = [],  # noqa: B006
    skip: Skip = [],  # noqa: B006
    device: OnDevice = Device.CUDA,
    output: Json = None,
) -> None:
    """Gradient SQNR in dB against BF16 with float64 accumulation."""
    with _measuring(model, output) as say:
        from jetrl_compile.bench import runs

        options = runs.RunOptions(
            model,
            device.value,
            (shape,),
            layers=layers,
            ways=tuple(way),
            skip=tuple(skip),
        )
        results = runs.run_gradients(options, say)
    _finish(results, output, check=False)


@contextmanager
def _measuring(model: str, *outputs: Path | None) -> Iterator[Callable[[str], None]]:
    """Show what is measured: on a terminal in place, elsewhere a line each."""
    check_outputs(model, *outputs)
    # Read when torch first allocates: many ways in one process fragment memory.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if sys.stderr.isatty():
        with progress("loading") as say:
            yield say
        return
    start = time.perf_counter()
    yield lambda text: typer.echo(
        f"{time.perf_counter() - start:6.1f} s  {text}", err=True
    )


def _finish(results: "Results", output: Path | None, check: bool) -> None:
    print_results(results)
    if output is not None:
        write_output(json.dumps(results.as_json(), indent=1) + "\n", output)
    failed = all(row.failed or row.way == "copy" for row in results.rows)
    if check:
        from jetrl_compile.bench.targets import verdicts
        from jetrl_compile.errors import ProviderError

        found = verdicts(results)
        if not found:
            raise ProviderError(
                f"no target is set for what was measured of {results.model}; measure "
                "a case that jetrl_compile/bench/targets.py names"
            )
        print_verdicts(found)
        failed = failed or not all(verdict.reached for verdict in found)
    if failed:
        raise typer.Exit(1)
