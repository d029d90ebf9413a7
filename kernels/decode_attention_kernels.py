"""The Triton kernel of a decoded step's attention; `decode_attention` launches it.

A program has one sequence and the query heads of one key head, or one of several parts
of its keys. The step's own key and value are given to it, and it writes them into the
cache if it is told where. It reads the others in blocks, and keeps maximum, sum of
weights and weighted sum in FP32; weights are rounded to BF16 for their product with
values, as FlashAttention does. Of several parts, the program that is done last merges
all, in ascending order, so that bits do not depend on which one that is.
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
from jetrl_compile.kernels.triton_overlap import after_the_last_kernel

ROWS = 16  # of a tile: the query heads of a key head, padded for the tensor cores


def _kernel(function: Callable[..., Any]) -> Any:
    """Make a kernel of which no other is compiled for another batch."""
    return jit(
        function,
        do_not_specialize=["table_stride"],
        do_not_specialize_on_alignment=["table_stride"],
    )


@jit
def _block(
    tile_q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    pages: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
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
    """Go on with keys start to start + KEYS, of which those below end are read."""
    col = tl.arange(0, WIDTH)
    key = start + tl.arange(0, KEYS)
    live = key < end
    page = tl.load(pages + key // PAGE, mask=live, other=0).to(tl.int64)
    inside = live[:, None] & (col < SIZE)[None, :]
    at = page * k_page + (key % PAGE) * k_row
    part_k = tl.load(k + at[:, None] + col[None, :], mask=inside, other=0.0)
    at = page * v_page + (key % PAGE) * v_row
    part_v = tl.load(v + at[:, None] + col[None, :], mask=inside, other=0.0)
    scores = dot_bf16(tile_q, tl.trans(part_k)) * scale
    scores = tl.where(live[None, :], scores, float("-inf"))
    above = tl.maximum(highest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - above[:, None])
    shrink = tl.exp2(highest - above)
    product = dot_bf16(round_bf16(weights).to(tl.bfloat16), part_v)
    total = total * shrink + tl.sum(weights, axis=1)
    return above, total, acc * shrink[:, None] + product


@_kernel
def decode_attention_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    part_max: tl.tensor,
    part_sum: tl.tensor,
    arrived: tl.tensor,
    lengths: tl.tensor,
    slots: tl.tensor,
    block_table: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    key_page: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    value_page: tl.tensor,
    value_row: tl.tensor,
    value_head: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
) -> None:
    """Compute GROUP heads of one query over one of up to SPLITS parts of its keys."""
    after_the_last_kernel()
    HEADS_K: tl.constexpr = HEADS // GROUP
    head = tl.program_id(0) % HEADS_K
    split = tl.program_id(0) // HEADS_K
    sequence = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + sequence)
    row = tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH)
    valid = row < GROUP
    within = col < SIZE
    inside = valid[:, None] & within[None, :]
    heads = head * GROUP + row
    at_out = (sequence * HEADS + heads)[:, None] * SIZE + col[None, :]
    chunk = tl.maximum(tl.cdiv(tl.cdiv(length, SPLITS), KEYS) * KEYS, LEAST)
    begin = split * chunk
    if begin >= length:
        if split == 0:  # no keys: a row of padding
            tl.store(out + at_out, tl.zeros((ROWS, WIDTH), tl.bfloat16), mask=inside)
        return
    at_q = sequence * q_row + heads[:, None] * q_head + col[None, :]
    tile_q = tl.load(q + at_q, mask=inside, other=0.0)

    last = begin + chunk >= length
    own = within & last
    own_k = tl.load(k + sequence * k_row + head * k_head + col, mask=own, other=0.0)
    own_v = tl.load(v + sequence * v_row + head * v_head + col, mask=own, other=0.0)
    if slots is not None:
        slot = tl.load(slots + sequence).to(tl.int64)
        page, place = slot // PAGE, slot % PAGE
        written = own & (slot >= 0)
        at_k = page * key_page + place * key_row + head * key_head
        tl.store(key_cache + at_k + col, own_k, mask=written)
        at_v = page * value_page + place * value_row + head * value_head
        tl.store(value_cache + at_v + col, own_v, mask=written)
    score = tl.sum(tile_q.to(tl.float32) * own_k.to(tl.float32)[None, :], axis=1)
    highest = tl.where(last, score * scale, float("-inf"))
    total = tl.where(last, tl.full((ROWS,), 1.0, tl.float32), 0.0)
    acc = tl.zeros((ROWS, WIDTH), tl.float32) + own_v.to(tl.float32)[None, :]

    pages = block_table + sequence * table_stride
    end = tl.minimum(begin + chunk, length - 1)
    keys = key_cache + head * key_head
    values = value_cache + head * value_head
    if INTERPRETED:  # it takes no bounds of a range that are read from memory
        start = begin
        while start < end:
            highest, total, acc = _block(
                tile_q,
                keys,
                values,
                pages,
                start,
                end,
                highest,
                total,
                acc,
                scale,
                key_page,
                key_row,
                value_page,
                value_row,
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
                keys,
                values,
                pages,
                start,
                end,
                highest,
                total,
                acc,
                scale,
                key_page,
                key_row,
                value_page,
                value_row,
                SIZE,
                WIDTH,
                PAGE,
                KEYS,
            )

    if SPLITS > 1:
        count = tl.cdiv(length, chunk)
        if count > 1:
            first = (sequence * HEADS + heads) * SPLITS
            tl.store(part_max + first + split, highest, mask=valid)
            tl.store(part_sum + first + split, total, mask=valid)
            at_part = (first + split)[:, None] * SIZE + col[None, :]
            tl.store(parts + at_part, acc, mask=inside)
            tl.debug_barrier()  # all threads have written before one says so
            counter = arrived + sequence * HEADS_K + head
            if tl.atomic_add(counter, 1, sem="acq_rel") < count - 1:
                return
            tl.store(counter, 0)
            number = tl.arange(0, SPLITS)
            there = valid[:, None] & (number < count)[None, :]
            at_max = first[:, None] + number[None, :]
            maxima = tl.load(
                part_max + at_max, mask=there, other=float("-inf"), cache_modifier=".cg"
            )
            sums = tl.load(
                part_sum + at_max, mask=there, other=0.0, cache_modifier=".cg"
            )
            highest = tl.max(maxima, axis=1)
            highest = tl.where(valid, highest, 0.0)
            total = tl.sum(sums * tl.exp2(maxima - highest[:, None]), axis=1)
            acc = tl.zeros((ROWS, WIDTH), tl.float32)
            for one in tl.static_range(SPLITS):
                here = valid & (one < count)
                peak = tl.load(
                    part_max + first + one,
                    mask=here,
                    other=float("-inf"),
                    cache_modifier=".cg",
                )
                at_one = (first + one)[:, None] * SIZE + col[None, :]
                part = tl.load(
                    parts + at_one,
                    mask=here[:, None] & within[None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                acc += part * tl.exp2(peak - highest)[:, None]
    divisor = tl.where(valid, total, 1.0)
    result = round_bf16(acc / divisor[:, None]).to(tl.bfloat16)
    tl.store(out + at_out, result, mask=inside)
