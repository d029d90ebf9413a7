"""The Triton kernels of SiLU*mul and its backward; `triton_silu` launches them.

A tile of 128 columns of each input is read once, and every output is made from it.
The rounding points are those of `reference_fused`.
"""

from functools import partial

from jetrl_compile.kernels.triton_common import jit, tl
from jetrl_compile.kernels.triton_launch import kernel
from jetrl_compile.kernels.triton_overlap import after_the_last_kernel
from jetrl_compile.kernels.triton_quads import (
    WIDTH,
    load_codes,
    load_quad,
    store_quad,
    tile_origin,
)
from jetrl_compile.kernels.triton_silu_math import silu_mul, silu_mul_backward
from jetrl_compile.kernels.triton_tiles import (
    quantize_quad,
    quantize_turned,
    quantize_twice,
)


@kernel
def forward_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    codes_t: tl.tensor,
    scales_t: tl.tensor,
    kept: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    code_stride: tl.tensor,
    scale_stride: tl.tensor,
    code_stride_t: tl.tensor,
    scale_stride_t: tl.tensor,
    QUARTER: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_T: tl.constexpr,
    FULL: tl.constexpr,
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
) -> None:
    """Run `triton_silu.silu_mul_quantize` on a tile."""
    after_the_last_kernel()
    row, col = tile_origin(tl.program_id(0), cols, QUARTER)
    g = load_quad(gate, row, col, rows, cols, gate_stride, QUARTER, FULL)
    u = load_quad(up, row, col, rows, cols, up_stride, QUARTER, FULL)
    y = (
        silu_mul(g[0], u[0]),
        silu_mul(g[1], u[1]),
        silu_mul(g[2], u[2]),
        silu_mul(g[3], u[3]),
    )
    if kept is not None:
        store_quad(y, kept, row, col, rows, cols, cols, QUARTER)
    quantize_quad(
        y,
        codes,
        scales,
        row,
        col,
        rows,
        cols,
        code_stride,
        scale_stride,
        QUARTER,
        BLOCKS,
        FULL,
        FLOOR,
        UE8M0,
    )
    if codes_t is not None:
        quantize_turned(
            y,
            codes_t,
            scales_t,
            row,
            col,
            rows,
            cols,
            code_stride_t,
            scale_stride_t,
            BLOCKS_T,
            FULL,
            FLOOR,
            UE8M0,
            AGAIN=True,
        )


@jit
def _load_kept(
    pointer: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    stride: tl.tensor,
    scale_stride: tl.tensor,
    QUARTER: tl.constexpr,
    FULL: tl.constexpr,
) -> tl.tensor:
    """Load a tile in BF16, or codes and the scales of their 1x128 groups."""
    if scales is None:
        quad = load_quad(pointer, row, col, rows, cols, stride, QUARTER, FULL)
    else:
        quad = load_codes(
            pointer, scales, row, col, rows, cols, stride, scale_stride, QUARTER, FULL
        )
    return quad


