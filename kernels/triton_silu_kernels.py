"""The Triton kernels of SiLU*mul and its backward; `triton_silu` launches them.

One program reads a tile of 128 columns of each input once and makes every output from
it, one after another. The rounding points are those of `reference_fused`.
"""

from jetrl_compile.kernels.triton_common import jit, round_bf16, tl
from jetrl_compile.kernels.triton_tiles import (
    WIDTH,
    kernel,
    load_tile,
    quantize_tile,
    store_tile,
    tile_origin,
)


@jit
def _sigmoid(gate: tl.tensor) -> tl.tensor:
    """1 / (1 + exp(-gate)) in FP32."""
    return 1.0 / (tl.exp(-gate) + 1.0)


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
    HEIGHT: tl.constexpr,
    BAND: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_T: tl.constexpr,
    FULL: tl.constexpr,
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
) -> None:
    """Run `triton_silu.silu_mul_quantize` on a tile of (HEIGHT, 128)."""
    row, col = tile_origin(rows, cols, HEIGHT, BAND)
    g = load_tile(gate, row, col, rows, cols, gate_stride, HEIGHT, FULL)
    u = load_tile(up, row, col, rows, cols, up_stride, HEIGHT, FULL)
    g = g.to(tl.float32)
    y = round_bf16(round_bf16(g * _sigmoid(g)) * u.to(tl.float32))
    if kept is not None:
        kept_y = y.to(tl.bfloat16)
        store_tile(kept_y, kept, row, col, rows, cols, cols, HEIGHT, FULL)
    quantize_tile(
        y,
        codes,
        scales,
        row,
        col,
        rows,
        cols,
        code_stride,
        scale_stride,
        HEIGHT,
        BLOCKS,
        FULL,
        FLOOR,
        UE8M0,
    )
    if codes_t is not None:
        quantize_tile(
            tl.trans(y),
            codes_t,
            scales_t,
            col,
            row,
            cols,
            rows,
            code_stride_t,
            scale_stride_t,
            HEIGHT,
            BLOCKS_T,
            FULL,
            FLOOR,
            UE8M0,
        )


@jit
def _load_gate(
    pointer: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    stride: tl.tensor,
    scale_stride: tl.tensor,
    HEIGHT: tl.constexpr,
    FULL: tl.constexpr,
) -> tl.tensor:
    """Load a tile in BF16, or codes and the scales of their 1x128 groups, as FP32."""
    tile = load_tile(pointer, row, col, rows, cols, stride, HEIGHT, FULL)
    tile = tile.to(tl.float32)
    if scales is not None:
        down = row + tl.arange(0, HEIGHT)
        at = scales + (col // WIDTH).to(tl.int64) * scale_stride + down
        scale = tl.load(at) if FULL else tl.load(at, mask=down < rows, other=0.0)
        tile = round_bf16(tile * scale[:, None])
    return tile


@kernel
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
    HEIGHT: tl.constexpr,
    BAND: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_T: tl.constexpr,
    BLOCKS_X: tl.constexpr,
    FULL: tl.constexpr,
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
) -> None:
    """Run `triton_silu.silu_mul_backward_quantize` on a tile of 128x128."""
    row, col = tile_origin(rows, cols, HEIGHT, BAND)
    g = _load_gate(
        gate,
        gate_scales,
        row,
        col,
        rows,
        cols,
        gate_stride,
        gate_scale_stride,
        HEIGHT,
        FULL,
    )
    u = _load_gate(
        up,
        up_scales,
        row,
        col,
        rows,
        cols,
        up_stride,
        up_scale_stride,
        HEIGHT,
        FULL,
    )
    d = load_tile(dy, row, col, rows, cols, dy_stride, HEIGHT, FULL).to(tl.float32)
    sigmoid = _sigmoid(g)
    silu = round_bf16(g * sigmoid)
    y = round_bf16(silu * u)
    if kept_x is not None:
        store_tile(y.to(tl.bfloat16), kept_x, row, col, rows, cols, cols, HEIGHT, FULL)
    quantize_tile(
        tl.trans(y),
        codes_x,
        scales_x,
        col,
        row,
        cols,
        rows,
        code_stride_t,
        scale_stride_x,
        HEIGHT,
        BLOCKS_X,
        FULL,
        FLOOR,
        UE8M0,
    )
    for half in tl.static_range(2):
        if half == 0:
            outer = round_bf16(d * u) * sigmoid
            gradient = round_bf16(outer * (g * (1.0 - sigmoid) + 1.0))
        else:
            gradient = round_bf16(d * silu)
        at = col + half * cols
        if kept is not None:
            store_tile(
                gradient.to(tl.bfloat16),
                kept,
                row,
                at,
                rows,
                2 * cols,
                2 * cols,
                HEIGHT,
                FULL,
            )
        quantize_tile(
            gradient,
            codes,
            scales,
            row,
            at,
            rows,
            2 * cols,
            code_stride,
            scale_stride,
            HEIGHT,
            BLOCKS,
            FULL,
            FLOOR,
            UE8M0,
        )
        quantize_tile(
            tl.trans(gradient),
            codes_t,
            scales_t,
            at,
            row,
            2 * cols,
            rows,
            code_stride_t,
            scale_stride_t,
            HEIGHT,
            BLOCKS_T,
            FULL,
            FLOOR,
            UE8M0,
        )
