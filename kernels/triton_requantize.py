"""A Triton kernel that quantizes codes again, transposed, for wgrad of `jetrl_paper`.

Bytes moved for each element: 1 read and 1 written, plus 4 for each scale on both sides.
A tile is four tiles that hold every fourth row. So a thread has 4 rows of a column, and
the codes cross the shared memory as 32-bit words of 4 codes; a row of the transpose is
written as 128 adjacent bytes.
"""

from functools import partial

from torch import Tensor

from jetrl_compile.errors import ProviderError
from jetrl_compile.formats import AMAX_FLOOR, short_name
from jetrl_compile.granularity import Granularity
from jetrl_compile.kernels.launch_recorder import launch_kernel
from jetrl_compile.kernels.layouts import E4M3, empty_quantized
from jetrl_compile.kernels.triton_common import (
    absmax,
    cannot_run,
    decode,
    encode_words_fp32,
    jit,
    region_scale,
    tl,
)
from jetrl_compile.kernels.triton_device import multiprocessors, on_device, overlaps
from jetrl_compile.kernels.triton_overlap import after_the_last_kernel, prefetch
from jetrl_compile.kernels.triton_quantize import REGIONS, SIDE
from jetrl_compile.kernels.triton_quantize_kernels import ANY_VALUE


@partial(jit, do_not_specialize=ANY_VALUE)
def _requantize_kernel(
    codes: tl.tensor,
    codes_stride: tl.tensor,
    scales: tl.tensor,
    scales_stride_r: tl.tensor,
    scales_stride_c: tl.tensor,
    codes_t: tl.tensor,
    codes_t_stride: tl.tensor,
    scales_t: tl.tensor,
    scales_t_stride: tl.tensor,
    R: tl.tensor,
    C: tl.tensor,
    ahead: tl.tensor,
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Requantize (R, C) as its transpose; a program takes a tile of 128 rows by WIDE.

    The tile of the program that is `ahead` programs later is brought into the L2 cache.
    """
    after_the_last_kernel()
    wide = tl.cdiv(C, WIDE)
    row = tl.program_id(0) // wide * 128
    col = tl.program_id(0) % wide * WIDE
    # Rows 4 i + 0 to 4 i + 3 of the tile are row i of four tiles.
    down = 4 * tl.arange(0, 32)
    # Told that 4 columns are adjacent, the compiler gives a thread no more: it computes
    # the scales of its columns, as the threads that share them do again.
    right = tl.max_contiguous(tl.multiple_of(tl.arange(0, WIDE), 4), 4)
    at = codes + (row.to(tl.int64) * codes_stride + col)
    at = at + (down[:, None] * codes_stride + right[None, :])
    beside = scales + (col // 128).to(tl.int64) * scales_stride_c
    beside = beside + (row + down).to(tl.int64) * scales_stride_r
    in_col = col + right[None, :] < C
    x0 = _load(at, beside, row + down, in_col, R, EVEN)
    at, beside = at + codes_stride, beside + scales_stride_r
    x1 = _load(at, beside, row + down + 1, in_col, R, EVEN)
    at, beside = at + codes_stride, beside + scales_stride_r
    x2 = _load(at, beside, row + down + 2, in_col, R, EVEN)
    at, beside = at + codes_stride, beside + scales_stride_r
    x3 = _load(at, beside, row + down + 3, in_col, R, EVEN)

    later = tl.minimum(tl.program_id(0) + ahead, tl.num_programs(0) - 1)
    row_l, col_l = later // wide * 128, later % wide * WIDE
    line = tl.minimum(row_l + tl.arange(0, 128), R - 1).to(tl.int64)
    prefetch(codes + (line * codes_stride + col_l))
    line = tl.minimum(row_l + tl.arange(0, 4) * 32, R - 1).to(tl.int64)
    column = scales + (col_l // 128).to(tl.int64) * scales_stride_c
    prefetch(column + line * scales_stride_r)

    top = _larger(
        _larger(tl.abs(x0), tl.abs(x1)),
        _larger(tl.abs(x2), tl.abs(x3)),
    )
    amax = absmax(top, 0)
    if BLOCKS:
        scale = region_scale(absmax(amax, 0), FLOOR, UE8M0)
        tl.store(scales_t + col // 128 * scales_t_stride + row // 128, scale)
        word = encode_words_fp32(x0, x1, x2, x3, scale)
    else:
        scale = region_scale(amax, FLOOR, UE8M0)
        every = col + tl.arange(0, WIDE)
        to = scales_t + (row // 128).to(tl.int64) * scales_t_stride + every
        tl.store(to, scale, mask=every < C)
        word = encode_words_fp32(x0, x1, x2, x3, scale[None, :])

    # Four codes a word; padding up to a multiple of 4 rows is written.
    words = codes_t.to(tl.pointer_type(tl.int32), bitcast=True)
    step = codes_t_stride // 4
    across = tl.arange(0, WIDE)[:, None]
    quad = tl.arange(0, 32)[None, :]
    to = words + (col.to(tl.int64) * step + row // 4) + (across * step + quad)
    full = (row + 128 <= R) & (col + WIDE <= C)
    if EVEN or full:
        tl.store(to, tl.trans(word))
    else:
        inside = (col + across < C) & (row + 4 * quad < R)
        tl.store(to, tl.trans(word), mask=inside)


@jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def _load(
    at: tl.tensor,
    beside: tl.tensor,
    row: tl.tensor,
    in_col: tl.tensor,
    R: tl.tensor,
    EVEN: tl.constexpr,
) -> tl.tensor:
    """Return code * scale in FP32; 0 outside."""
    if EVEN:
        return decode(tl.load(at)) * tl.load(beside)[:, None]
    scale = tl.load(beside, mask=row < R, other=0.0)
    inside = (row[:, None] < R) & in_col
    value = decode(tl.load(at, mask=inside)) * scale[:, None]
    return tl.where(inside, value, 0.0)


def rejects(
    codes: Tensor,
    scales: Tensor,
    rows_in: int,
    cols_in: int,
    rows: int,
    cols: int,
    transpose: bool,
    amax_floor: float = AMAX_FLOOR,
) -> str | None:
    """Return why the kernel cannot requantize, or None if it can; as `requantize`."""
    if codes.dtype != E4M3:
        return f"no kernel requantizes {short_name(codes.dtype)}"
    if (rows_in, cols_in) != REGIONS[0]:
        return f"no kernel requantizes regions of {Granularity(rows_in, cols_in)}"
    if (rows, cols) not in REGIONS:
        return f"no kernel for regions of {Granularity(rows, cols)}"
    if not transpose:
        return "no kernel requantizes without a transpose"
    return cannot_run([codes, scales], amax_floor)


def requantize(
    codes: Tensor,
    scales: Tensor,
    rows_in: int,
    cols_in: int,
    rows: int,
    cols: int,
    transpose: bool,
    scale_format: str,
    amax_floor: float,
) -> tuple[Tensor, Tensor]:
    """Run `reference.requantize`.

    Args:
        codes: (R, C) in E4M3. Rows may lie apart; other strides cost a copy.
        scales: FP32, one for each 1x128 group of `codes`, any strides.
        rows_in: 1.
        cols_in: 128.
        rows: Rows of a region of the transpose, 1 or 128.
        cols: 128.
        transpose: True.
        scale_format: "fp32" or "ue8m0".
        amax_floor: The smallest amax that a scale is made from.

    Returns:
        Codes (C, R) and scales, in the memory order of `layouts`.

    Raises:
        ProviderError: `rejects` has a reason.
    """
    reason = rejects(codes, scales, rows_in, cols_in, rows, cols, transpose, amax_floor)
    if reason is not None:
        raise ProviderError(f"triton: {reason}; use the provider reference")
    r, c = codes.shape
    out, out_scales = empty_quantized((c, r), rows, cols, codes.device, True)
    if out.numel() == 0:
        return out, out_scales
    if codes.stride(1) != 1 and c > 1:
        codes = codes.contiguous()
    blocks = rows == SIDE
    # Small programs do not wait for each other; a block needs its whole width.
    wide, together = (SIDE, 3) if blocks else (SIDE // 2, 6)
    with on_device(codes):
        launch_kernel(
            _requantize_kernel, (-(-r // SIDE) * -(-c // wide),), overlaps(codes.device)
        )(
            codes,
            codes.stride(0),
            scales,
            scales.stride(0),
            scales.stride(1),
            out,
            out.stride(0),
            out_scales,
            out_scales.stride(0 if blocks else 1),
            r,
            c,
            multiprocessors(codes.device) * together,
            FLOOR=amax_floor,
            UE8M0=scale_format == "ue8m0",
            EVEN=r % SIDE == 0 and c % SIDE == 0,
            BLOCKS=blocks,
            WIDE=wide,
            num_warps=wide // 16,
            # So that as many programs run `together` on a multiprocessor.
            maxnreg=80,
        )
    return out, out_scales
