"""What spoils exact mode: each planted spoiler must be named, in the graph and in bits.

    python benchmarks/exact_spoilers.py qwen3-8b --layers 2

Needs a Hopper GPU and vLLM 0.24. A process writes a checkpoint of a few layers with
seeded random weights, loads it into an exact engine and an exact trainer, and plants
the spoilers of `exact_plants` one after the other, each undone afterwards. With each
the engine samples, and `check_engine(exact=True)` must fail; the containment of the
graphs that ran must name the operator; log-probs must differ, and the first operator
whose bits part, for the first token whose log-prob does, must be the same one. Without
a spoiler, before and after, all must be equal. Prints a line for each; exits with 1 if
one is wrong. The engine compiles as ever, but runs without CUDA graphs: so attention
can be changed and recorded.
"""

import json
import tempfile
import traceback
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from exact_plants import SPOILERS
from exact_values import parting, recorded_attention, replay, run_trainer
from vllm_engines import Failed, Worker, cache_bytes, make_llm, write_config
from vllm_trainer import load_exact, make_trainer
from vllm_warm_up import Wanted, warm_up

from jetrl_compile.containment import check_containment
from jetrl_compile.errors import JetRLError
from jetrl_compile.integrations.vllm.engine import check_engine, engine_graph
from jetrl_compile.integrations.vllm.exact import exact_settings
from jetrl_compile.integrations.vllm.log_probs import Sampled, sample
from jetrl_compile.kernels.deep_gemm_tiles import token_steps
from jetrl_compile.kernels.exact_ops import log_probs

CHUNK = 512  # tokens of a step
NOTHING = "no spoiler"


@dataclass(frozen=True)
class Found:
    """What was found of a pair.

    Attributes:
        check: What `check_engine` said, "" if all is exact.
        graph: The operators that the graphs' containment names.
        tokens: Sampled tokens.
        equal: How many log-probs of them are equal in bits.
        replayed: How many are equal in bits when the engine's graph runs again.
        bits: The first operator whose bits part; "" if none does.
    """

    check: str
    graph: tuple[str, ...]
    tokens: int
    equal: int
    replayed: int
    bits: str


def examine(
    llm: Any, trainer: Any, kernel: str, prompt: list[int], length: int
) -> Found:
    """Sample, and find what an engine and its trainer differ in.

    Args:
        llm: vLLM's LLM, in this process.
        trainer: Its trainer's model.
        kernel: Of log-probs (`prepare_exact`).
        prompt: Token ids.
        length: Tokens to sample.
    """
    model = llm.apply_model(lambda model: model)[0]
    with recorded_attention(model) as calls:
        sampled: Sampled = sample(llm, [prompt], length)
    device = next(trainer.parameters()).device
    tokens = torch.tensor(sampled.tokens[0], device=device)
    ids, chosen, first = tokens[:-1], tokens[len(prompt) :], len(prompt) - 1
    rows = {name: torch.cat(made)[: len(ids)] for name, made in calls.items()}
    engine = replay(model, ids.int(), lambda name, *_: rows[name])
    train = run_trainer(trainer, ids)
    live = sampled.log_probs[0]
    scores, again = (
        log_probs(run.logits[first:], chosen, 1.0, kernel).cpu()
        for run in (train, engine)
    )
    differ = (scores != live).nonzero()[:, 0].tolist()
    part = ""
    if differ:
        part = parting(engine, train, first + differ[0]) or "outside the operators"
    report = check_containment(engine_graph(llm), train.graph, exact=True)
    return Found(
        _check(llm, trainer),
        tuple(dict.fromkeys(one.operator for one in report.differences)),
        len(live),
        int((scores == live).sum()),
        int((again == live).sum()),
        part,
    )


def _check(llm: Any, trainer: Any) -> str:
    try:
        report = check_engine(llm, trainer, exact=True)
    except JetRLError as error:  # it is refused
        return str(error)
    return "" if report.contained else report.verdict()


