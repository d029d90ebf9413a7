"""A Triton kernel that quantizes codes again, transposed, for wgrad of `jetrl_paper`.

Bytes moved for each element: 1 read and 1 written, plus 4 for each scale on both sides.
The tiles are those of `triton_quantize_kernels`, whose docstring says why they are so.
"""

from functools import partial

from torch import Tensor

from jetrl_compile.errors import ProviderError
from jetrl_compile.formats import AMAX_FLOOR, short_name
from jetrl_compile.granularity import Granularity
from jetrl_compile.kernels.layouts import E4M3, empty_quantized
from jetrl_compile.kernels.triton_common import (
    absmax,
    cannot_run,
    decode,
    encode_words_fp32,
    jit,
    largest,
    magnitude,
    on_device,
    region_scale,
    tl,
)
from jetrl_compile.kernels.triton_quantize import REGIONS, SIDE
from jetrl_compile.kernels.triton_quantize_kernels import ANY_VALUE, store_turned


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
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Requantize (R, C) as its transpose; a program takes a tile of 128x128."""
    tiles = tl.cdiv(C, 128)
    tile_c = tl.program_id(0) % tiles
    tile_r = tl.program_id(0) // tiles
    row = tile_r * 128 + 4 * tl.arange(0, 32)
    col = tile_c * 128 + tl.arange(0, 128)
    col = tl.max_contiguous(tl.multiple_of(col, WIDTH), WIDTH)
    at = codes + row[:, None].to(tl.int64) * codes_stride + col[None, :]
    beside = scales + tile_c * scales_stride_c + row * scales_stride_r
    in_col = col[None, :] < C
    x0 = _load(at, beside, row, in_col, R, EVEN)
    at, beside = at + codes_stride, beside + scales_stride_r
    x1 = _load(at, beside, row + 1, in_col, R, EVEN)
    at, beside = at + codes_stride, beside + scales_stride_r
    x2 = _load(at, beside, row + 2, in_col, R, EVEN)
    at, beside = at + codes_stride, beside + scales_stride_r
    x3 = _load(at, beside, row + 3, in_col, R, EVEN)
    top = tl.maximum(
        tl.maximum(magnitude(x0), magnitude(x1)),
        tl.maximum(magnitude(x2), magnitude(x3)),
    )
    amax = largest(top, 0)
    if BLOCKS:
        scale = region_scale(absmax(amax, 0), FLOOR, UE8M0)
        tl.store(scales_t + tile_c * scales_t_stride + tile_r, scale)
        word = encode_words_fp32(x0, x1, x2, x3, scale)
    else:
        scale = region_scale(amax, FLOOR, UE8M0)
        tl.store(scales_t + tile_r * scales_t_stride + col, scale, mask=col < C)
        word = encode_words_fp32(x0, x1, x2, x3, scale[None, :])
    store_turned(word, codes_t, codes_t_stride, tile_r, tile_c, R, C, EVEN)


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
    with on_device(codes):
        _requantize_kernel[(-(-r // SIDE) * -(-c // SIDE),)](
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
            FLOOR=amax_floor,
            UE8M0=scale_format == "ue8m0",
            EVEN=r % SIDE == 0 and c % SIDE == 0,
            BLOCKS=blocks,
            WIDTH=4,
            num_warps=8,
        )
    return out, out_scales
