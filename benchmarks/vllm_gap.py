"""Gap of log-probs between vLLM and a trainer, by length: three recipes, exact mode.

    python benchmarks/vllm_gap.py MODEL_DIR --length 512 --length 8192

MODEL_DIR holds a Hugging Face model with real weights, such as SmolLM2-135M. Needs a
Hopper GPU and vLLM 0.24. Three engines sample at temperature 1 from random prompts, in
processes of their own at the same time: with quantization "jetrl", in BF16, and in
exact mode.
Trainers with compiled layers score the sequences:

    jetrl           vLLM in FP8, the trainer with the same flow
    rollout_only    the same samples, the trainer in BF16
    bf16            vLLM and the trainer in BF16
    exact           jetrl in exact mode, on both sides

Each sequence is sampled once, to the longest length; a row of the table is of the
sequences as they were when they had that many tokens, the prompt included. Prints k3_kl
and the mean of |gap| in nats, and writes also those of the tokens between two lengths.
"""

import gc
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from vllm_engines import ENVIRONMENT, Worker, cache_bytes, make_llm, wait_all
from vllm_warm_up import Wanted, warm_up

from jetrl_compile.kernels.deep_gemm_tiles import token_steps

RECIPES = ("jetrl", "rollout_only", "bf16", "exact")
FACTOR = 20  # by which jetrl's k3_kl must be below rollout_only's
PROMPT = 8


def start(folder: str, recipe: str, sequences: int, length: int) -> Callable[..., Any]:
    """Load an engine; return what samples."""
    import torch
    from transformers import AutoConfig

    from jetrl_compile.integrations.vllm.exact import exact_settings, prepare_exact
    from jetrl_compile.integrations.vllm.log_probs import sample

    config = AutoConfig.from_pretrained(folder)
    settings = {} if recipe == "bf16" else {"quantization": "jetrl"}
    if recipe == "exact":
        settings |= exact_settings()
    llm = make_llm(
        folder,
        cache_bytes(config, sequences, length),
        dtype="bfloat16",
        max_model_len=length,
        max_num_seqs=sequences,
        max_num_batched_tokens=length,
        compilation_config={"cudagraph_capture_sizes": [sequences]},
        **settings,
    )
    generator = torch.Generator().manual_seed(0)
    size = (sequences, PROMPT)
    prompts = torch.randint(config.vocab_size, size, generator=generator).tolist()

    kernel = ""
    if recipe == "exact":
        kernel = llm.apply_model(partial(prepare_exact, config))[0]

    def run() -> tuple[Any, ...]:
        sample(llm, prompts, 4, seed=None)
        begin = time.perf_counter()
        made = sample(llm, prompts, length - PROMPT, seed=None)
        seconds = time.perf_counter() - begin
        return made.tokens, made.prompts, made.log_probs.numpy(), seconds, kernel

    return run


def score(folder: str, recipe: str, sampled: Any, kernel: str = "") -> Any:
    """Return the log-probs that a trainer with compiled layers gives, (B, T)."""
    import torch

    from jetrl_compile.exact_attention import use_exact_attention
    from jetrl_compile.integrations.vllm.log_probs import trainer_log_probs
    from jetrl_compile.layers import compile_layers
    from jetrl_compile.model_loading import load_causal_model

    trainer: Any = load_causal_model(Path(folder)).to("cuda", torch.bfloat16)
    if recipe == "exact":
        use_exact_attention(trainer)
        compile_layers(trainer, recipe="jetrl", exact=True)
    else:
        compile_layers(trainer, recipe=recipe)
    found = trainer_log_probs(trainer, sampled, kernel)
    del trainer
    gc.collect()
    torch.cuda.empty_cache()
    return found


def metrics(sampled: Any, train: Any, low: int, high: int) -> dict[str, float]:
    """Return the gap of the tokens at positions low to high, prompts included."""
    import torch

    from jetrl_compile.integrations.vllm.log_probs import gap_metrics

    cut = sampled.first(high)
    before = sampled.first(low).mask if low else cut.mask[:, :0]
    cut.log_probs[:, : before.shape[1]][before] = float("nan")
    own = train[:, : cut.log_probs.shape[1]]
    found = gap_metrics(cut, own)
    gap = (own - cut.log_probs).abs()[cut.mask].double()
    assert torch.isfinite(gap).all()
    return {
        "k3_kl": found["rollout_corr/k3_kl"],
        "mean_gap": float(gap.mean()),
        "max_gap": float(gap.max()),
        "tokens": int(cut.mask.sum()),
    }


