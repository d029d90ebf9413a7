"""Output tokens a second of vLLM: BF16, its own block FP8, and the trainer's flow.

    python benchmarks/vllm_throughput.py qwen3-8b --sequences 8 --sequences 64
    python benchmarks/vllm_throughput.py qwen3-32b --sequences 64 --engine bf16 \
        --engine jetrl

Needs a Hopper GPU, vLLM 0.24 and DeepGEMM. DeepGEMM's kernels are compiled first. Each
engine is a process of its own with random weights; all load at the same time, every
batch size is run once, prefill included, and then they generate in turns, one at a
time. The rate counts generated tokens over the time of the whole call, prefill
included. Prints medians and ratios, and writes all samples as JSON.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from vllm_engines import WHOLE_GRAPH, Failed, Worker, cache_bytes, make_llm, wait_all
from vllm_engines import write_config as write
from vllm_warm_up import Wanted, warm_up

from jetrl_compile.bench.models import BUILT_IN
from jetrl_compile.integrations.vllm.exact import exact_settings
from jetrl_compile.kernels.deep_gemm_tiles import token_steps

ENGINES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8_per_block": {"quantization": "fp8_per_block"},
    "jetrl": {"quantization": "jetrl"},
    "jetrl_whole_graph": {"quantization": "jetrl", "compilation_config": WHOLE_GRAPH},
    "jetrl_exact": {"quantization": "jetrl", **exact_settings()},
}
PROMPT = 128
BATCHED = 8192  # tokens of a step: prompts are read in pieces of this size


def start(
    name: str,
    folder: str,
    sequences: list[int],
    tokens: int,
    cache: int,
    ranks: int = 1,
) -> Callable[..., Any]:
    """Load an engine; return what gives a rate for (sequences, tokens)."""
    import time

    import torch
    from vllm import SamplingParams

    given = dict(ENGINES[name])
    llm = make_llm(
        folder,
        cache,
        load_format="dummy",
        tensor_parallel_size=ranks,
        max_model_len=PROMPT + tokens,
        max_num_seqs=max(sequences),
        max_num_batched_tokens=max(BATCHED, PROMPT + tokens),
        compilation_config={
            "cudagraph_capture_sizes": sorted(sequences),
            **given.pop("compilation_config", {}),
        },
        **given,
    )
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    generator = torch.Generator().manual_seed(0)
    size = (max(sequences), PROMPT)
    ids = torch.randint(10, vocabulary, size, generator=generator).tolist()

    def rate(count: int, length: int) -> dict[str, float]:
        prompts = [{"prompt_token_ids": row} for row in ids[:count]]
        how = SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        made = llm.generate(prompts, how, use_tqdm=False)
        seconds = time.perf_counter() - begin
        done = sum(len(one.outputs[0].token_ids) for one in made)
        assert done == count * length, f"{done} tokens of {count} x {length}"
        return {"rate": done / seconds, "seconds": seconds}

    return rate


def batches(sequences: list[int], tokens: int = 0) -> list[int]:
    """Return how many tokens steps may have; one number for all that share kernels.

    Requests reach an engine in a process of its own one after the other, so it may read
    any number of prompts in a step.

    Args:
        sequences: Numbers of sequences.
        tokens: To generate, the most: an engine runs a step of its longest sequence.
    """
    return token_steps(1, max(BATCHED, PROMPT + tokens, *sequences))


def main(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join(BUILT_IN)}.")],
    sequences: Annotated[list[int], typer.Option(help="Sequences at a time.")],
    engine: Annotated[list[str] | None, typer.Option(help="Engines.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 256,
    rounds: Annotated[int, typer.Option(help="Samples of each.")] = 3,
    layers: Annotated[int | None, typer.Option(help="Layers to keep.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Folder of logs.")] = None,
    output: Annotated[Path, typer.Option(help="JSON.")] = Path("throughput.json"),
) -> None:
    """Measure engines in turns."""
    names = engine or ["bf16", "fp8_per_block", "jetrl"]
    for name in names:
        if name not in ENGINES:
            raise typer.BadParameter(f"{name} is none of {', '.join(ENGINES)}")
    samples: dict[str, dict[int, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = write(model, Path(folder), layers)
        cache = cache_bytes(config, max(sequences), PROMPT + tokens)
        exact = any("exact" in name for name in names)
        warm_up(Wanted(folder, batches(sequences, tokens), exact=exact), say=typer.echo)
        workers = []
        for name in names:
            # As vLLM comes: an engine in the process that asks waits for that one.
            variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
            if "whole" in name:
                variables["VLLM_USE_AOT_COMPILE"] = "0"
            args = (name, folder, sequences, tokens, cache)
            log = logs / f"throughput_{model}_{name}.log" if logs else None
            workers.append(Worker(name, start, *args, log=log, environment=variables))
        ready = wait_all(workers, typer.echo)
        for worker in list(ready):  # the same batches as those that are measured
            try:
                for count in sequences:
                    worker.ask(count, 8)
            except Failed as error:
                typer.echo(str(error))
                ready.remove(worker)
        found = {"model": model, "layers": config.num_hidden_layers, "tokens": tokens}
        for done in range(1, rounds + 1):
            for count in sequences:
                for worker in ready:
                    own = samples.setdefault(worker.name, {}).setdefault(count, [])
                    own.append(worker.ask(count, tokens))
            # After each round: what was measured stays if the next one fails.
            output.write_text(json.dumps({**found, "samples": samples}))
            typer.echo(f"{done} of {rounds} rounds\n{table(samples, sequences)}")
        for worker in workers:
            worker.stop()


def table(
    samples: dict[str, dict[int, list[dict[str, float]]]], sequences: list[int]
) -> str:
    """Return medians, and the ratios to those without the passes."""
    rates = {
        name: {n: median(one["rate"] for one in own[n]) for n in sequences}
        for name, own in samples.items()
    }
    lines = [f"{'tokens/s':32}" + "".join(f"{count:>10}" for count in sequences)]
    for name, own in rates.items():
        lines.append(f"{name:32}" + "".join(f"{own[n]:10.0f}" for n in sequences))
    for name, own in rates.items():
        for base in ("bf16", "fp8_per_block"):
            if base in rates and name.startswith("jetrl"):
                ratios = "".join(f"{own[n] / rates[base][n]:10.3f}" for n in sequences)
                lines.append(f"{name + ' / ' + base:32}{ratios}")
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
