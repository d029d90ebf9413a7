"""The Triton kernel of attention in exact mode; `triton_attention` launches it.

One kernel for a prefill, a chunk of one, a decode step and a training batch: the tile
is always 64 rows by 64 keys, keys are read in blocks of 64 from the first of a
sequence, one after the other, and no split over keys is ever made. So a query's sums
have one order, which depends on its position alone.
"""

from collections.abc import Callable
from typing import Any

from jetrl_compile.kernels.triton_common import INTERPRETED, jit, round_bf16, tl

ROWS = 64  # of a tile: queries times the heads that share a key's head
KEYS = 64


def _kernel(function: Callable[..., Any]) -> Any:
    """Make a kernel of which no other is compiled for another batch."""
    return jit(
        function,
        do_not_specialize=["max_pages", "lse_head"],
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
def _dot(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    if INTERPRETED:  # it takes BF16 for integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


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
    scores = _dot(tile_q, part_k) * scale
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
    product = _dot(round_bf16(weights).to(tl.bfloat16), part_v)
    total = total * shrink + tl.sum(weights, axis=1)
    return above, total, acc * shrink[:, None] + product


@_kernel
def attention_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
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
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """Compute a tile of queries of one sequence for the heads of one key head.

    `out` is (queries, HEADS, SIZE), contiguous; `lse` (HEADS, queries) or None.
    """
    QUERIES: tl.constexpr = ROWS // GROUP
    sequence = tl.program_id(2)
    head = tl.program_id(1)
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
    row = tl.arange(0, ROWS)
    query = tile + row // GROUP
    valid = (query < queries) & (row < QUERIES * GROUP)
    heads = head * GROUP + row % GROUP
    position = keys - queries + query
    col = tl.arange(0, WIDTH)
    columns = (col < SIZE)[None, :]
    at_q = (begin + query)[:, None] * q_row + heads[:, None] * q_head + col[None, :]
    tile_q = tl.load(q + at_q, mask=valid[:, None] & columns, other=0.0)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    end = tl.minimum(keys - queries + tile + QUERIES, keys)
    pages = block_table + sequence.to(tl.int64) * max_pages
    if INTERPRETED:  # it takes no bounds of a range that are read from memory
        start = 0
        while start < end:
            highest, total, acc = _block(
                tile_q,
                k + head * k_head,
                v + head * v_head,
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
        for start in range(0, end, KEYS):
            highest, total, acc = _block(
                tile_q,
                k + head * k_head,
                v + head * v_head,
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
    divisor = tl.where(total > 0.0, total, 1.0)
    result = round_bf16(tl.div_rn(acc, tl.broadcast_to(divisor[:, None], acc.shape)))
    at_out = ((begin + query)[:, None] * HEADS + heads[:, None]) * SIZE + col[None, :]
    tl.store(out + at_out, result.to(tl.bfloat16), mask=valid[:, None] & columns)
    if lse is not None:
        natural = (highest + tl.log2(divisor)) * 0.6931471805599453
        at_lse = heads.to(tl.int64) * lse_head + begin + query
        tl.store(lse + at_lse, natural, mask=valid)
