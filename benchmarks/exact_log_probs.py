"""Exact mode: how many log-probs of vLLM and the trainer are equal, bit for bit.

    python benchmarks/exact_log_probs.py qwen3-8b llama3.1-8b qwen2.5-7b --layers 4
    python benchmarks/exact_log_probs.py MODEL_DIR --layers 0 --length 8184

Needs a Hopper GPU and vLLM 0.24. A built-in shape gets seeded random weights, which
both sides load; a folder's weights are its own, and `--layers 0` keeps all layers. Each
model is a process of its own, `--jobs` at a time. The engine samples at temperature 1
from batches that differ in size, prompts and what is cached, with chunked prefill and
prefix caching on; the trainer scores one sequence after the other. Then both take
optimizer steps and refits, and do it again. Prints the share of equal log-probs and the
largest gap, in nats; exits with 1 unless all are equal and the graphs are contained.
"""

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from vllm_engines import Failed, Worker, cache_bytes, make_llm, write_config
from vllm_trainer import load_exact, make_trainer, take_step
from vllm_warm_up import Wanted, warm_up

from jetrl_compile.bench.models import BUILT_IN
from jetrl_compile.integrations.vllm.exact import exact_settings
from jetrl_compile.kernels.deep_gemm_tiles import token_steps

CHUNK = 512  # tokens of a step: longer prompts are read in chunks
TRAIN = 512  # tokens of an optimizer step
# Name, sequences, shortest and longest prompt. The second time prompts are cached.
BATCHES = (
    ("one, long prompt", 1, 900, 900),
    ("mixed", 48, 3, 900),
    ("mixed, cached", 48, 3, 900),
    ("many", 256, 3, 64),
)


class Run:
    """One model: its engine, its trainer, and what was found."""

    def __init__(self, model: str, layers: int | None, length: int, steps: int) -> None:
        self.model = model
        self.layers = layers
        self.length = length
        self.steps = steps
        self.found: dict[str, Any] = {}
        self.kernel = ""

    def __call__(self) -> dict[str, Any]:
        """Run all, and return what was found by step."""
        from jetrl_compile.integrations.vllm.engine import refit
        from jetrl_compile.integrations.vllm.exact import prepare_exact
        from jetrl_compile.layers import compile_layers

        with tempfile.TemporaryDirectory() as folder:
            self._load(Path(folder))
        self.kernel = self.llm.apply_model(partial(prepare_exact, self.config))[0]
        self._check("graph at load")
        compile_layers(self.trainer, exact=True)
        self._compare("at load", BATCHES)
        losses = []
        for _ in range(self.steps):
            losses.append(take_step(self.trainer, TRAIN))
            refit(self.llm, self.trainer.named_parameters())
        if self.steps:
            self.found["losses"] = losses
            self._check("graph after steps")
            self._compare(f"after {self.steps} steps", BATCHES)
        return self.found

    def _load(self, folder: Path) -> None:
        from transformers import AutoConfig

        own = Path(self.model)
        if self.model in BUILT_IN:
            self.config = write_config(self.model, folder, self.layers)
            self.trainer = make_trainer(self.config, 1)
            self.trainer.save_pretrained(folder)
        else:
            kept = {"num_hidden_layers": self.layers} if self.layers else {}
            self.config = AutoConfig.from_pretrained(own, **kept)
            folder = own
        self.trainer = load_exact(folder, config=self.config)
        most = max(high for *_, high in BATCHES) + self.length
        sequences = max(count for _, count, *_ in BATCHES)
        every = token_steps(1, max(CHUNK, most))
        warm_up(Wanted(folder, every, exact=True))
        if self.steps:
            warm_up(Wanted(folder, [TRAIN], backward=True))
        self.llm = make_llm(
            folder,
            cache_bytes(self.config, 64, most),
            quantization="jetrl",
            **exact_settings(),
            hf_overrides={"num_hidden_layers": self.config.num_hidden_layers},
            max_model_len=most,
            max_num_seqs=sequences,
            max_num_batched_tokens=CHUNK,
            enable_chunked_prefill=True,
            enable_prefix_caching=True,
            compilation_config={"cudagraph_capture_sizes": [1, 8, 64, 256]},
        )

    def _check(self, step: str) -> None:
        from jetrl_compile.integrations.vllm.engine import check_engine

        report = check_engine(self.llm, self.trainer, exact=True)
        self.found[step] = report.verdict()
        for one in report.differences[:8]:
            print(one.level, one.operator, one.attribute, one.message)

    def _compare(
        self, step: str, batches: tuple[tuple[str, int, int, int], ...]
    ) -> None:
        import torch

        from jetrl_compile.integrations.vllm.log_probs import sample, trainer_log_probs

        for name, count, low, high in batches:
            generator = torch.Generator().manual_seed(count)
            sizes = torch.randint(low, high + 1, (count,), generator=generator).tolist()
            vocabulary = (5, self.config.vocab_size)
            prompts = [
                torch.randint(*vocabulary, (size,), generator=generator).tolist()
                for size in sizes
            ]
            sampled = sample(self.llm, prompts, self.length, seed=None)
            scores = trainer_log_probs(self.trainer, sampled, self.kernel)
            gap = (scores - sampled.log_probs).abs()[sampled.mask]
            self.found[f"{step}: {name}"] = {
                "tokens": gap.numel(),
                "equal": int((gap == 0).sum()),
                "first_equal": int((scores[:, 0] == sampled.log_probs[:, 0]).sum()),
                "sequences": count,
                "largest": float(gap.max()),
            }


def main(
    models: Annotated[list[str], typer.Argument(help="Built-in shapes, or folders.")],
    layers: Annotated[int, typer.Option(help="Layers to keep; 0: all.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens to sample.")] = 32,
    steps: Annotated[int, typer.Option(help="Optimizer steps, each with a refit.")] = 5,
    jobs: Annotated[int, typer.Option(help="Models at a time.")] = 2,
    logs: Annotated[Path | None, typer.Option(help="Folder of logs.")] = None,
    output: Annotated[Path, typer.Option(help="JSON.")] = Path("exact.json"),
) -> None:
    """Compare log-probs, and print how many are equal."""
    results: dict[str, dict[str, Any]] = {}
    for first in range(0, len(models), jobs):
        workers = []
        for model in models[first : first + jobs]:
            name = Path(model).name
            log = logs / f"exact_{name}.log" if logs else None
            worker = Worker(name, Run, model, layers or None, length, steps, log=log)
            worker.send()
            workers.append(worker)
        for worker in workers:
            try:
                worker.wait()
                results[worker.name] = worker.receive()
            except Failed as error:
                results[worker.name] = {"failed": str(error)}
            worker.stop()
    output.write_text(json.dumps(results, indent=1))
    good = True
    for name, found in results.items():
        typer.echo(name)
        for step, value in found.items():
            line, fine = told(value)
            good &= fine and step != "failed"
            typer.echo(f"  {step:28}{line}")
    raise typer.Exit(0 if good else 1)


def told(value: Any) -> tuple[str, bool]:
    """Return a result as text, and whether it is as wanted."""
    if isinstance(value, dict):
        share = 100 * value["equal"] / value["tokens"]
        first = f"{value['first_equal']} of {value['sequences']} first tokens"
        text = f"{share:8.4f}% of {value['tokens']} equal, {first}, "
        return text + f"largest gap {value['largest']:.3g}", share == 100
    if isinstance(value, list):
        return ", ".join(f"{one:.4g}" for one in value), True
    return str(value), str(value).startswith("contained")


if __name__ == "__main__":
    typer.run(main)
