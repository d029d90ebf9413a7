"""The Triton kernels of SiLU*mul and its backward; `triton_silu` launches them.

One program reads a tile of 128 columns of each input once and makes every output from
it, one after another. The rounding points are those of `reference_fused`.
"""

from jetrl_compile.kernels.triton_common import INTERPRETED, jit, round_bf16, tl
from jetrl_compile.kernels.triton_tiles import (
    WIDTH,
    kernel,
    load_quad,
    load_rows,
    quantize_quad,
    quantize_turned,
    store_quad,
    tile_origin,
)


@jit
def _sigmoid(gate: tl.tensor) -> tl.tensor:
    """1 / (1 + exp(-gate)) in FP32; 0 below gate = -87."""
    if INTERPRETED:
        return 1.0 / (tl.exp(-gate) + 1.0)
    return tl.inline_asm_elementwise(
        """
        {
        .reg .f32 power;
        mul.f32 power, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 power, power;
        add.f32 power, power, 0f3F800000;
        rcp.approx.ftz.f32 $0, power;
        }
        """,
        "=f,f",
        [gate],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@jit
def _round(x: tl.tensor) -> tl.tensor:
    """As `round_bf16`, two numbers an instruction."""
    if INTERPRETED:
        return round_bf16(x)
    rounded = tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;",
        "=r,f,f",
        [x],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )
    return rounded.to(tl.float32)


@jit
def _silu_mul(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    gate = gate.to(tl.float32)
    return round_bf16(_round(gate * _sigmoid(gate)) * up.to(tl.float32))


@jit
def _gate_gradient(dy: tl.tensor, gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    gate = gate.to(tl.float32)
    sigmoid = _sigmoid(gate)
    outer = round_bf16(dy.to(tl.float32) * up.to(tl.float32)) * sigmoid
    return _round(outer * (gate * (1.0 - sigmoid) + 1.0))


@jit
def _up_gradient(dy: tl.tensor, gate: tl.tensor) -> tl.tensor:
    gate = gate.to(tl.float32)
    return round_bf16(dy.to(tl.float32) * _round(gate * _sigmoid(gate)))


@jit
def _dequantized(codes: tl.tensor, scale: tl.tensor) -> tl.tensor:
    return _round(codes.to(tl.float32) * scale)


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
    BAND: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_T: tl.constexpr,
    FULL: tl.constexpr,
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
) -> None:
    """Run `triton_silu.silu_mul_quantize` on a tile."""
    row, col = tile_origin(rows, cols, QUARTER, BAND)
    g = load_quad(gate, row, col, rows, cols, gate_stride, QUARTER, FULL)
    u = load_quad(up, row, col, rows, cols, up_stride, QUARTER, FULL)
    y = (
        _silu_mul(g[0], u[0]),
        _silu_mul(g[1], u[1]),
        _silu_mul(g[2], u[2]),
        _silu_mul(g[3], u[3]),
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
    quad = load_quad(pointer, row, col, rows, cols, stride, QUARTER, FULL)
    if scales is not None:
        column = scales + (col // WIDTH).to(tl.int64) * scale_stride
        scale = load_rows(column, row, rows, QUARTER, FULL)
        quad = (
            _dequantized(quad[0], scale[0]),
            _dequantized(quad[1], scale[1]),
            _dequantized(quad[2], scale[2]),
            _dequantized(quad[3], scale[3]),
        )
    return quad


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
    QUARTER: tl.constexpr,
    BAND: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_T: tl.constexpr,
    BLOCKS_X: tl.constexpr,
    FULL: tl.constexpr,
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
) -> None:
    """Run `triton_silu.silu_mul_backward_quantize` on a tile of 128x128."""
    row, col = tile_origin(rows, cols, QUARTER, BAND)
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
    y = (
        _silu_mul(g[0], u[0]),
        _silu_mul(g[1], u[1]),
        _silu_mul(g[2], u[2]),
        _silu_mul(g[3], u[3]),
    )
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
    )
    for half in tl.static_range(2):
        if half == 0:
            gradient = (
                _gate_gradient(d[0], g[0], u[0]),
                _gate_gradient(d[1], g[1], u[1]),
                _gate_gradient(d[2], g[2], u[2]),
                _gate_gradient(d[3], g[3], u[3]),
            )
        else:
            gradient = (
                _up_gradient(d[0], g[0]),
                _up_gradient(d[1], g[1]),
                _up_gradient(d[2], g[2]),
                _up_gradient(d[3], g[3]),
            )
        at = col + half * cols
        if kept is not None:
            store_quad(gradient, kept, row, at, rows, 2 * cols, 2 * cols, QUARTER)
        quantize_quad(
            gradient,
            codes,
            scales,
            row,
            at,
            rows,
            2 * cols,
            code_stride,
            scale_stride,
            QUARTER,
            BLOCKS,
            FULL,
            FLOOR,
            UE8M0,
        )
        quantize_turned(
            gradient,
            codes_t,
            scales_t,
            row,
            at,
            rows,
            2 * cols,
            code_stride_t,
            scale_stride_t,
            BLOCKS_T,
            FULL,
            FLOOR,
            UE8M0,
        )
