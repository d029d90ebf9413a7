"""Levels 1 to 3 of live vLLM engines against a trainer, and what must not pass them.

    python benchmarks/vllm_levels.py qwen3-8b llama3.1-8b qwen2.5-7b smollm2-135m

Needs a Hopper GPU and vLLM 0.24. For each model a process writes a checkpoint of a few
layers with seeded random weights, loads it into vLLM (its default compilation and CUDA
graphs), and takes an optimizer step on the trainer that `compile_layers` compiled. It
checks at load, after the step (must fail), after a refit, and after vLLM's
weight-transfer API (`vllm_transfer.py`); wakes the engine from sleep levels 1 and 2;
and plants the faults of `vllm_faults.py`. Prints a table; differences are in the logs.
`--fixtures DIR` writes the graph that ran, for tests without vLLM.
"""

import contextlib
import json
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from vllm_engines import Failed, Worker, cache_bytes, make_llm, write_config
from vllm_trainer import fill, make_trainer, take_step
from vllm_warm_up import Wanted, warm_up

PROMPTS = [[5, 6, 7, 8], [9] * 17, list(range(10, 60))]
LENGTH = 128  # of all batches but those that decode, so that kernels are few
FIXTURES = {"qwen3-8b": "qwen3", "llama3.1-8b": "llama", "qwen2.5-7b": "qwen2"}


