"""What the operators of `jetrl_compile.kernels.ops` mean, in plain PyTorch.

It runs on any device and is the oracle of every other provider. Quantization follows
the precision contract: `scale = max(amax, floor) / 448` and `code = x / scale`, both
true divisions in FP32, the code clamped to +-448 and rounded to nearest even. A GEMM
is exact up to one FP64 addition per group of the contraction and one final rounding,
so its bits depend neither on the order in which a BLAS adds nor on the batch.

`scale` is what a code is multiplied by: `x ~ code * scale`. All matrices here are
row-major unless said otherwise; regions (groups, blocks) tile a matrix from its first
element, and the last one of a row or column may be partial.
"""

import functools

import torch
from torch import Tensor

from jetrl_compile.formats import E4M3_MAX
from jetrl_compile.granularity import Granularity

E4M3 = torch.float8_e4m3fn
_TILE_ELEMENTS = 1 << 18  # of one FP64 partial product: 2 MiB
_OPERAND_ELEMENTS = 1 << 20  # of one FP64 operand slice: 8 MiB


def quantize(
    x: Tensor,
    rows: int,
    cols: int,
    transpose: bool,
    scale_format: str,
    amax_floor: float,
) -> tuple[Tensor, Tensor]:
    """Quantize a matrix, or its transpose, from BF16.

    Args:
        x: (R, C) in BF16, or in FP32, which is rounded to BF16 first; any strides.
        rows: Rows of a region of the quantized matrix; 0 means all.
        cols: Columns of a region of the quantized matrix; 0 means all.
        transpose: Whether x^T is the quantized matrix.
        scale_format: "fp32", or "ue8m0": the scale is rounded up to a power of two
            before the division.
        amax_floor: The smallest amax that a scale is made from, in units of x.

    Returns:
        Codes in E4M3 of the quantized matrix, (R, C) or (C, R), row-major; and FP32
        scales, one a region, row-major. A NaN makes its region's scale and codes NaN,
        an infinity makes the scale infinite and its own code NaN.
    """
    matrix = x.to(torch.bfloat16)
    # Row-major first: a region along a strided dimension takes 3 times as long.
    matrix = (matrix.t() if transpose else matrix).contiguous()
    return _encode(matrix, rows, cols, scale_format, amax_floor)


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
    """Quantize again what codes stand for, in other regions, without BF16 between.

    Args:
        codes: (R, C) in E4M3, any strides.
        scales: FP32, one for each `rows_in` x `cols_in` region of `codes`.
        rows_in: Rows of a region of `codes`; 0 means all.
        cols_in: Columns of a region of `codes`; 0 means all.
        rows: As in `quantize`.
        cols: As in `quantize`.
        transpose: Whether the transpose of `codes` is what is quantized.
        scale_format: As in `quantize`.
        amax_floor: As in `quantize`.

    Returns:
        Codes and scales as `quantize` returns them.

    Source: Jet-RL (arXiv 2601.14243): x saved as fprop's codes for wgrad.
    """
    matrix = dequantize(codes, scales, rows_in, cols_in, torch.float32)
    if transpose:
        matrix = matrix.t().contiguous()
    return _encode(matrix, rows, cols, scale_format, amax_floor)


def dequantize(
    codes: Tensor, scales: Tensor, rows: int, cols: int, out_dtype: torch.dtype
) -> Tensor:
    """Return code * scale, multiplied in FP32 and rounded once to another dtype.

    Args:
        codes: (R, C) in E4M3, any strides.
        scales: FP32, one for each `rows` x `cols` region.
        rows: Rows of a region; 0 means all.
        cols: Columns of a region; 0 means all.
        out_dtype: Of the result.

    Returns:
        (R, C), row-major.
    """
    values = decode(codes, torch.float32)
    spread = _repeat(_repeat(scales, rows, codes.shape[0]).t(), cols, codes.shape[1])
    return values.mul_(spread.t()).to(out_dtype)


