"""Output tokens a second of vLLM: BF16, its own block FP8, and the trainer's flow.

    python benchmarks/vllm_throughput.py qwen3-8b --sequences 8 --sequences 64

Needs a Hopper GPU, vLLM 0.24 and DeepGEMM. Each engine is a process of its own with
random weights; all are loaded first, every batch size is warmed up, and then they
generate in turns, one at a time. Prints medians and writes them as JSON. Compile
DeepGEMM's kernels first: `jetrl warm-up CONFIG_DIR --no-backward --tokens 1:8192`.
"""

import json
import os
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from jetrl_compile.bench.models import BUILT_IN, find_config

ENGINES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8_per_block": {"quantization": "fp8_per_block"},
    "jetrl": {"quantization": "jetrl"},
    "jetrl_whole_graph": {
        "quantization": "jetrl",
        "compilation_config": {
            "mode": 2,
            "backend": "jetrl",
            "cudagraph_mode": "FULL_DECODE_ONLY",
        },
    },
}
PROMPT = 128
_CONTEXT = get_context("spawn")


def serve(
    name: str, folder: str, sequences: list[int], cache_gib: int, pipe: Connection
) -> None:
    """Load an engine, warm it up, and answer (sequences, tokens) with a rate."""
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if name == "jetrl_whole_graph":
        os.environ["VLLM_USE_AOT_COMPILE"] = "0"
    import torch
    from vllm import LLM, SamplingParams

    given = dict(ENGINES[name])
    compilation = {
        "cudagraph_capture_sizes": sorted(sequences),
        **given.pop("compilation_config", {}),
    }
    llm: Any = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=max(sequences),
        enable_prefix_caching=False,
        # The engines share the GPU: none may take what is free.
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=cache_gib << 30,
        compilation_config=compilation,
        **given,
    )
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    generator = torch.Generator().manual_seed(0)
    size = (max(sequences), PROMPT)
    ids = torch.randint(10, vocabulary, size, generator=generator).tolist()

    def rate(count: int, tokens: int) -> float:
        prompts = [{"prompt_token_ids": row} for row in ids[:count]]
        how = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        made = llm.generate(prompts, how, use_tqdm=False)
        seconds = time.perf_counter() - start
        return sum(len(one.outputs[0].token_ids) for one in made) / seconds

    for count in sequences:
        rate(count, 8)
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        pipe.send(rate(*asked))


def main(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join(BUILT_IN)}.")],
    sequences: Annotated[list[int], typer.Option(help="Sequences at a time.")],
    engine: Annotated[list[str] | None, typer.Option(help="Engines.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 256,
    rounds: Annotated[int, typer.Option(help="Samples of each.")] = 3,
    layers: Annotated[int | None, typer.Option(help="Layers to keep.")] = None,
    cache_gib: Annotated[int, typer.Option(help="GiB of each key/value cache.")] = 10,
    output: Annotated[Path, typer.Option(help="JSON.")] = Path("throughput.json"),
) -> None:
    """Measure engines in turns."""
    names = engine or ["bf16", "fp8_per_block", "jetrl"]
    for name in names:
        if name not in ENGINES:
            raise typer.BadParameter(f"{name} is none of {', '.join(ENGINES)}")
    config = find_config(model, layers)
    kinds = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}
    config.architectures = [f"{kinds[config.model_type]}ForCausalLM"]
    config.dtype = "bfloat16"
    rates: dict[str, dict[int, list[float]]] = {name: {} for name in names}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        pipes: dict[str, Connection] = {}
        for name in names:  # one after the other: each measures what memory is free
            ours, theirs = _CONTEXT.Pipe()
            args = (name, folder, sequences, cache_gib, theirs)
            _CONTEXT.Process(target=serve, args=args, daemon=False).start()
            theirs.close()
            ours.recv()
            pipes[name] = ours
            typer.echo(f"{name}: loaded and warm")
        for _ in range(rounds):
            for count in sequences:
                for name, pipe in pipes.items():
                    pipe.send((count, tokens))
                    rates[name].setdefault(count, []).append(pipe.recv())
        for pipe in pipes.values():
            pipe.send(None)
    typer.echo(f"{'tokens/s':20}" + "".join(f"{count:>12}" for count in sequences))
    for name in names:
        numbers = "".join(f"{median(rates[name][n]):12.0f}" for n in sequences)
        typer.echo(f"{name:20}{numbers}")
    output.write_text(json.dumps({"model": model, "tokens": tokens, "rates": rates}))


if __name__ == "__main__":
    typer.run(main)
