"""The Triton kernels of RMSNorm; `triton_norm` launches them.

The rounding points are those of `reference_fused`.
"""

from jetrl_compile.kernels.triton_common import (
    absmax,
    encode,
    jit,
    region_scale,
    round_bf16,
    tl,
)
from jetrl_compile.kernels.triton_launch import kernel
from jetrl_compile.kernels.triton_overlap import after_the_last_kernel
from jetrl_compile.kernels.triton_quads import (
    HALF,
    WIDTH,
    load_quad,
    load_rows,
    store_quad,
    tile_origin,
)
from jetrl_compile.kernels.triton_tiles import quantize_quad, quantize_turned
from jetrl_compile.kernels.triton_words import high, low, multiply, pack


@jit
def _columns(FIRST_GROUP: tl.constexpr, GROUPS: tl.constexpr) -> tl.tensor:
    """Columns of GROUPS groups of a row, (GROUPS, 128)."""
    group, inside = tl.arange(0, GROUPS)[:, None], tl.arange(0, WIDTH)[None, :]
    return FIRST_GROUP * WIDTH + (group * WIDTH + inside)


@jit
def _read(
    pointer: tl.tensor, at: tl.tensor, cols: tl.tensor, FULL: tl.constexpr
) -> tl.tensor:
    if FULL:
        return tl.load(pointer + at).to(tl.float32)
    return tl.load(pointer + at, mask=at < cols, other=0.0).to(tl.float32)


@jit
def _write(
    pointer: tl.tensor,
    value: tl.tensor,
    at: tl.tensor,
    cols: tl.tensor,
    FULL: tl.constexpr,
) -> None:
    if FULL:
        tl.store(pointer + at, value)
    else:
        tl.store(pointer + at, value, mask=at < cols)


@jit
def _add(
    x: tl.tensor,
    residual: tl.tensor,
    total: tl.tensor,
    at: tl.tensor,
    cols: tl.tensor,
    FULL: tl.constexpr,
) -> tl.tensor:
    """Read a part of a row, add the residual's and store the sum; pointers to rows."""
    value = _read(x, at, cols, FULL)
    if residual is not None:
        value = round_bf16(value + _read(residual, at, cols, FULL))
        _write(total, value.to(tl.bfloat16), at, cols, FULL)
    return value


@jit
def _scaled(value: tl.tensor, rstd: tl.tensor, weight: tl.tensor) -> tl.tensor:
    """Return weight * (value * rstd), each product rounded to BF16."""
    return round_bf16(weight * round_bf16(value * rstd)).to(tl.bfloat16)


@jit
def _quantize_part(
    value: tl.tensor,
    rstd: tl.tensor,
    weight: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    kept: tl.tensor,
    at: tl.tensor,
    cols: tl.tensor,
    scale_stride: tl.tensor,
    FIRST_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    FULL: tl.constexpr,
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
) -> None:
    """Normalize, quantize and store a part of a row; pointers to rows."""
    y = _scaled(value, rstd, _read(weight, at, cols, FULL))
    if kept is not None:
        _write(kept, y, at, cols, FULL)
    scale = region_scale(absmax(y, 1), FLOOR, UE8M0)
    group = FIRST_GROUP + tl.arange(0, GROUPS)
    _write(scales, scale, group * scale_stride, tl.cdiv(cols, WIDTH) * scale_stride, 0)
    _write(codes, encode(y, scale[:, None]), at, cols, FULL)


@kernel
def norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    rstd: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    kept: tl.tensor,
    cols: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    code_stride: tl.tensor,
    scale_stride: tl.tensor,
    eps: tl.tensor,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    FULL: tl.constexpr,
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
) -> None:
    """Run `triton_norm.rms_norm_quantize` on a row of FIRST + LAST groups of 128."""
    after_the_last_kernel()
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    if residual is not None:
        residual += row * residual_stride
        total += row * cols
    if kept is not None:
        kept += row * cols
    codes += row * code_stride
    scales += row
    at = _columns(0, FIRST)
    value = _add(x, residual, total, at, cols, FULL)
    squares = tl.sum(value * value)
    if LAST:
        at_last = _columns(FIRST, LAST)
        value_last = _add(x, residual, total, at_last, cols, FULL)
        squares += tl.sum(value_last * value_last)
    factor = tl.rsqrt(tl.div_rn(squares, cols.to(tl.float32)) + eps)
    tl.store(rstd + row, factor)
    _quantize_part(
        value,
        factor,
        weight,
        codes,
        scales,
        kept,
        at,
        cols,
        scale_stride,
        0,
        FIRST,
        FULL,
        FLOOR,
        UE8M0,
    )
    if LAST:
        _quantize_part(
            value_last,
            factor,
            weight,
            codes,
            scales,
            kept,
            at_last,
            cols,
            scale_stride,
            FIRST,
            LAST,
            FULL,
            FLOOR,
            UE8M0,
        )


@jit
def _scaled_words(word: tl.tensor, rstd: tl.tensor, weight: tl.tensor) -> tl.tensor:
    """As `_scaled`, for words."""
    product = pack(low(word) * rstd, high(word) * rstd)
    return multiply(product, tl.broadcast_to(weight, product.shape))


@kernel
def scale_kernel(
    x: tl.tensor,
    rstd: tl.tensor,
    weight: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    kept: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    x_stride: tl.tensor,
    code_stride: tl.tensor,
    scale_stride: tl.tensor,
    QUARTER: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    BLOCKS: tl.constexpr,
    FULL: tl.constexpr,
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
) -> None:
    """Run `triton_norm.scale_rows_quantize` on a tile."""
    after_the_last_kernel()
    row, col = tile_origin(tl.program_id(0), cols, QUARTER)
    value = load_quad(x, row, col, rows, cols, x_stride, QUARTER, FULL)
    factor = load_rows(rstd, row, rows, QUARTER, FULL)
    words = weight.to(tl.pointer_type(tl.int32), bitcast=True)
    right = col // 2 + tl.arange(0, HALF)
    w = tl.load(words + right, mask=right < cols // 2, other=0)[None, :]
    y = (
        _scaled_words(value[0], factor[0], w),
        _scaled_words(value[1], factor[1], w),
        _scaled_words(value[2], factor[2], w),
        _scaled_words(value[3], factor[3], w),
    )
    if kept is not None:
        store_quad(y, kept, row, col, rows, cols, cols, QUARTER)
    if TRANSPOSE:
        quantize_turned(
            y,
            codes,
            scales,
            row,
            col,
            rows,
            cols,
            code_stride,
            scale_stride,
            BLOCKS,
            FULL,
            FLOOR,
            UE8M0,
        )
    else:
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