def table(found: dict[str, dict[int, dict[str, float]]], lengths: list[int]) -> str:
    """Return a row a length, and whether what is asked for holds, with and without."""
    head = "".join(f"{recipe + ' ' + key:>24}" for recipe in RECIPES for key in _KEYS)
    lines = [f"{'length':>8}{head}{'rollout_only/jetrl':>20}{'bf16/jetrl':>12}"]
    holds = {"jetrl": True, "exact": True}
    for length in lengths:
        rows = {recipe: found[recipe][length] for recipe in RECIPES}
        numbers = "".join(
            f"{rows[recipe][key]:24.3e}" for recipe in RECIPES for key in _KEYS
        )
        k3 = {recipe: row["k3_kl"] for recipe, row in rows.items()}
        for recipe in holds:
            holds[recipe] &= k3[recipe] <= min(k3["rollout_only"] / FACTOR, k3["bf16"])
        ratios = [k3[name] / max(k3["jetrl"], 1e-300) for name in RECIPES[1:3]]
        lines.append(f"{length:8}{numbers}{ratios[0]:20.1f}{ratios[1]:12.2f}")
    what = f"at most 1/{FACTOR} of rollout_only's k3_kl, and at most bf16's"
    for recipe, fine in holds.items():
        lines.append(f"{recipe}: {what}: {'holds' if fine else 'DOES NOT HOLD'}")
    return "\n".join(lines)


_KEYS = ("k3_kl", "mean_gap")


def main(
    folder: Annotated[Path, typer.Argument(help="A model with weights.")],
    length: Annotated[list[int] | None, typer.Option(help="Tokens.")] = None,
    sequences: Annotated[int, typer.Option(help="Sequences of each engine.")] = 32,
    logs: Annotated[Path | None, typer.Option(help="Folder of logs.")] = None,
    output: Annotated[Path, typer.Option(help="JSON.")] = Path("gap.json"),
) -> None:
    """Sample, score, and print the table."""
    os.environ.update(ENVIRONMENT)
    lengths = sorted(length or [512, 1024, 2048, 4096, 8192])
    if lengths[0] <= PROMPT:
        raise typer.BadParameter(f"lengths must exceed {PROMPT} tokens, the prompt")
    counts = [sequences, PROMPT * sequences, lengths[-1]]
    counts += token_steps(1, lengths[-1])
    warm_up(Wanted(folder, counts, exact=True), say=typer.echo)
    workers = []
    for recipe in ("jetrl", "bf16", "exact"):
        args = (str(folder), recipe, sequences, lengths[-1])
        log = logs / f"gap_{recipe}.log" if logs else None
        workers.append(Worker(recipe, start, *args, log=log))
    ready = wait_all(workers, typer.echo)
    if len(ready) < len(workers):
        for worker in ready:
            worker.stop()
        raise typer.Exit(1)
    for worker in workers:
        worker.send()
    import torch

    from jetrl_compile.integrations.vllm.log_probs import Sampled

    samples, kernel = {}, ""
    for worker in workers:
        tokens, prompts, log_probs, seconds, own = worker.receive()
        kernel = own or kernel
        samples[worker.name] = Sampled(tokens, prompts, torch.from_numpy(log_probs))
        typer.echo(f"{worker.name}: sampled in {seconds:.0f} s")
        worker.stop()
    pairs = {
        "jetrl": "jetrl",
        "rollout_only": "jetrl",
        "bf16": "bf16",
        "exact": "exact",
    }
    found: dict[str, dict[int, dict[str, float]]] = {}
    between: dict[str, dict[int, dict[str, float]]] = {}
    for recipe, engine in pairs.items():
        begin = time.perf_counter()
        own = kernel if recipe == "exact" else ""
        train = score(str(folder), recipe, samples[engine], own)
        typer.echo(f"{recipe}: scored in {time.perf_counter() - begin:.0f} s")
        given = (samples[engine], train)
        found[recipe] = {high: metrics(*given, 0, high) for high in lengths}
        bounds = zip([0, *lengths], lengths, strict=False)
        between[recipe] = {high: metrics(*given, low, high) for low, high in bounds}
    everything = {"to": found, "between": between, "sequences": sequences}
    output.write_text(json.dumps({"model": str(folder), **everything}, indent=1))
    typer.echo(table(found, lengths))


if __name__ == "__main__":
    typer.run(main)
