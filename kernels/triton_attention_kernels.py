"""The Triton kernel of attention in exact mode; `triton_attention` launches it.

One kernel for a prefill, a chunk of one, a decode step and a training batch: the tile
is always 64 rows by 64 keys, and keys are read in blocks of 64 from the first of a
sequence. Sums begin anew every 512 keys, and the parts are merged in ascending order:
by the program that made them, or, where a decode step has too few programs, by another
kernel. So a query's sums have one order, which depends on its position alone.
"""

from collections.abc import Callable
from typing import Any

from jetrl_compile.kernels.triton_common import (
    INTERPRETED,
    dot_bf16,
    jit,
    round_bf16,
    tl,
)

ROWS = 64  # of a tile: queries times the heads that share a key's head
KEYS = 64
CHUNK = 512


def _kernel(function: Callable[..., Any]) -> Any:
    """Make a kernel of which no other is compiled for another batch."""
    return jit(
        function,
        do_not_specialize=["max_pages", "lse_head", "chunks"],
        do_not_specialize_on_alignment=["max_pages"],
    )


@jit
def _key_offset(
    pages: tl.tensor,
    first: tl.tensor,
    key: tl.tensor,
    inside: tl.tensor,
    page_stride: tl.tensor,
    row_stride: tl.tensor,
    PAGE: tl.constexpr,
) -> tl.tensor:
    """Where keys begin: in pages of a cache, or one after the other."""
    if PAGE:
        page = tl.load(pages + key // PAGE, mask=inside, other=0).to(tl.int64)
        return page * page_stride + (key % PAGE) * row_stride
    return (first + key) * row_stride


@jit
def _block(
    tile_q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    pages: tl.tensor,
    first: tl.tensor,
    start: tl.tensor,
    keys: tl.tensor,
    position: tl.tensor,
    valid: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    scale: tl.tensor,
    k_page: tl.tensor,
    k_row: tl.tensor,
    v_page: tl.tensor,
    v_row: tl.tensor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Go on with a block of keys; a block that a query may not read changes nothing."""
    col = tl.arange(0, WIDTH)
    key = start + tl.arange(0, KEYS)
    inside = key < keys
    at_k = _key_offset(pages, first, key, inside, k_page, k_row, PAGE)
    at_v = _key_offset(pages, first, key, inside, v_page, v_row, PAGE)
    part_k = tl.load(
        k + at_k[None, :] + col[:, None],
        mask=inside[None, :] & (col < SIZE)[:, None],
        other=0.0,
    )
    scores = dot_bf16(tile_q, part_k) * scale
    allowed = (key[None, :] <= position[:, None]) & valid[:, None]
    scores = tl.where(allowed, scores, float("-inf"))
    above = tl.maximum(highest, tl.max(scores, axis=1))
    base = tl.where(above == float("-inf"), 0.0, above)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(highest - base)
    part_v = tl.load(
        v + at_v[:, None] + col[None, :],
        mask=inside[:, None] & (col < SIZE)[None, :],
        other=0.0,
    )
    product = dot_bf16(round_bf16(weights).to(tl.bfloat16), part_v)
    total = total * shrink + tl.sum(weights, axis=1)
    return above, total, acc * shrink[:, None] + product


@jit
def _part(
    tile_q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    pages: tl.tensor,
    first: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    keys: tl.tensor,
    position: tl.tensor,
    valid: tl.tensor,
    scale: tl.tensor,
    k_page: tl.tensor,
    k_row: tl.tensor,
    v_page: tl.tensor,
    v_row: tl.tensor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return maximum, sum of weights and sum of weighted values of some keys."""
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    if INTERPRETED:  # it takes no bounds of a range that are read from memory
        start = begin
        while start < end:
            highest, total, acc = _block(
                tile_q,
                k,
                v,
                pages,
                first,
                start,
                keys,
                position,
                valid,
                highest,
                total,
                acc,
                scale,
                k_page,
                k_row,
                v_page,
                v_row,
                SIZE,
                WIDTH,
                PAGE,
                KEYS,
            )
            start += KEYS
    else:
        for start in range(begin, end, KEYS):
            highest, total, acc = _block(
                tile_q,
                k,
                v,
                pages,
                first,
                start,
                keys,
                position,
                valid,
                highest,
                total,
                acc,
                scale,
                k_page,
                k_row,
                v_page,
                v_row,
                SIZE,
                WIDTH,
                PAGE,
                KEYS,
            )
    return highest, total, acc


@jit
def _factors(
    highest: tl.tensor, other: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the larger of two maxima, and what each of two parts is scaled by."""
    above = tl.maximum(highest, other)
    base = tl.where(above == float("-inf"), 0.0, above)
    return above, tl.exp2(highest - base), tl.exp2(other - base)


@jit
def _scaled_sum(
    a: tl.tensor, by_a: tl.tensor, b: tl.tensor, by_b: tl.tensor
) -> tl.tensor:
    """Return a by_a + b by_b, with one fused multiply-add in every kernel."""
    if INTERPRETED:  # it has none, and rounds alike everywhere
        return a * by_a + b * by_b
    return tl.fma(a, tl.broadcast_to(by_a, a.shape), b * by_b)


@jit
def _divided(acc: tl.tensor, total: tl.tensor) -> tl.tensor:
    divisor = tl.where(total > 0.0, total, 1.0)
    return round_bf16(tl.div_rn(acc, tl.broadcast_to(divisor, acc.shape)))


@_kernel
def attention_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    part_max: tl.tensor,
    part_sum: tl.tensor,
    starts_q: tl.tensor,
    starts_k: tl.tensor,
    lengths_k: tl.tensor,
    block_table: tl.tensor,
    max_pages: tl.tensor,
    scale: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_page: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_page: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    lse_head: tl.tensor,
    chunks: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """Compute a tile of queries of one sequence for the heads of one key head.

    `out` is (queries, HEADS, SIZE), contiguous; `lse` (HEADS, queries) or None. With
    SPLIT a program has one of `chunks` chunks of keys: `out` is (queries, HEADS,
    chunks, SIZE) in FP32, `part_max` and `part_sum` (queries, HEADS, chunks).
    """
    QUERIES: tl.constexpr = ROWS // GROUP
    sequence = tl.program_id(2)
    head = tl.program_id(1) % (HEADS // GROUP)
    chunk = tl.program_id(1) // (HEADS // GROUP)
    begin = tl.load(starts_q + sequence).to(tl.int64)
    queries = (tl.load(starts_q + sequence + 1) - begin).to(tl.int32)
    tile = tl.program_id(0) * QUERIES
    if tile >= queries:
        return
    if PAGE:
        first = begin * 0
        keys = tl.load(lengths_k + sequence)
    else:
        first = tl.load(starts_k + sequence).to(tl.int64)
        keys = (tl.load(starts_k + sequence + 1) - first).to(tl.int32)
    end = tl.minimum(keys - queries + tile + QUERIES, keys)
    if SPLIT and chunk * CHUNK >= end:
        return
    row = tl.arange(0, ROWS)
    query = tile + row // GROUP
    valid = (query < queries) & (row < QUERIES * GROUP)
    heads = head * GROUP + row % GROUP
    position = keys - queries + query
    col = tl.arange(0, WIDTH)
    inside = valid[:, None] & (col < SIZE)[None, :]
    at_q = (begin + query)[:, None] * q_row + heads[:, None] * q_head + col[None, :]
    tile_q = tl.load(q + at_q, mask=inside, other=0.0)
    pages = block_table + sequence.to(tl.int64) * max_pages
    k += head * k_head
    v += head * v_head
    at = (begin + query) * HEADS + heads
    if SPLIT:
        low = chunk * CHUNK
        highest, total, acc = _part(
            tile_q,
            k,
            v,
            pages,
            first,
            low,
            tl.minimum(low + CHUNK, end),
            keys,
            position,
            valid,
            scale,
            k_page,
            k_row,
            v_page,
            v_row,
            SIZE,
            WIDTH,
            PAGE,
            ROWS,
            KEYS,
        )
        at = at * chunks + chunk
        tl.store(part_max + at, highest, mask=valid)
        tl.store(part_sum + at, total, mask=valid)
        tl.store(out + at[:, None] * SIZE + col[None, :], acc, mask=inside)
    else:
        highest = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, WIDTH), tl.float32)
        low = 0
        while low < end:
            other, part, values = _part(
                tile_q,
                k,
                v,
                pages,
                first,
                low,
                tl.minimum(low + CHUNK, end),
                keys,
                position,
                valid,
                scale,
                k_page,
                k_row,
                v_page,
                v_row,
                SIZE,
                WIDTH,
                PAGE,
                ROWS,
                KEYS,
            )
            highest, mine, its = _factors(highest, other)
            total = _scaled_sum(total, mine, part, its)
            acc = _scaled_sum(acc, mine[:, None], values, its[:, None])
            low += CHUNK
        result = _divided(acc, total[:, None]).to(tl.bfloat16)
        tl.store(out + at[:, None] * SIZE + col[None, :], result, mask=inside)
        if lse is not None:
            logarithm = tl.log2(tl.where(total > 0.0, total, 1.0))
            at_lse = heads.to(tl.int64) * lse_head + begin + query
            natural = (highest + logarithm) * 0.6931471805599453
            tl.store(lse + at_lse, natural, mask=valid)


@_kernel
def merge_kernel(
    parts: tl.tensor,
    part_max: tl.tensor,
    part_sum: tl.tensor,
    out: tl.tensor,
    starts_q: tl.tensor,
    lengths_k: tl.tensor,
    chunks: tl.tensor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Merge the chunks of a query's head in ascending order, as `attention_kernel`."""
    sequence = tl.program_id(2)
    begin = tl.load(starts_q + sequence).to(tl.int64)
    queries = (tl.load(starts_q + sequence + 1) - begin).to(tl.int32)
    query = tl.program_id(0)
    if query >= queries:
        return
    end = tl.load(lengths_k + sequence) - queries + query + 1
    at = (begin + query) * HEADS + tl.program_id(1)
    col = tl.arange(0, WIDTH)
    inside = col < SIZE
    highest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((WIDTH,), tl.float32)
    one = tl.arange(0, 1)
    low = 0
    while low < end:
        place = at * chunks + low // CHUNK
        other = tl.load(part_max + place + one)
        part = tl.load(part_sum + place + one)
        values = tl.load(parts + place * SIZE + col, mask=inside, other=0.0)
        highest, mine, its = _factors(highest, other)
        total = _scaled_sum(total, mine, part, its)
        acc = _scaled_sum(acc, mine, values, its)
        low += CHUNK
    result = _divided(acc, total).to(tl.bfloat16)
    tl.store(out + at * SIZE + col, result, mask=inside)
