"""Attention of a step in which each sequence has one query, over vLLM's paged cache.

FlashAttention 3 takes 13, 31 and 95 us of a layer of Qwen3-8B with 8, 64 and 256
sequences of 160 tokens, where reading their keys and values takes 1, 10 and 40
(docs/log.md, 2026-12-01). This kernel is made for that step alone. It is no part of
exact mode: a query's sums depend on how many sequences there are.
"""

import math

import torch
from torch import Tensor

from jetrl_compile.errors import PrecisionFlowError
from jetrl_compile.kernels import triton_attention
from jetrl_compile.kernels.decode_attention_kernels import (
    ROWS,
    decode_attention_kernel,
)
from jetrl_compile.kernels.launch_recorder import launch_kernel
from jetrl_compile.kernels.triton_device import multiprocessors, on_device, overlaps

MAX_SPLITS = 16  # parts of a sequence's keys
KEYS = 64  # of a block
LEAST = 128  # keys of a part
PROGRAMS = 4  # a multiprocessor: with fewer, keys are spread over programs
WARPS = 4
STAGES = 4  # of the loop over blocks, of which one reads pages


def unsupported(heads: int, heads_k: int, size: int) -> str | None:
    """Return why the kernel cannot run an attention, or None if it can.

    Args:
        heads: Of queries.
        heads_k: Of keys.
        size: Of a head.
    """
    return triton_attention.unsupported(heads, heads_k, size, ROWS)


def splits_of(programs: int, processors: int) -> int:
    """Return into how many parts the keys of a sequence are split, at most.

    Args:
        programs: Without splitting: sequences times heads of keys.
        processors: Streaming multiprocessors of the GPU.
    """
    wanted = max(1, PROGRAMS * processors // max(1, programs))
    return min(MAX_SPLITS, 1 << (wanted.bit_length() - 1))


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    slots: Tensor | None,
    arrived: Tensor,
    scale: float,
    splits: int = 0,
) -> Tensor:
    """Attend to a paged cache and a step's own keys and values, and write these there.

    Args:
        q: (N, Hq, D) in BF16, columns adjacent: one query of each of N sequences.
        k: (N, Hkv, D) in BF16, like `q`: its key.
        v: Like `k`: its value.
        key_cache: (pages, page size, Hkv, D) in BF16, any strides but columns adjacent;
            written if there are slots. Then no sequence may read a row that another one
            writes in this step.
        value_cache: Like `key_cache`.
        out: (N, Hq, D) in BF16, contiguous; written. Zeros where a length is 0.
        lengths: (N,), int32: keys of each sequence, this step's included; 0 for rows of
            padding.
        block_table: (N, most pages), int32, columns adjacent: each sequence's pages.
        slots: (N,), int64: page times page size plus row where each key is written;
            below 0: nowhere. None: somebody else writes all of them.
        arrived: N Hkv zeros or more, int32; all are zero again when it is done. Not
            made while a CUDA graph is captured, and not shared by calls that may run at
            the same time.
        scale: What q k^T is multiplied by.
        splits: Parts of a sequence's keys, at most, a power of 2; 0: by the GPU's size.

    Returns:
        `out`.

    Raises:
        PrecisionFlowError: A head is too long, too many heads share a key's, a tensor
            is not BF16, or `arrived` is too short.
    """
    sequences, heads, size = q.shape
    heads_k = k.shape[1]
    why = unsupported(heads, heads_k, size)
    if why is not None:
        raise PrecisionFlowError(f"decode attention cannot run: {why}; use another one")
    if any(x.dtype != torch.bfloat16 for x in (q, k, v, key_cache, value_cache, out)):
        raise PrecisionFlowError(
            f"decode attention got {q.dtype} queries, a cache of {key_cache.dtype} and "
            f"a result of {out.dtype}; it needs torch.bfloat16, use another one"
        )
    if arrived.numel() < sequences * heads_k:
        raise PrecisionFlowError(
            f"decode attention got {arrived.numel()} counters and needs {sequences} "
            f"sequences times {heads_k} heads; make more zeros"
        )
    if not sequences:
        return out
    splits = splits or splits_of(sequences * heads_k, multiprocessors(q.device))
    parts, part_max, part_sum = out, out, out
    if splits > 1:
        shape = (sequences, heads, splits)
        parts = torch.empty((*shape, size), dtype=torch.float32, device=q.device)
        part_max = torch.empty(shape, dtype=torch.float32, device=q.device)
        part_sum = torch.empty(shape, dtype=torch.float32, device=q.device)
    grid = (heads_k * splits, sequences)
    with on_device(q):
        launch_kernel(decode_attention_kernel, grid, overlaps(q.device))(
            q,
            k,
            v,
            key_cache,
            value_cache,
            out,
            parts,
            part_max,
            part_sum,
            arrived,
            lengths,
            slots,
            block_table,
            block_table.stride(0),
            scale * math.log2(math.e),
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            key_cache.stride(0),
            key_cache.stride(1),
            key_cache.stride(2),
            value_cache.stride(0),
            value_cache.stride(1),
            value_cache.stride(2),
            HEADS=heads,
            GROUP=heads // heads_k,
            SIZE=size,
            WIDTH=max(16, 1 << (size - 1).bit_length()),
            PAGE=key_cache.shape[1],
            ROWS=ROWS,
            KEYS=KEYS,
            SPLITS=splits,
            LEAST=LEAST,
            num_warps=WARPS,
            num_stages=STAGES,
        )
    return out