@jit
def _backward_tile(
    tile: tl.tensor,
    dy: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    gate_scales: tl.tensor,
    up_scales: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    codes_t: tl.tensor,
    scales_t: tl.tensor,
    codes_x: tl.tensor,
    scales_x: tl.tensor,
    kept: tl.tensor,
    kept_x: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    dy_stride: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    gate_scale_stride: tl.tensor,
    up_scale_stride: tl.tensor,
    code_stride: tl.tensor,
    scale_stride: tl.tensor,
    code_stride_t: tl.tensor,
    scale_stride_t: tl.tensor,
    scale_stride_x: tl.tensor,
    BLOCKS: tl.constexpr,
    BLOCKS_T: tl.constexpr,
    BLOCKS_X: tl.constexpr,
    FULL: tl.constexpr,
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
) -> None:
    """Run `triton_silu.silu_mul_backward_quantize` on a tile of 128x128."""
    QUARTER: tl.constexpr = WIDTH // 4
    row, col = tile_origin(tile, cols, QUARTER)
    g = _load_kept(
        gate,
        gate_scales,
        row,
        col,
        rows,
        cols,
        gate_stride,
        gate_scale_stride,
        QUARTER,
        FULL,
    )
    u = _load_kept(
        up, up_scales, row, col, rows, cols, up_stride, up_scale_stride, QUARTER, FULL
    )
    d = load_quad(dy, row, col, rows, cols, dy_stride, QUARTER, FULL)
    y0, dgate0, dup0 = silu_mul_backward(d[0], g[0], u[0])
    y1, dgate1, dup1 = silu_mul_backward(d[1], g[1], u[1])
    y2, dgate2, dup2 = silu_mul_backward(d[2], g[2], u[2])
    y3, dgate3, dup3 = silu_mul_backward(d[3], g[3], u[3])
    y = (y0, y1, y2, y3)
    if kept_x is not None:
        store_quad(y, kept_x, row, col, rows, cols, cols, QUARTER)
    quantize_turned(
        y,
        codes_x,
        scales_x,
        row,
        col,
        rows,
        cols,
        code_stride_t,
        scale_stride_x,
        BLOCKS_X,
        FULL,
        FLOOR,
        UE8M0,
        AGAIN=True,
    )
    for half in tl.static_range(2):
        if half == 0:
            gradient = (dgate0, dgate1, dgate2, dgate3)
        else:
            gradient = (dup0, dup1, dup2, dup3)
        at = col + half * cols
        if kept is not None:
            store_quad(gradient, kept, row, at, rows, 2 * cols, 2 * cols, QUARTER)
        quantize_twice(
            gradient,
            codes,
            scales,
            codes_t,
            scales_t,
            row,
            at,
            rows,
            2 * cols,
            code_stride,
            scale_stride,
            code_stride_t,
            scale_stride_t,
            BLOCKS,
            BLOCKS_T,
            FULL,
            FLOOR,
            UE8M0,
        )


@partial(kernel, unaligned=["codes"])
def backward_kernel(
    dy: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    gate_scales: tl.tensor,
    up_scales: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    codes_t: tl.tensor,
    scales_t: tl.tensor,
    codes_x: tl.tensor,
    scales_x: tl.tensor,
    kept: tl.tensor,
    kept_x: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    dy_stride: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    gate_scale_stride: tl.tensor,
    up_scale_stride: tl.tensor,
    code_stride: tl.tensor,
    scale_stride: tl.tensor,
    code_stride_t: tl.tensor,
    scale_stride_t: tl.tensor,
    scale_stride_x: tl.tensor,
    BLOCKS: tl.constexpr,
    BLOCKS_T: tl.constexpr,
    BLOCKS_X: tl.constexpr,
    FULL: tl.constexpr,
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Run `triton_silu.silu_mul_backward_quantize`.

    With STAGES above 0 a program takes many tiles, and reads those of the next
    STAGES - 1 into shared memory while it computes one; else it takes one.
    """
    after_the_last_kernel()
    # All that the compiler is told of this alignment is what suits the columns that a
    # thread has of a row: 8 where it reads words, 16 where it reads codes. It stores
    # them as they are, and would else move them between threads for wider stores.
    pairs = codes.to(tl.pointer_type(tl.int16), bitcast=True)
    if gate_scales is None:
        codes = tl.multiple_of(pairs, 8)
    else:
        codes = tl.multiple_of(pairs, 16)
    if STAGES:
        tiles = tl.cdiv(rows, WIDTH) * tl.cdiv(cols, WIDTH)
        for tile in tl.range(
            tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES
        ):
            _backward_tile(
                tile,
                dy,
                gate,
                up,
                gate_scales,
                up_scales,
                codes,
                scales,
                codes_t,
                scales_t,
                codes_x,
                scales_x,
                kept,
                kept_x,
                rows,
                cols,
                dy_stride,
                gate_stride,
                up_stride,
                gate_scale_stride,
                up_scale_stride,
                code_stride,
                scale_stride,
                code_stride_t,
                scale_stride_t,
                scale_stride_x,
                BLOCKS,
                BLOCKS_T,
                BLOCKS_X,
                FULL,
                FLOOR,
                UE8M0,
            )
    else:
        _backward_tile(
            tl.program_id(0),
            dy,
            gate,
            up,
            gate_scales,
            up_scales,
            codes,
            scales,
            codes_t,
            scales_t,
            codes_x,
            scales_x,
            kept,
            kept_x,
            rows,
            cols,
            dy_stride,
            gate_stride,
            up_stride,
            gate_scale_stride,
            up_scale_stride,
            code_stride,
            scale_stride,
            code_stride_t,
            scale_stride_t,
            scale_stride_x,
            BLOCKS,
            BLOCKS_T,
            BLOCKS_X,
            FULL,
            FLOOR,
            UE8M0,
        )