def gemm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    a_rows: int,
    a_cols: int,
    b_rows: int,
    b_cols: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply two block-scaled matrices: a b^T.

    For each region of the contraction (a group of 128), the product of the codes in
    FP64 is exact: an E4M3 code is a multiple of 2^-9 of at most 448, so each product
    is a multiple of 2^-18 below 2^18, and the sum of n of them needs 36 + log2(n)
    bits, which is at most 53 for n <= 2^17. It is multiplied by `a_scale * b_scale`
    (exact in FP64: 24 bits by 24 bits), rounded to FP64, and added to the sum of the
    earlier groups, in ascending order. No step depends on another row of `a` or `b`.

    Args:
        a: (M, K) codes in E4M3, any strides.
        a_scales: FP32, one for each `a_rows` x `a_cols` region of `a`.
        b: (N, K) codes in E4M3, any strides.
        b_scales: FP32, one for each `b_rows` x `b_cols` region of `b`.
        a_rows: Rows of a region of `a`; 0 means all.
        a_cols: Columns of a region of `a`; 0 means all; at most 2^17.
        b_rows: Rows of a region of `b`; 0 means all.
        b_cols: Columns of a region of `b`; equal to `a_cols`.
        out_dtype: Of the result. The sum is rounded to it once; to BF16 through FP32,
            as torch converts FP64, so a tie of the FP32 value goes to even.

    Returns:
        (M, N), row-major; zeros for K = 0.
    """
    (m, k), n = a.shape, b.shape[0]
    cols = a_cols or max(k, 1)
    out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    a_scales = _repeat(a_scales.double(), a_rows, m)
    b_scales = _repeat(b_scales.double(), b_rows, n)
    for n_span in _slices(n, max(_OPERAND_ELEMENTS // max(k, 1), 128)):
        b_NK, b_scales_N = decode(b[n_span], torch.float64), b_scales[n_span]
        height = min(_TILE_ELEMENTS // len(b_NK), _OPERAND_ELEMENTS // max(k, 1))
        for m_span in _slices(m, max(height, 16)):
            a_MK, a_scales_M = decode(a[m_span], torch.float64), a_scales[m_span]
            # +0 at first, so that the sign of a zero partial product is lost here.
            total = a_MK.new_zeros((len(a_MK), len(b_NK)))
            part = torch.empty_like(total)
            # Views made together cost less than one at a time. K = 0 has no scales.
            for a_group, b_group, a_scale, b_scale in zip(
                torch.split(a_MK, cols, 1),
                torch.split(b_NK.t(), cols, 0),
                a_scales_M.unsqueeze(2).unbind(1),
                b_scales_N.unbind(1),
                strict=False,
            ):
                torch.mm(a_group, b_group, out=part)
                total += part.mul_(a_scale * b_scale)
            out[m_span, n_span] = total
    return out


def decode(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of E4M3 codes in FP32 or FP64, exactly, row-major."""
    index = codes.contiguous().view(torch.uint8).view(-1).to(torch.int32)
    return _table(codes.device, dtype).index_select(0, index).view(codes.shape)


@functools.cache
def _table(device: torch.device, dtype: torch.dtype) -> Tensor:
    # A gather from 256 values is 2 to 7 times as fast on a CPU as a cast from E4M3.
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3)
    return codes.to(dtype).to(device)


def _encode(
    matrix: Tensor, rows: int, cols: int, scale_format: str, amax_floor: float
) -> tuple[Tensor, Tensor]:
    (r, c), region = matrix.shape, Granularity(rows, cols)
    height, width = rows or max(r, 1), cols or max(c, 1)
    high, wide = region.scale_shape((r, c))
    # Zeros change no amax, so a partial region may be filled up with them.
    tails = (0, wide * width - c, 0, high * height - r)
    padded = torch.nn.functional.pad(matrix, tails) if any(tails) else matrix
    regions = padded.view(high, height, wide, width)
    scales = regions.abs().amax((1, 3), keepdim=True).to(torch.float32)
    # By a tensor of the device: CUDA divides by a Python number as a product with its
    # reciprocal, which is another quantizer.
    divisor = torch.full((), E4M3_MAX, dtype=scales.dtype, device=scales.device)
    scales = scales.clamp_(min=amax_floor).div_(divisor)
    if scale_format == "ue8m0":
        scales = power_of_two_above(scales)
    quotients = (regions / scales).clamp_(-E4M3_MAX, E4M3_MAX)
    codes = quotients.to(E4M3).view(padded.shape)[:r, :c].contiguous()
    return codes, scales.view(high, wide)


def power_of_two_above(scale: Tensor) -> Tensor:
    """Return the smallest power of two that is not below each scale, exactly.

    Args:
        scale: Positive normal FP32 numbers; an infinity or NaN stays as it is.

    Returns:
        FP32, in the shape of `scale`.
    """
    # FP32 holds the exponent above 23 mantissa bits, so any mantissa but zero carries
    # into it. A NaN would carry into the sign.
    bits = scale.view(torch.int32)
    power = ((bits + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)
    return torch.where(scale.isnan(), scale, power)


def _repeat(scales: Tensor, size: int, total: int) -> Tensor:
    """Give each of `total` rows the scales of its region of `size` rows (0: all)."""
    if size == 1:
        return scales
    return scales.repeat_interleave(size or max(total, 1), 0)[:total]


def _slices(size: int, step: int) -> list[slice]:
    return [slice(at, min(at + step, size)) for at in range(0, size, step)]
