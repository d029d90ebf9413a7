"""vLLM on two GPUs: levels 1 to 3 against the unsharded trainer, and output tokens/s.

    python benchmarks/vllm_tensor_parallel.py qwen3-8b

Needs two Hopper GPUs of one host and vLLM 0.24. First an engine of a few layers, tensor
parallel size 2, is loaded from a checkpoint with seeded random weights and checked
against the trainer on the first GPU: at load, after an optimizer step (must fail at
level 3), and after a refit, which sends whole weights to the ranks. Then engines of all
layers with random weights generate in turns, as in `vllm_throughput.py`. The sum over
ranks adds BF16 results, which the trainer does not round: the graph's `meta` says so,
and the gap of log-probs shows what it costs.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from vllm_engines import Failed, Worker, cache_bytes, make_llm, wait_all, write_config
from vllm_levels import LENGTH, Run
from vllm_throughput import PROMPT, batches, table
from vllm_throughput import start as start_rates
from vllm_trainer import make_trainer, take_step
from vllm_warm_up import Wanted, use_one_cache, warm_up

ENVIRONMENT = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions are sent to the ranks
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the trainer holds a CUDA context
    # No NVLink multicast: a host may forbid it.
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "NCCL_NVLS_ENABLE": "0",
}


class Levels(Run):
    """The steps of the check; `found` has a line for each, also where it raised."""

    def __init__(self, model: str, layers: int, ranks: int) -> None:
        super().__init__(model, layers, None)
        self.ranks = ranks

    def meta(self) -> str:
        """Return what the graph says of sums over ranks."""
        from jetrl_compile.integrations.vllm.engine import engine_graph

        meta = engine_graph(self.llm).meta
        return f"{meta['tensor_parallel']} ranks; {meta.get('partial_sums', 'none')}"

    def __call__(self) -> dict[str, str]:
        """Run every step."""
        import torch

        from jetrl_compile.layers import compile_layers

        torch.manual_seed(0)
        with (
            tempfile.TemporaryDirectory() as folder,
            tempfile.TemporaryDirectory() as own,
        ):
            config = write_config(self.model, Path(folder), self.layers)
            self.trainer = make_trainer(config, 1)
            self.trainer.save_pretrained(folder)
            shard_config(config, Path(own), self.ranks)
            whole = Wanted(folder, [LENGTH], backward=True)
            warm_up(Wanted(own, [4, LENGTH]), whole)
            self.llm = make_llm(
                folder,
                cache_bytes(config, 8, LENGTH, self.ranks),
                quantization="jetrl",
                tensor_parallel_size=self.ranks,
                max_model_len=LENGTH,
                max_num_seqs=8,
                max_num_batched_tokens=LENGTH,
                compilation_config={"cudagraph_capture_sizes": [1, 4]},
            )
        self.step("graph", self.meta)
        self.step("at load", self.verdict)
        compile_layers(self.trainer)
        self.step("loss", lambda: f"{take_step(self.trainer, LENGTH):.4g}")
        self.step("after a step", self.verdict)
        self.step("tensors pushed", self.push)
        self.step("after the refit", self.verdict)
        self.step("gap", self.gap)
        return self.found


def shard_config(config: Any, folder: Path, ranks: int) -> None:
    """Write the config of a model whose layers have one rank's sizes, to warm it up."""
    own = type(config)(**config.to_dict())
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        setattr(own, name, getattr(config, name) // ranks)
    own.head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    own.save_pretrained(folder)


def ask(start: Callable[..., Any], args: tuple[Any, ...], log: Path | None) -> Any:
    """Run a worker's only question."""
    worker = Worker("levels", start, *args, log=log, environment=ENVIRONMENT)
    try:
        worker.wait()
        return worker.ask()
    except Failed as error:
        return {"failed": str(error)}
    finally:
        worker.stop()


def rates(
    model: str,
    engines: list[str],
    sequences: list[int],
    tokens: int,
    rounds: int,
    ranks: int,
    logs: Path | None,
) -> dict[str, dict[int, list[dict[str, float]]]]:
    """Return the samples of engines of all layers, in turns."""
    samples: dict[str, dict[int, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as own:
        config = write_config(model, Path(folder))
        shard_config(config, Path(own), ranks)
        warm_up(Wanted(own, batches(sequences)), say=typer.echo)
        cache = cache_bytes(config, max(sequences), PROMPT + tokens, ranks)
        args = (folder, sequences, tokens, cache, ranks)
        workers = [
            Worker(
                name,
                start_rates,
                name,
                *args,
                log=logs / f"tensor_parallel_{name}.log" if logs else None,
                environment=ENVIRONMENT,
            )
            for name in engines
        ]
        ready = wait_all(workers, typer.echo)
        for worker in ready:
            for count in sequences:
                worker.ask(count, 8)
        for _ in range(rounds):
            for count in sequences:
                for worker in ready:
                    own_samples = samples.setdefault(worker.name, {})
                    own_samples.setdefault(count, []).append(worker.ask(count, tokens))
        for worker in ready:
            worker.stop()
    return samples


def main(
    model: Annotated[str, typer.Argument(help="A built-in shape.")],
    ranks: Annotated[int, typer.Option(help="Tensor parallel size.")] = 2,
    layers: Annotated[int, typer.Option(help="Layers of the checked engine.")] = 2,
    sequences: Annotated[list[int] | None, typer.Option(help="At a time.")] = None,
    engine: Annotated[list[str] | None, typer.Option(help="Engines.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 256,
    rounds: Annotated[int, typer.Option(help="Samples of each; 0: none.")] = 3,
    logs: Annotated[Path | None, typer.Option(help="Folder of logs.")] = None,
    output: Annotated[Path, typer.Option(help="JSON.")] = Path("tensor_parallel.json"),
) -> None:
    """Check and measure an engine of several ranks."""
    use_one_cache()
    log = logs / "tensor_parallel_levels.log" if logs else None
    found = ask(Levels, (model, layers, ranks), log)
    counts = sequences or [64]
    names = engine or ["bf16", "jetrl"]
    samples = {}
    if rounds:
        samples = rates(model, names, counts, tokens, rounds, ranks, logs)
    output.write_text(json.dumps({"levels": found, "samples": samples}, indent=1))
    for step, line in found.items():
        typer.echo(f"{step:20}{line.strip().splitlines()[-1][:150]}")
    if samples:
        typer.echo(table(samples, counts))


if __name__ == "__main__":
    typer.run(main)