class Run:
    """All steps on one model; `found` has a line for each, also where it raised."""

    def __init__(self, model: str, layers: int, fixtures: Path | None) -> None:
        self.model = model
        self.layers = layers
        self.fixtures = fixtures
        self.found: dict[str, str] = {}

    def step(self, name: str, call: Callable[[], str]) -> None:
        """Run a step, and keep the line that it returns."""
        try:
            self.found[name] = call()
        except Exception as error:
            traceback.print_exc()
            self.found[name] = f"RAISED {type(error).__name__}: {error}"[:300]
        print(f"## {self.model}: {name}: {self.found[name]}", flush=True)

    def verdict(self) -> str:
        """Check levels 1 to 3; print every difference."""
        from jetrl_compile.integrations.vllm.engine import check_engine

        report = check_engine(self.llm, self.trainer)
        for one in report.differences:
            print(one.level, one.operator, one.attribute, one.message)
        return report.verdict()

    def push(self) -> str:
        """Push the trainer's weights."""
        from jetrl_compile.integrations.vllm.engine import refit

        return str(refit(self.llm, self.trainer.named_parameters()))

    def tokens(self) -> Any:
        """Return greedy tokens."""
        from jetrl_compile.integrations.vllm.log_probs import sample

        return sample(self.llm, PROMPTS, 16, temperature=0.0).tokens

    def sleep(self, level: int) -> str:
        """Sleep, wake up, push, and compare greedy tokens."""
        before = self.tokens()
        self.llm.sleep(level)
        self.llm.wake_up()
        self.push()
        return "same tokens" if self.tokens() == before else "DIFFERENT TOKENS"

    def gap(self) -> str:
        """Sample, and score with the compiled trainer."""
        from jetrl_compile.integrations.vllm import log_probs as level4

        sampled = level4.sample(self.llm, PROMPTS, 64)
        scores = level4.trainer_log_probs(self.trainer, sampled)
        k3 = level4.gap_metrics(sampled, scores)["rollout_corr/k3_kl"]
        return f"k3_kl {k3:.3g}"

    def transfer(self) -> str:
        """Push other weights over vLLM's weight-transfer API, whole and in part."""
        from vllm_transfer import transfer

        from jetrl_compile.errors import RefitError
        from jetrl_compile.integrations.vllm.workers import drop_requests

        with contextlib.suppress(Failed):  # then all is sent from this process
            self.sender.wait()
        fill(self.trainer, 7)
        weights = {n: p.detach() for n, p in self.trainer.named_parameters()}
        half = dict(list(weights.items())[: len(weights) // 2])
        transfer(self.llm, self.sender, half)
        try:
            self.tokens()
        except RefitError as error:
            print("half a transfer:", error)
        else:
            return "HALF A TRANSFER GENERATES"
        how = transfer(self.llm, self.sender, weights)
        drop_requests(self.llm)
        self.tokens()
        return f"{how}; {self.verdict()}"

    def fault(self, name: str) -> str:
        """Plant a fault, check, and push sound weights again."""
        from vllm_faults import FAULTS, judge

        found = FAULTS[name][0](self.llm, self.trainer)
        for one in found[:8]:
            print(one.level, one.operator, one.attribute, one.message)
        self.push()
        return judge(name, found)

    def write_fixtures(self) -> str:
        """Write the graph before the passes, and the precision graph that ran."""
        from jetrl_compile.capture_json import write_captured
        from jetrl_compile.graph_json import write_graph
        from jetrl_compile.integrations.vllm.engine import captured_graph, engine_graph

        folder = self.fixtures or Path()
        folder.mkdir(parents=True, exist_ok=True)
        base = folder / f"vllm_h200_{FIXTURES[self.model]}"
        meta = {"engine": "vllm 0.24.0", "model": self.model, "origin": "H200"}
        write_captured(captured_graph(self.llm), f"{base}.json", meta)
        write_graph(engine_graph(self.llm), f"{base}_graph.json")
        return f"{base}*.json"

    def __call__(self) -> dict[str, str]:
        """Run every step."""
        import torch
        from vllm.config import WeightTransferConfig
        from vllm_faults import FAULTS
        from vllm_transfer import BACKEND, register, start_sender

        from jetrl_compile.layers import compile_layers

        torch.manual_seed(0)
        register()
        lengths = {"max_model_len": LENGTH, "max_num_batched_tokens": LENGTH}
        with tempfile.TemporaryDirectory() as folder:
            config = write_config(self.model, Path(folder), self.layers)
            self.trainer = make_trainer(config, 1)
            self.trainer.save_pretrained(folder)
            self.sender = Worker("sender", start_sender, make_trainer, config, 7)
            both = Wanted(folder, [4]), Wanted(folder, [LENGTH], backward=True)
            warm_up(*both, jobs=8)
            self.llm = make_llm(
                folder,
                cache_bytes(config, 8, LENGTH),
                quantization="jetrl",
                max_num_seqs=8,
                **lengths,
                enable_sleep_mode=True,
                weight_transfer_config=WeightTransferConfig(backend=BACKEND),
                compilation_config={"cudagraph_capture_sizes": [1, 4]},
            )
        self.step("at load", self.verdict)
        if self.fixtures is not None and self.model in FIXTURES:
            self.step("fixtures", self.write_fixtures)
        compile_layers(self.trainer)
        self.step("loss", lambda: f"{take_step(self.trainer, LENGTH):.4g}")
        self.step("after a step", self.verdict)
        self.step("tensors pushed", self.push)
        self.step("after the refit", self.verdict)
        self.step("gap", self.gap)
        for level in (1, 2):
            self.step(f"sleep level {level}", lambda level=level: self.sleep(level))
        self.step("weight transfer", self.transfer)
        for name in FAULTS:
            self.step(name, lambda name=name: self.fault(name))
        self.step("after the faults", self.verdict)
        self.sender.stop()
        return self.found


def main(
    models: Annotated[list[str], typer.Argument(help="Built-in shapes, or folders.")],
    layers: Annotated[int, typer.Option(help="Layers to keep.")] = 2,
    jobs: Annotated[int, typer.Option(help="Engines at a time.")] = 4,
    fixtures: Annotated[Path | None, typer.Option(help="Write graphs there.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Folder of logs.")] = None,
    output: Annotated[Path, typer.Option(help="JSON.")] = Path("levels.json"),
) -> None:
    """Check engines, and print what was found."""
    results: dict[str, dict[str, str]] = {}
    for first in range(0, len(models), jobs):
        workers = []
        for model in models[first : first + jobs]:
            log = logs / f"levels_{Path(model).name}.log" if logs else None
            worker = Worker(Path(model).name, Run, model, layers, fixtures, log=log)
            worker.send()
            workers.append(worker)
        for worker in workers:
            try:
                worker.wait()
                results[worker.name] = worker.receive()
            except Failed as error:
                results[worker.name] = {"failed": str(error)}
            typer.echo(json.dumps({worker.name: results[worker.name]}))
            worker.stop()
    output.write_text(json.dumps(results, indent=1))
    for step in dict.fromkeys(key for found in results.values() for key in found):
        typer.echo(step)
        for name, found in results.items():
            typer.echo(f"  {name:16}{found.get(step, '-').splitlines()[0][:150]}")


if __name__ == "__main__":
    typer.run(main)
