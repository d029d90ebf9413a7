"""What exact mode costs an engine: output tokens a second, against the default mode.

    python benchmarks/exact_costs.py qwen3-8b --check
    python benchmarks/exact_costs.py qwen3-8b --case 8x8192 --rounds 1

Needs a Hopper GPU, vLLM 0.24 and DeepGEMM, whose kernels are compiled first. For each
case (sequences x tokens to generate, prompts of 128) both modes have an engine in a
process of its own, as vLLM comes, with random weights and room for that case's
sequences. They load at the same time and generate in turns, one at a time. The rate
counts generated tokens over the time of the whole call. Prints medians and how much
slower exact mode is; with `--check` exits with 1 if that is more than the case allows,
or was not measured. What it costs the trainer:

    jetrl bench stack qwen3-8b --way exact:exact=true --check
"""

import json
import tempfile
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer
from vllm_engines import Failed, Worker, cache_bytes, wait_all, write_config
from vllm_throughput import PROMPT, batches, start
from vllm_warm_up import Wanted, warm_up

from jetrl_compile.bench.models import BUILT_IN

MODES = ("jetrl", "jetrl_exact")  # of vllm_throughput


class Case(NamedTuple):
    """What both modes generate.

    Attributes:
        sequences: At a time.
        tokens: Of each.
        slower: By how much exact mode may be slower, a share of the default's rate.
    """

    sequences: int
    tokens: int
    slower: float

    @property
    def name(self) -> str:
        """What options and tables call it."""
        return f"{self.sequences}x{self.tokens}"


CASES = {one.name: one for one in (Case(64, 512, 0.10), Case(8, 8192, 0.15))}
Samples = dict[str, dict[str, list[float]]]  # rates by case and mode
Workers = dict[tuple[Case, str], Worker]


def main(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join(BUILT_IN)}.")],
    case: Annotated[list[str] | None, typer.Option(help="Cases.")] = None,
    rounds: Annotated[int, typer.Option(help="Samples of each.")] = 3,
    layers: Annotated[int | None, typer.Option(help="Layers to keep.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Folder of logs.")] = None,
    output: Annotated[Path, typer.Option(help="JSON.")] = Path("exact_costs.json"),
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if a target is missed.")
    ] = False,
) -> None:
    """Measure both modes in turns."""
    names = case or list(CASES)
    for name in names:
        if name not in CASES:
            raise typer.BadParameter(f"{name} is none of {', '.join(CASES)}")
    cases = [CASES[name] for name in names]
    samples: Samples = {one.name: {} for one in cases}
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(model, Path(folder), layers)
        counts = [one.sequences for one in cases]
        steps = batches(counts, max(one.tokens for one in cases))
        warm_up(Wanted(folder, steps, exact=True), say=typer.echo)
        workers = {
            (one, mode): _worker(model, folder, config, one, mode, logs)
            for one in cases
            for mode in MODES
        }
        ready = wait_all(list(workers.values()), typer.echo)
        usable = {key: each for key, each in workers.items() if each in ready}
        for one, mode in list(usable):  # the batch that is measured
            _ask(usable, one, mode, 8)
        found = {"model": model, "layers": config.num_hidden_layers}
        for one, done in product(cases, range(1, rounds + 1)):
            for mode in MODES:
                if (one, mode) not in usable:
                    continue
                rate = _ask(usable, one, mode, one.tokens)
                if rate is not None:
                    samples[one.name].setdefault(mode, []).append(rate)
            # After each round: what was measured stays if the next one fails.
            output.write_text(json.dumps({**found, "samples": samples}))
            typer.echo(f"{done} of {rounds} rounds: {told(one, samples[one.name])[0]}")
        for worker in workers.values():
            worker.stop()
    good = True
    for one in cases:
        line, reached = told(one, samples[one.name])
        typer.echo(line)
        good &= reached
    raise typer.Exit(1 if check and not good else 0)


def _worker(
    model: str, folder: str, config: Any, case: Case, mode: str, logs: Path | None
) -> Worker:
    room = cache_bytes(config, case.sequences, PROMPT + case.tokens)
    args = (mode, folder, [case.sequences], case.tokens, room)
    log = logs / f"costs_{model}_{mode}_{case.name}.log" if logs else None
    # As vLLM comes: an engine in the process that asks waits for that one.
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    name = f"{mode} {case.name}"
    return Worker(name, start, *args, log=log, environment=variables)


def _ask(workers: Workers, case: Case, mode: str, tokens: int) -> float | None:
    """Return a rate; None, and no more questions, where the engine failed."""
    try:
        rate: float = workers[case, mode].ask(case.sequences, tokens)["rate"]
    except Failed as error:
        typer.echo(str(error))
        del workers[case, mode]
        return None
    return rate


def told(case: Case, rates: dict[str, list[float]]) -> tuple[str, bool]:
    """Return a case's result as text, and whether its target is reached.

    Args:
        case: The case.
        rates: Output tokens a second by mode, a number a round.
    """
    text = f"{case.name:8}"
    missing = [mode for mode in MODES if not rates.get(mode)]
    if missing:
        return f"{text}MISSED: {' and '.join(missing)} not measured", False
    default, exact = (median(rates[mode]) for mode in MODES)
    slower = 1 - exact / default
    reached = slower <= case.slower
    text += f"{default:9.0f} tokens/s, exact {exact:9.0f}: {slower:6.1%} slower, "
    return text + f"at most {case.slower:.0%}: {'reached' if reached else 'MISSED'}", (
        reached
    )


if __name__ == "__main__":
    typer.run(main)
