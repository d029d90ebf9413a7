"""Attention by one Triton kernel, over packed sequences or over vLLM's paged cache.

A query has the same bits in a training batch, a prefill, a chunk and a decode step; see
`triton_attention_kernels`. Any head size up to 256, any number of heads that share a
key's head up to 64.
"""

import math

import torch
from torch import Tensor

from jetrl_compile.errors import PrecisionFlowError
from jetrl_compile.kernels.launch_recorder import launch_kernel
from jetrl_compile.kernels.triton_attention_kernels import (
    CHUNK,
    KEYS,
    ROWS,
    attention_kernel,
    merge_kernel,
)
from jetrl_compile.kernels.triton_device import multiprocessors, on_device

MAX_HEAD_SIZE = 256
PROGRAMS = 2  # a multiprocessor: with fewer, tiles are spread over chunks of keys


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Run causal attention of sequences that lie one after the other.

    Args:
        q: (T, Hq, D) in BF16, columns adjacent: all queries.
        k: (U, Hkv, D) in BF16: all keys.
        v: Like `k`.
        starts_q: (N + 1,), int32: where each sequence's queries begin, and the end.
        starts_k: The same of its keys. The last query of a sequence is its last key.
        longest: The most queries of a sequence, or more.
        scale: What q k^T is multiplied by.

    Returns:
        (T, Hq, D) in BF16, contiguous, and the log-sum-exp in FP32, (Hq, T), nats.

    Raises:
        PrecisionFlowError: A head is too long, or too many heads share a key's.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    _launch(q, k, v, out, lse, starts_q, starts_k, None, None, longest, scale)
    return out, lse


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor,
    starts_q: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    longest: int,
    scale: float,
    most_keys: int = 0,
) -> Tensor:
    """Run causal attention over a paged cache, as vLLM lays it out.

    Args:
        q: (T, Hq, D) in BF16: the queries of N sequences, one after the other.
        key_cache: (pages, page size, Hkv, D) in BF16, any strides but columns adjacent.
        value_cache: Like `key_cache`.
        out: (T, Hq, D) in BF16, contiguous; written.
        starts_q: (N + 1,), int32: where each sequence's queries begin, and the end.
        lengths: (N,), int32: keys of each sequence, those of its queries included.
        block_table: (N, pages), int32: the pages of each sequence, in order.
        longest: The most queries of a sequence, or more.
        scale: What q k^T is multiplied by.
        most_keys: The most keys that a sequence may have. Where one key head's queries
            are a single tile, and tiles are few, each tile is spread over chunks of
            keys; 0: never. Bits are the same.

    Returns:
        `out`.

    Raises:
        PrecisionFlowError: A head is too long, or too many heads share a key's.
    """
    _launch(
        q,
        key_cache,
        value_cache,
        out,
        None,
        starts_q,
        None,
        lengths,
        block_table,
        longest,
        scale,
        -(-most_keys // CHUNK),
    )
    return out


def unsupported(heads: int, heads_k: int, size: int, rows: int = ROWS) -> str | None:
    """Return why a kernel cannot run an attention, or None if it can.

    Args:
        heads: Of queries.
        heads_k: Of keys.
        size: Of a head.
        rows: Of a tile of queries.
    """
    if size > MAX_HEAD_SIZE:
        return f"a head of {size} is longer than {MAX_HEAD_SIZE}"
    if heads % heads_k or heads // heads_k > rows:
        return f"{heads} heads of queries on {heads_k} of keys: at most {rows} on one"
    return None


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    starts_q: Tensor,
    starts_k: Tensor | None,
    lengths: Tensor | None,
    block_table: Tensor | None,
    longest: int,
    scale: float,
    chunks: int = 0,
) -> None:
    heads, size = q.shape[1:]
    heads_k = k.shape[-2]
    why = unsupported(heads, heads_k, size)
    if why is not None:
        raise PrecisionFlowError(f"exact attention cannot run: {why}; use other heads")
    group = heads // heads_k
    sequences = starts_q.shape[0] - 1
    if not q.shape[0] or sequences < 1 or longest < 1:
        return
    paged = block_table is not None
    tiles = -(-longest // (ROWS // group))
    split = (
        chunks > 1
        and tiles == 1
        and heads_k * sequences < PROGRAMS * multiprocessors(q.device)
    )
    columns = heads_k * chunks if split else heads_k
    pages = (k.stride(0), v.stride(0)) if paged else (0, 0)
    width = max(16, 1 << (size - 1).bit_length())
    target, part_max, part_sum = out, out, out
    if split:
        shape = (q.shape[0], heads, chunks)
        target = torch.empty((*shape, size), dtype=torch.float32, device=q.device)
        part_max = torch.empty(shape, dtype=torch.float32, device=q.device)
        part_sum = torch.empty(shape, dtype=torch.float32, device=q.device)
    with on_device(q):
        launch_kernel(attention_kernel, (tiles, columns, sequences))(
            q,
            k,
            v,
            target,
            lse,
            part_max,
            part_sum,
            starts_q,
            starts_q if starts_k is None else starts_k,
            starts_q if lengths is None else lengths,
            starts_q if block_table is None else block_table,
            block_table.stride(0) if block_table is not None else 0,
            scale * math.log2(math.e),
            q.stride(0),
            q.stride(1),
            pages[0],
            k.stride(-3),
            k.stride(-2),
            pages[1],
            v.stride(-3),
            v.stride(-2),
            0 if lse is None else lse.stride(0),
            chunks,
            HEADS=heads,
            GROUP=group,
            SIZE=size,
            WIDTH=width,
            PAGE=k.shape[1] if paged else 0,
            ROWS=ROWS,
            KEYS=KEYS,
            CHUNK=CHUNK,
            SPLIT=split,
            num_warps=4,
        )
        if split:
            launch_kernel(merge_kernel, (longest, heads, sequences))(
                target,
                part_max,
                part_sum,
                out,
                starts_q,
                lengths,
                chunks,
                HEADS=heads,
                SIZE=size,
                WIDTH=width,
                CHUNK=CHUNK,
                num_warps=1,
            )
