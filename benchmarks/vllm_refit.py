"""Time of a refit of a live vLLM engine against copying the same BF16 weights.

    python benchmarks/vllm_refit.py qwen3-8b

Needs a Hopper GPU and vLLM 0.24. The engine runs in this process with random weights;
others are made on the GPU and pushed with `refit`, in turns with two copies on the
device: a `copy_` a tensor, and all by one call. Host time ends where the call has
launched its work (a refit also waits, to know that no weight is NaN). Afterwards every
stored byte is compared with what the trainer's weights give. If a refit takes more than
1.5 times as long as the faster copy, profiles of the GPU's kernels and of Python
follow. Prints medians in ms, and writes all samples as JSON.
"""

import cProfile
import io
import json
import os
import pstats
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from vllm_engines import ENVIRONMENT, cache_bytes, make_llm, write_config

from jetrl_compile.bench.models import BUILT_IN

LIMIT = 1.5


def make_weights(config: Any, seed: int) -> dict[str, Any]:
    """Return BF16 weights of a Hugging Face model on the GPU, by their names."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(seed)
    made = {}
    for name, p in model.named_parameters():
        made[name] = torch.empty(p.shape, dtype=torch.bfloat16, device="cuda")
        made[name].normal_(std=0.02, generator=generator)
    return made


def timed(call: Callable[[], object]) -> dict[str, float]:
    """Return the milliseconds until a call returned, and until its work was done."""
    import torch

    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    host = time.perf_counter()
    torch.cuda.synchronize()
    end = time.perf_counter()
    return {"host": (host - begin) * 1e3, "total": (end - begin) * 1e3}


def gpu_profile(call: Callable[[], object], rows: int = 12) -> str:
    """Return the time of each kernel of a call, the longest first."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        call()
        torch.cuda.synchronize()
    averages = found.key_averages()
    return str(averages.table(sort_by="self_cuda_time_total", row_limit=rows))


def host_profile(call: Callable[[], object], rows: int = 20) -> str:
    """Return the Python functions of a call, by their own time."""
    profiler = cProfile.Profile()
    profiler.runcall(call)
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(rows)
    return text.getvalue()


def check(llm: Any, weights: dict[str, Any]) -> int:
    """Compare all stored bytes with those that weights give; return how many tensors.

    Raises:
        AssertionError: Some differ.
    """
    from jetrl_compile.integrations.vllm.live_bytes import check_live_bytes

    def compare(model: Any) -> Any:
        return check_live_bytes(model, weights)

    result, differences = llm.apply_model(compare)[0]
    assert result.status == "passed", [one.message for one in differences[:4]]
    return int(result.counts["tensors"])


def main(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join(BUILT_IN)}.")],
    rounds: Annotated[int, typer.Option(help="Samples of each.")] = 9,
    layers: Annotated[int | None, typer.Option(help="Layers to keep.")] = None,
    profile: Annotated[bool, typer.Option(help="Profile in any case.")] = False,
    output: Annotated[Path, typer.Option(help="JSON.")] = Path("refit.json"),
) -> None:
    """Measure refits and copies in turns."""
    os.environ.update(ENVIRONMENT)
    import torch

    from jetrl_compile.integrations.vllm.engine import refit
    from jetrl_compile.kernels.launch_plans import plan_counts

    with tempfile.TemporaryDirectory() as folder:
        config = write_config(model, Path(folder), layers)
        llm = make_llm(
            folder,
            cache_bytes(config, 4, 256),
            quantization="jetrl",
            load_format="dummy",
            max_model_len=256,
            max_num_seqs=4,
            max_num_batched_tokens=256,
            enforce_eager=True,
        )
    weights = make_weights(config, seed=1)
    copies = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    into, sources = list(copies.values()), list(weights.values())

    def copy_each() -> None:
        for target, source in zip(into, sources, strict=True):
            target.copy_(source)

    ways: dict[str, Callable[[], object]] = {
        "refit": partial(refit, llm, weights),
        "copy_": copy_each,
        "_foreach_copy_": partial(torch._foreach_copy_, into, sources),
    }
    first = timed(ways["refit"])  # makes the plan of the push
    for call in ways.values():
        call()
        call()
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in ways.items():
            samples[name].append(timed(call))
    tensors = check(llm, weights)
    medians = {
        name: {key: median(one[key] for one in own) for key in ("total", "host")}
        for name, own in samples.items()
    }
    copy = min(medians["copy_"]["total"], medians["_foreach_copy_"]["total"])
    ratio = medians["refit"]["total"] / copy
    if profile or ratio > LIMIT:
        typer.echo(gpu_profile(ways["refit"]))
        typer.echo(host_profile(ways["refit"]))
    parameters = sum(tensor.numel() for tensor in sources)
    output.write_text(
        json.dumps(
            {
                "model": model,
                "layers": config.num_hidden_layers,
                "parameters": parameters,
                "first": first,
                "samples": samples,
                "ratio": ratio,
                "launches": plan_counts(),
            }
        )
    )
    typer.echo(f"{tensors} tensors compared, all bytes equal; {plan_counts()}")
    typer.echo(f"{'ms':24}{'total':>10}{'host':>10}{'least':>10}")
    for name, found in medians.items():
        least = min(one["total"] for one in samples[name])
        row = "".join(f"{value:10.2f}" for value in (*found.values(), least))
        typer.echo(f"{name:24}{row}")
    typer.echo(f"{'refit, first':24}{first['total']:10.2f}{first['host']:10.2f}")
    typer.echo(
        f"refit / copy, {parameters / 1e9:.2f}e9 parameters: {ratio:.2f} (at most "
        f"{LIMIT})"
    )


if __name__ == "__main__":
    typer.run(main)
