"""Tiles of a matrix in Triton kernels: quantized straight and transposed.

Tiles are quads, as `triton_quads` reads them.
"""

from jetrl_compile.kernels.triton_common import (
    absmax,
    encode_words,
    jit,
    region_scale,
    tl,
)
from jetrl_compile.kernels.triton_quads import HALF, WIDTH, part_at
from jetrl_compile.kernels.triton_words import (
    column_amax,
    encode_pair,
    high,
    high_again,
    low,
    low_again,
    row_amaxes,
)


@jit
def _block_scale(
    quad: tl.tensor, FLOOR: tl.constexpr, UE8M0: tl.constexpr
) -> tl.tensor:
    even, odd = column_amax(quad)
    amax = tl.maximum(even, odd, propagate_nan=tl.PropagateNan.ALL)
    return region_scale(absmax(amax, 0), FLOOR, UE8M0)


@jit
def _row_scales(
    quad: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    rows: tl.tensor,
    scale_stride: tl.tensor,
    QUARTER: tl.constexpr,
    BLOCKS: tl.constexpr,
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
) -> tl.tensor:
    """Store the scales of a tile; return those of each tensor of the quad."""
    if BLOCKS:
        block = _block_scale(quad, FLOOR, UE8M0)
        tl.store(scales + row // WIDTH * scale_stride + col // WIDTH, block)
        made = (block, block, block, block)
    else:
        first, second = row_amaxes(quad[0], quad[1])
        third, fourth = row_amaxes(quad[2], quad[3])
        first = region_scale(first, FLOOR, UE8M0)
        second = region_scale(second, FLOOR, UE8M0)
        third = region_scale(third, FLOOR, UE8M0)
        fourth = region_scale(fourth, FLOOR, UE8M0)
        down = row + tl.arange(0, 4 * QUARTER)
        to = scales + (col // WIDTH).to(tl.int64) * scale_stride + down
        beside = tl.join(tl.join(first, third), tl.join(second, fourth))
        tl.store(to, beside.reshape(4 * QUARTER), mask=down < rows)
        made = (first[:, None], second[:, None], third[:, None], fourth[:, None])
    return made


@jit
def _column_scales(
    quad: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    cols: tl.tensor,
    scale_stride: tl.tensor,
    BLOCKS: tl.constexpr,
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
) -> tl.tensor:
    """Store the scales of a tile's transpose; return those of even and odd columns."""
    if BLOCKS:
        block = _block_scale(quad, FLOOR, UE8M0)
        tl.store(scales + col // WIDTH * scale_stride + row // WIDTH, block)
        made = (block, block)
    else:
        even, odd = column_amax(quad)
        even = region_scale(even, FLOOR, UE8M0)
        odd = region_scale(odd, FLOOR, UE8M0)
        right = col + tl.arange(0, WIDTH)
        to = scales + (row // WIDTH).to(tl.int64) * scale_stride + right
        tl.store(to, tl.interleave(even, odd), mask=right < cols)
        made = (even[None, :], odd[None, :])
    return made


@jit
def _store_codes(
    quad: tl.tensor,
    scale: tl.tensor,
    codes: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    code_stride: tl.tensor,
    QUARTER: tl.constexpr,
    FULL: tl.constexpr,
) -> None:
    """Encode a tile with what `_row_scales` returned, and store it."""
    pairs = codes.to(tl.pointer_type(tl.int16), bitcast=True)
    for part in tl.static_range(4):
        pair = encode_pair(low(quad[part]), high(quad[part]), scale[part])
        at, inside = part_at(
            pairs, row, col // 2, rows, cols // 2, code_stride // 2, QUARTER, part, HALF
        )
        if FULL:
            tl.store(at, pair)
        else:
            tl.store(at, pair, mask=inside)


@jit
def _store_turned(
    quad: tl.tensor,
    scale: tl.tensor,
    codes: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    code_stride: tl.tensor,
    FULL: tl.constexpr,
    AGAIN: tl.constexpr,
) -> None:
    """Encode a tile with what `_column_scales` returned; store the transpose."""
    a, b, c, d = quad
    even, odd = scale
    if AGAIN:
        evens = encode_words(
            low_again(a), low_again(b), low_again(c), low_again(d), even
        )
        odds = encode_words(
            high_again(a), high_again(b), high_again(c), high_again(d), odd
        )
    else:
        evens = encode_words(low(a), low(b), low(c), low(d), even)
        odds = encode_words(high(a), high(b), high(c), high(d), odd)
    word = tl.interleave(evens, odds)
    four = tl.arange(0, WIDTH // 4)[None, :]
    words = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    origin = (col.to(tl.int64) * code_stride + row) // 4
    down = tl.arange(0, WIDTH)[:, None]
    at = words + origin + (down * (code_stride // 4) + four)
    if FULL:
        tl.store(at, tl.trans(word))
    else:
        inside = (col + down < cols) & (row + 4 * four < rows)
        tl.store(at, tl.trans(word), mask=inside)


@jit
def quantize_quad(
    quad: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    code_stride: tl.tensor,
    scale_stride: tl.tensor,
    QUARTER: tl.constexpr,
    BLOCKS: tl.constexpr,
    FULL: tl.constexpr,
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
) -> None:
    """Quantize a tile and store its codes and scales.

    Args:
        quad: The tile; 0 outside of the matrix.
        codes: Pointer to the codes, row-major.
        scales: Pointer to the scales: column-major for groups, row-major for blocks.
        row: First row of the tile.
        col: First column of the tile.
        rows: Of the matrix.
        cols: Of the matrix.
        code_stride: Between rows of codes.
        scale_stride: Between columns (groups) or rows (blocks) of scales.
        QUARTER: Rows of the tile, divided by 4; 32 for blocks.
        BLOCKS: Whether regions are 128x128 blocks, not 1x128 groups.
        FULL: Whether all tiles lie inside of the matrix.
        FLOOR: As in `region_scale`.
        UE8M0: As in `region_scale`.
    """
    scale = _row_scales(
        quad, scales, row, col, rows, scale_stride, QUARTER, BLOCKS, FLOOR, UE8M0
    )
    _store_codes(quad, scale, codes, row, col, rows, cols, code_stride, QUARTER, FULL)


@jit
def quantize_turned(
    quad: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    code_stride: tl.tensor,
    scale_stride: tl.tensor,
    BLOCKS: tl.constexpr,
    FULL: tl.constexpr,
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
    AGAIN: tl.constexpr = False,
) -> None:
    """Quantize the transpose of a tile of 128x128 and store its codes and scales.

    Arguments are those of `quantize_quad`, of the matrix that is not transposed, but
    for `codes`, `scales` and their strides. Padding after the last code of a row, up to
    a multiple of 4, is written. AGAIN saves registers where the tile was encoded
    before: see `low_again`.
    """
    scale = _column_scales(
        quad, scales, row, col, cols, scale_stride, BLOCKS, FLOOR, UE8M0
    )
    _store_turned(quad, scale, codes, row, col, rows, cols, code_stride, FULL, AGAIN)


@jit
def quantize_twice(
    quad: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    codes_t: tl.tensor,
    scales_t: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    code_stride: tl.tensor,
    scale_stride: tl.tensor,
    code_stride_t: tl.tensor,
    scale_stride_t: tl.tensor,
    BLOCKS: tl.constexpr,
    BLOCKS_T: tl.constexpr,
    FULL: tl.constexpr,
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
) -> None:
    """Run `quantize_quad` and `quantize_turned` on a tile of 128x128, all scales first.

    One chain of dependent instructions then fills the gaps of the other one; it takes
    more registers than one after the other.
    """
    scale = _row_scales(
        quad, scales, row, col, rows, scale_stride, WIDTH // 4, BLOCKS, FLOOR, UE8M0
    )
    scale_t = _column_scales(
        quad, scales_t, row, col, cols, scale_stride_t, BLOCKS_T, FLOOR, UE8M0
    )
    _store_codes(
        quad, scale, codes, row, col, rows, cols, code_stride, WIDTH // 4, FULL
    )
    _store_turned(
        quad, scale_t, codes_t, row, col, rows, cols, code_stride_t, FULL, True
    )
