"""How long the phases of a step of verl's trainer take, against verl as it comes.

    python benchmarks/verl_phases.py qwen3-4b --check
    python benchmarks/verl_phases.py qwen3-4b --way verl --way jetrl --rows 8
    python benchmarks/verl_phases.py qwen3-8b --phase "old log-prob" --rounds 3

Needs verl 0.9.1, a Hopper GPU and DeepGEMM (a small model also runs on a CPU). verl's
own engines in one process of one rank, without Ray and rollouts: FSDP2, FP32 masters,
AdamW, gradient checkpointing, random weights and tokens, rows of one length. Ways:

    verl            BF16, eager, PyTorch's attention, rows padded; log-probs by
                    flash-attn's kernel if its `ops.triton` can be imported, else by
                    verl token by token
    jetrl           the same with FP8 layers, compiled
    exact           exact mode, rows packed (`hopper.sh` runs it so)
    exact_padded    exact mode, rows padded

A reference model's parameters are on the host with verl, as it comes, and stay on the
GPU otherwise (`jetrl_resident_reference`). The optimizer of a way that waits is on the
host; moving it is not timed. Each phase is run in turns by all ways, after two runs
that do not count; prints medians in seconds and ratios, and with `--check` exits with 1
if one is below what is needed.
"""

import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import typer
from verl_engines import (
    LIBRARY,
    make_batch,
    make_engine,
    model_config,
    policy_loss,
    start,
)
from vllm_warm_up import Wanted, warm_up

from jetrl_compile.bench.models import find_config
from jetrl_compile.bench.ways import dynamo_for_many_ways

ACTOR, OLD, REFERENCE = "actor update", "old log-prob", "reference"
NEEDED = {ACTOR: 1.54, OLD: 1.80, REFERENCE: 1.80}
WARM_UP = 2
Samples = dict[str, dict[str, list[float]]]  # seconds by phase and way


class Way(NamedTuple):
    """How an engine is made.

    Attributes:
        override: verl's `override_config`.
        packed: Whether rows are packed.
        plain: Whether it is verl's own engine.
    """

    override: dict[str, Any]
    packed: bool = False
    plain: bool = False


RESIDENT = {"jetrl_resident_reference": True}
WAYS = {
    "verl": Way({"attn_implementation": "sdpa"}, plain=True),
    "jetrl": Way({"attn_implementation": "sdpa", **RESIDENT}),
    "exact": Way({"jetrl_exact": True, **RESIDENT}, packed=True),
    "exact_padded": Way({"jetrl_exact": True, **RESIDENT}),
}