def judge(name: str, found: Found) -> tuple[str, bool]:
    """Return what was found as text, and whether it is as wanted.

    Args:
        name: Of a spoiler, or `NOTHING`.
        found: With it.
    """
    share = f"{found.equal} of {found.tokens} log-probs equal"
    if name == NOTHING:
        clean = not (found.check or found.graph or found.bits)
        text = f"{share}, {found.replayed} when run again"
        if clean and found.equal == found.replayed == found.tokens:
            return text, True
        first = found.check or ", ".join(found.graph) or found.bits
        return f"WRONG: {text}; {first or 'the replay is not the engine'}", False
    operator = SPOILERS[name].operator
    wrong = []
    if not found.check:
        wrong.append("NOT FOUND by check_engine")
    if operator not in found.graph:
        wrong.append(f"NOT FOUND in the graph, which names {found.graph[:3] or '-'}")
    if found.bits != operator:
        wrong.append(f"NOT FOUND in bits, which part at {found.bits or '-'}")
    if wrong:
        return f"{operator} wanted: {'; '.join(wrong)}; {share}", False
    return f"{operator}, in the graph and in bits; {share}", True


class Run:
    """One model: its engine, its trainer, and what was found."""

    def __init__(self, model: str, layers: int, prompt: int, length: int) -> None:
        self.model, self.layers = model, layers
        self.prompt, self.length = prompt, length

    def __call__(self) -> dict[str, tuple[str, bool]]:
        """Plant every spoiler; return a line for each, and whether it was found."""
        with tempfile.TemporaryDirectory() as folder:
            self._load(Path(folder))
        model = self.llm.apply_model(lambda model: model)[0]
        steps: list[tuple[str, AbstractContextManager[Any]]] = [
            (NOTHING, nullcontext()),
            *((n, one.plant(model, self.trainer)) for n, one in SPOILERS.items()),
            (NOTHING, nullcontext()),
        ]
        found: dict[str, tuple[str, bool]] = {}
        for name, planted in steps:
            key = name if name not in found else f"{name}, after"
            try:
                with planted:
                    found[key] = judge(name, self._examine())
            except Exception as error:
                traceback.print_exc()
                found[key] = f"RAISED {type(error).__name__}: {error}"[:300], False
            print(f"## {self.model}: {key}: {found[key][0]}", flush=True)
        return found

    def _examine(self) -> Found:
        generator = torch.Generator().manual_seed(0)
        given = (5, self.config.vocab_size, (self.prompt,))
        prompt = torch.randint(*given, generator=generator).tolist()
        return examine(self.llm, self.trainer, self.kernel, prompt, self.length)

    def _load(self, folder: Path) -> None:
        from jetrl_compile.integrations.vllm.exact import prepare_exact

        self.config = write_config(self.model, folder, self.layers)
        make_trainer(self.config, 1).save_pretrained(folder)
        self.trainer = load_exact(folder)
        most = self.prompt + self.length
        warm_up(Wanted(folder, token_steps(1, max(CHUNK, most)), exact=True))
        self.llm = make_llm(
            folder,
            cache_bytes(self.config, 4, most),
            quantization="jetrl",
            **exact_settings(),
            max_model_len=most,
            max_num_seqs=4,
            max_num_batched_tokens=CHUNK,
            compilation_config={"cudagraph_mode": "NONE"},
        )
        prepare = partial(prepare_exact, self.config)
        self.kernel = self.llm.apply_model(prepare)[0]


def main(
    model: Annotated[str, typer.Argument(help="A built-in shape.")] = "qwen3-8b",
    layers: Annotated[int, typer.Option(help="Layers to keep.")] = 2,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 700,
    length: Annotated[int, typer.Option(help="Tokens to sample.")] = 48,
    logs: Annotated[Path | None, typer.Option(help="Folder of logs.")] = None,
    output: Annotated[Path, typer.Option(help="JSON.")] = Path("spoilers.json"),
) -> None:
    """Plant spoilers, and print what names each."""
    log = logs / f"spoilers_{Path(model).name}.log" if logs else None
    worker = Worker(Path(model).name, Run, model, layers, prompt, length, log=log)
    worker.send()
    try:
        worker.wait()
        found = worker.receive()
    except Failed as error:
        found = {"failed": (str(error), False)}
    worker.stop()
    output.write_text(json.dumps(found, indent=1))
    for name, (text, good) in found.items():
        typer.echo(f"{'' if good else 'FAILED '}{name}: {text}")
    raise typer.Exit(0 if all(good for _, good in found.values()) else 1)


if __name__ == "__main__":
    typer.run(main)
