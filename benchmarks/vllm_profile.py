"""The GPU's kernels in a layer of vLLM: while it decodes, and while it reads prompts.

    python benchmarks/vllm_profile.py qwen3-8b --sequences 8 --sequences 256

Needs a Hopper GPU and vLLM 0.24. Each engine is a process of its own, with a few layers
and random weights; they are profiled in turns. A layer is what runs from an attention
kernel to the next one. Prints for each kernel the median of its time and of the gap
behind it, in us (below 0 where kernels overlap), and writes all of it as JSON.
"""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from vllm_engines import Failed, Worker, cache_bytes, make_llm, wait_all, write_config
from vllm_throughput import ENGINES, PROMPT

from jetrl_compile.bench.models import BUILT_IN

ATTENTION = ("FlashAttnFwdSm90", "decode_attention_kernel")
LONGEST = 12  # kernels between the layers of two steps that are printed
STEPS = 24  # that are generated while the profiler is on
Event = tuple[int, int, str]  # start and length in ns, name


def start(name: str, folder: str, sequences: list[int], cache: int) -> Any:
    """Load an engine; return what gives the kernels of (sequences, tokens)."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    from vllm import SamplingParams

    given = dict(ENGINES[name])
    llm = make_llm(
        folder,
        cache,
        load_format="dummy",
        max_model_len=2 * PROMPT,
        max_num_seqs=max(sequences),
        max_num_batched_tokens=8192,
        compilation_config={
            "cudagraph_capture_sizes": sorted(sequences),
            **given.pop("compilation_config", {}),
        },
        **given,
    )
    generator = torch.Generator().manual_seed(0)
    size = (max(sequences), PROMPT)
    ids = torch.randint(10, 1000, size, generator=generator).tolist()

    def run(count: int, tokens: int) -> None:
        how = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": row} for row in ids[:count]]
        llm.generate(prompts, how, use_tqdm=False)
        torch.cuda.synchronize()

    def kernels(count: int, tokens: int) -> list[Event]:
        run(count, tokens)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            run(count, tokens)
        profiler: Any = found.profiler
        events = profiler.kineto_results.events()
        return sorted(
            (e.start_ns(), e.duration_ns(), e.name())
            for e in events
            if "CUDA" in str(e.device_type()) and e.duration_ns() > 0
        )

    return kernels


def attends(event: Event) -> bool:
    """Return whether a kernel is the one of attention."""
    return any(name in event[2] for name in ATTENTION)


def layers(events: Sequence[Event]) -> list[list[Event]]:
    """Return layers of the most frequent length, each with the event behind it."""
    at = [place for place, event in enumerate(events) if attends(event)]
    spans = list(pairwise(at))
    if not spans:
        return []
    length = Counter(b - a for a, b in spans).most_common(1)[0][0]
    return [list(events[a : b + 1]) for a, b in spans if b - a == length]


def steps(events: Sequence[Event], kept: int, layer: float) -> dict[str, Any] | None:
    """Return medians of a step in us: all of it, without a kernel, outside of layers.

    Beside them are the longest kernels between the last attention of a step and the
    first one of the next.

    Args:
        events: Of a run that decodes.
        kept: Attentions of a step.
        layer: Median of a layer in us.
    """
    at = [place for place, event in enumerate(events) if attends(event)]
    found = []
    for first in range(0, len(at) - kept, kept):
        part = events[at[first] : at[first + kept] + 1]
        gaps = (b[0] - a[0] - a[1] for a, b in pairwise(part))
        found.append((part[-1][0] - part[0][0], sum(max(gap, 0) for gap in gaps)))
    if not found:
        return None
    whole, idle = (median(one[i] for one in found) / 1e3 for i in (0, 1))
    between = events[at[len(at) - kept - 1] + 1 : at[len(at) - kept]]
    longest = sorted(between, key=lambda event: -event[1])[:LONGEST]
    return {
        "step": whole,
        "idle": idle,
        "outside": whole - kept * layer,
        "longest": [(short(name), length / 1e3) for _, length, name in longest],
    }


def rows(found: list[list[Event]]) -> list[dict[str, Any]]:
    """Return name, time and gap of each kernel of a layer, in us."""
    made = []
    for place in range(len(found[0]) - 1):
        pairs = [(layer[place], layer[place + 1]) for layer in found]
        made.append(
            {
                "kernel": short(pairs[0][0][2]),
                "us": median(one[1] for one, _ in pairs) / 1e3,
                "gap": median(b[0] - a[0] - a[1] for a, b in pairs) / 1e3,
            }
        )
    return made


def short(name: str) -> str:
    """Return a kernel's name without namespaces that many have."""
    return re.sub(r"void |at::native::|cutlass::|deep_gemm::", "", name)[:70]


def report(
    title: str, events: Sequence[Event], kept: int, say: Callable[[str], None]
) -> Any:
    """Print a layer and a step, and return them as data."""
    found = layers(events)
    if not found:
        say(f"{title}: no two attentions of {ATTENTION} were seen")
        return None
    span = median(layer[-1][0] - layer[0][0] for layer in found) / 1e3
    table = rows(found)
    busy = sum(row["us"] for row in table)
    say(f"{title}: {span:.1f} us a layer, kernels {busy:.1f}, {len(found)} layers")
    for row in table:
        say(f"  {row['us']:9.2f} {row['gap']:8.2f}  {row['kernel']}")
    step = steps(events, kept, span)
    if step is not None:
        say(
            f"  a step: {step['step']:.0f} us, {step['idle']:.0f} without a kernel, "
            f"{step['outside']:.0f} outside of {kept} layers"
        )
        for name, length in step["longest"]:
            say(f"  {length:9.2f}           {name}")
    return {"span": span, "kernels": table, "layers": len(found), "step": step}


def main(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join(BUILT_IN)}.")],
    sequences: Annotated[list[int], typer.Option(help="Sequences at a time.")],
    engine: Annotated[list[str] | None, typer.Option(help="Engines.")] = None,
    kept: Annotated[int, typer.Option("--layers", help="Layers to keep.")] = 6,
    logs: Annotated[Path | None, typer.Option(help="Folder of logs.")] = None,
    output: Annotated[Path, typer.Option(help="JSON.")] = Path("profile.json"),
) -> None:
    """Profile engines in turns."""
    names = engine or ["bf16", "fp8_per_block", "jetrl"]
    for name in names:
        if name not in ENGINES:
            raise typer.BadParameter(f"{name} is none of {', '.join(ENGINES)}")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(model, Path(folder), kept)
        cache = cache_bytes(config, max(sequences), 2 * PROMPT)
        workers = []
        for name in names:
            log = logs / f"profile_{model}_{name}.log" if logs else None
            args = (name, folder, sequences, cache)
            workers.append(Worker(name, start, *args, log=log))
        for worker in wait_all(workers, typer.echo):
            for count in sequences:
                # One token: only prompts are read, in steps of up to 8192 tokens.
                for what, tokens in (("prompts", 1), ("decoding", STEPS)):
                    title = f"{worker.name}, {count} sequences, {what}"
                    try:
                        events = worker.ask(count, tokens)
                    except Failed as error:
                        typer.echo(str(error))
                        break
                    results[title] = report(title, events, kept, typer.echo)
        for worker in workers:
            worker.stop()
    output.write_text(json.dumps({"model": model, "layers": kept, "found": results}))


if __name__ == "__main__":
    typer.run(main)