class Engines:
    """An actor and a reference model of one way."""

    def __init__(
        self,
        folder: str,
        way: Way,
        rows: list[list[int]],
        micro: int,
        reference: bool = True,
    ) -> None:
        on_gpu = torch.cuda.is_available()
        override = dict(way.override)
        if not on_gpu and not way.plain:
            override["jetrl_lowering"] = "aot"
        more: dict[str, Any] = {"micro": micro, "infer_micro": 2 * micro}
        more |= {"learning_rate": 1e-6, "compiled_entropy": on_gpu}

        def made(**own: Any) -> Any:  # each with a config of its own, as in verl
            library = None if way.plain else LIBRARY
            model = model_config(folder, override, library=library, packed=way.packed)
            engine = make_engine(model, plain=way.plain, **more, **own)
            engine.initialize()
            return engine

        self.actor = self.reference = made(optimizer_offload=True)
        if reference and (on_gpu or not way.plain):  # verl's pins memory
            self.reference = made(forward_only=True)
        batch = {"rows": rows, "packed": way.packed}
        self.train = lambda: make_batch(**batch, micro=micro, entropy=False)
        self.infer = lambda entropy: make_batch(
            **batch, micro=2 * micro, entropy=entropy
        )

    def run(self, phase: str) -> float:
        """Run a phase; return its seconds."""
        engine = self.reference if phase == REFERENCE else self.actor
        if phase == ACTOR:
            data = self.train()
            with engine.train_mode():
                return timed(
                    lambda: engine.train_batch(data, loss_function=policy_loss)
                )
        data = self.infer(phase == OLD)
        with engine.eval_mode():
            return timed(lambda: engine.infer_batch(data))


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds of work, with what it queued on a GPU."""

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    wait()
    begin = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - begin


def write_model(model: str, layers: int | None, folder: Path) -> Any:
    """Write a checkpoint with random weights and a tokenizer; return its config."""
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    config = find_config(model, layers)
    words = {f"t{i}": i for i in range(config.vocab_size)}
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "t0")),
        pad_token="t0",
        eos_token="t1",
        bos_token="t2",
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        made = make(config, dtype=torch.bfloat16)
    made.save_pretrained(folder)
    return config


def told(samples: Samples, base: str) -> tuple[str, bool]:
    """Return medians and ratios as text, and whether all that is needed is reached.

    Args:
        samples: Seconds.
        base: The way that others are compared with.
    """
    names = list(next(iter(samples.values())))
    lines = ["s".ljust(16) + "".join(name.rjust(16) for name in names)]
    good = True
    for phase, own in samples.items():
        found = {name: median(own[name]) for name in names}
        lines.append(phase.ljust(16) + "".join(f"{s:16.3f}" for s in found.values()))
        if base not in found:
            continue
        line = f"  over {base}".ljust(16)
        for name in names:
            ratio = found[base] / found[name]
            missed = name != base and ratio < NEEDED[phase]
            good &= not missed
            line += f"{ratio:16.2f}"
        lines.append(f"{line}   needed {NEEDED[phase]}")
    return "\n".join(lines), good


def measure(
    model: str,
    layers: int | None,
    names: list[str],
    phases: list[str],
    shape: tuple[int, int, int],
    rounds: int,
    output: Path,
) -> Samples:
    """Time phases in turns; `main` says what the arguments are."""
    rows, length, micro = shape
    samples: Samples = {phase: {name: [] for name in names} for phase in phases}
    with tempfile.TemporaryDirectory() as folder:
        config = write_model(model, layers, Path(folder))
        if torch.cuda.is_available():
            steps = (micro * length, 2 * micro * length)
            exact = any("exact" in name for name in names)
            backward = ACTOR in phases
            warm_up(Wanted(folder, steps, backward, exact), say=typer.echo)
        generator = torch.Generator().manual_seed(0)
        size = (rows, length)
        ids = torch.randint(3, config.vocab_size, size, generator=generator).tolist()
        engines = {}
        for name in names:
            engines[name] = Engines(folder, WAYS[name], ids, micro, REFERENCE in phases)
            gc.collect()
            typer.echo(f"{name}: made")
    for phase in phases:
        for done in range(WARM_UP + rounds):
            for name in names:
                seconds = engines[name].run(phase)
                if done >= WARM_UP:
                    samples[phase][name].append(seconds)
            # After each round: what was measured stays if the next one fails.
            given = {"model": model, "layers": config.num_hidden_layers, "rows": rows}
            output.write_text(
                json.dumps({**given, "length": length, "samples": samples})
            )
        found = {name: f"{median(own):.3f}" for name, own in samples[phase].items()}
        typer.echo(f"{phase}: {found}")
    return samples


def main(
    model: Annotated[str, typer.Argument(help="A built-in shape, or a folder.")],
    way: Annotated[list[str] | None, typer.Option(help="Ways.")] = None,
    phase: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(NEEDED)}; default: all.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Sequences of a step.")] = 16,
    length: Annotated[int, typer.Option(help="Tokens of each.")] = 2048,
    micro: Annotated[int, typer.Option(help="Sequences of a micro-batch.")] = 4,
    rounds: Annotated[int, typer.Option(help="Samples of each.")] = 5,
    layers: Annotated[int | None, typer.Option(help="Layers to keep.")] = None,
    output: Annotated[Path, typer.Option(help="JSON.")] = Path("verl_phases.json"),
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if a target is missed.")
    ] = False,
) -> None:
    """Time phases in turns."""
    names = way or ["verl", "exact"]
    for name in names:
        if name not in WAYS:
            raise typer.BadParameter(f"{name} is none of {', '.join(WAYS)}")
    phases = phase or list(NEEDED)
    for name in phases:
        if name not in NEEDED:
            raise typer.BadParameter(f"{name} is none of {', '.join(NEEDED)}")
    if check and ("verl" not in names or len(names) < 2):
        raise typer.BadParameter("--check compares other ways with verl: ask for both")
    start()
    with dynamo_for_many_ways():
        shape = (rows, length, micro)
        samples = measure(model, layers, names, phases, shape, rounds, output)
    text, good = told(samples, "verl")
    typer.echo(text)
    torch.distributed.destroy_process_group()
    raise typer.Exit(1 if check and not good else 0)


if __name__ == "__main__":
    typer.run(main)
