"""Attention of a decoded step: the project's kernel and vLLM's FlashAttention 3.

    python benchmarks/decode_attention.py --sequences 8 --sequences 64 --keys 256

Needs a Hopper GPU and vLLM 0.24. Heads are those of Qwen3-8B. Each side writes the
step's keys and values into its cache, too, and runs as one CUDA graph over several
layers, whose caches are larger than the L2 cache; FlashAttention has its schedule made
before, as vLLM does. Replays are timed in turns; prints medians of a layer in us, the
time that its bytes take at 4.25 TB/s, and the largest difference of the two results.
"""

from collections.abc import Callable
from statistics import median
from typing import Annotated

import torch
import typer
from torch import Tensor

from jetrl_compile.kernels.decode_attention import decode_attention

HEADS, HEADS_K, SIZE, PAGE = 32, 8, 128, 16
BYTES = 600e6  # of all layers' caches, at least: ten times the L2 cache
MOST_LAYERS = 36
FA3_SPLITS = 32  # vLLM's default for CUDA graphs
BYTES_US = 4.25e6  # a microsecond


class Case:
    """Sequences with as many keys each, or with lengths from 1 to 2 keys - 1.

    Attributes:
        q: (N, heads, size).
        layers: Caches.
        lengths: (N,).
        table: (N, pages).
        slots: (N,).
    """

    def __init__(self, sequences: int, keys: int, spread: bool) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        most = 2 * keys if spread else keys
        pages = -(-most // PAGE)
        counts = torch.full((sequences,), keys)
        if spread:
            counts = torch.linspace(1, most - 1, sequences).round().long()
        size = 2 * HEADS_K * SIZE * 2 * PAGE * pages * sequences
        layers = min(MOST_LAYERS, max(2, round(BYTES / size)))
        width = (HEADS + 2 * HEADS_K) * SIZE
        qkv = torch.randn((sequences, width), generator=generator, device="cuda")
        parts = qkv.bfloat16().split([HEADS * SIZE, HEADS_K * SIZE, HEADS_K * SIZE], 1)
        self.q, self.k, self.v = (x.view(sequences, -1, SIZE) for x in parts)
        shape = (pages * sequences, 2, PAGE, HEADS_K, SIZE)
        self.layers = [
            torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
            for _ in range(layers)
        ]
        order = torch.randperm(pages * sequences, generator=generator, device="cuda")
        self.table = order.view(sequences, pages).int()
        self.lengths = counts.int().cuda()
        at = counts.cuda() - 1
        row = torch.arange(sequences, device="cuda")
        self.slots = self.table[row, at // PAGE].long() * PAGE + at % PAGE
        self.bytes = 2 * HEADS_K * SIZE * 2 * int(counts.sum())
        self.outs = torch.empty(
            (layers, sequences, HEADS, SIZE), device="cuda", dtype=torch.bfloat16
        )


def own(case: Case) -> Callable[[], None]:
    """Return what runs all layers with the project's kernel."""
    count = case.q.shape[0] * HEADS_K
    arrived = torch.zeros(count, dtype=torch.int32, device="cuda")

    def run() -> None:
        for cache, out in zip(case.layers, case.outs, strict=True):
            keys, values = cache.unbind(1)
            decode_attention(
                case.q,
                case.k,
                case.v,
                keys,
                values,
                out,
                case.lengths,
                case.table,
                case.slots,
                arrived,
                SIZE**-0.5,
            )

    return run


def fa3(case: Case) -> Callable[[], None]:
    """Return what runs all layers as vLLM does."""
    from vllm._custom_ops import reshape_and_cache_flash
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    sequences = case.q.shape[0]
    starts = torch.arange(sequences + 1, device="cuda", dtype=torch.int32)
    most = case.table.shape[1] * PAGE
    one = torch.ones((), device="cuda")
    schedule = get_scheduler_metadata(
        batch_size=sequences,
        max_seqlen_q=1,
        max_seqlen_k=most,
        num_heads_q=HEADS,
        num_heads_kv=HEADS_K,
        headdim=SIZE,
        cache_seqlens=case.lengths,
        qkv_dtype=torch.bfloat16,
        cu_seqlens_q=starts,
        page_size=PAGE,
        causal=True,
        window_size=(-1, -1),
        num_splits=FA3_SPLITS,
    )

    def run() -> None:
        for cache, out in zip(case.layers, case.outs, strict=True):
            keys, values = cache.unbind(1)
            reshape_and_cache_flash(
                case.k, case.v, keys, values, case.slots, "auto", one, one
            )
            flash_attn_varlen_func(
                q=case.q,
                k=keys,
                v=values,
                out=out,
                cu_seqlens_q=starts,
                max_seqlen_q=1,
                seqused_k=case.lengths,
                max_seqlen_k=most,
                softmax_scale=SIZE**-0.5,
                causal=True,
                block_table=case.table,
                scheduler_metadata=schedule,
                fa_version=3,
                num_splits=FA3_SPLITS,
            )

    return run


def graph(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture a run, once it is warm."""
    run()
    torch.cuda.synchronize()
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        run()
    made.replay()
    torch.cuda.synchronize()
    return made


def timed(made: torch.cuda.CUDAGraph, layers: int) -> float:
    """Return us a layer."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(3):
        made.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / layers / 3


def difference(case: Case, runs: list[Callable[[], None]]) -> float:
    """Return the largest difference between two runs' results."""
    results: list[Tensor] = []
    for run in runs:
        case.outs.fill_(float("nan"))
        run()
        results.append(case.outs.float().clone())
    return (results[0] - results[1]).abs().max().item()


def main(
    sequences: Annotated[list[int], typer.Option(help="Sequences of a step.")],
    keys: Annotated[list[int], typer.Option(help="Keys of each.")],
    spread: Annotated[bool, typer.Option(help="Lengths from 1 to 2 keys - 1.")] = False,
    rounds: Annotated[int, typer.Option(help="Samples of each.")] = 9,
) -> None:
    """Measure both in turns."""
    print("sequences   keys  memory     fa3     own  difference")
    for count in sequences:
        for length in keys:
            case = Case(count, length, spread)
            runs = [fa3(case), own(case)]
            apart = difference(case, runs)
            graphs = [graph(run) for run in runs]
            samples = [
                [timed(one, len(case.layers)) for one in graphs] for _ in range(rounds)
            ]
            times = [median(column) for column in zip(*samples, strict=True)]
            print(
                f"{count:9} {length:6} {case.bytes / BYTES_US:7.1f} "
                f"{times[0]:7.1f} {times[1]:7.1f}  {apart:10.2e}"
            )
            del graphs, case
            torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
