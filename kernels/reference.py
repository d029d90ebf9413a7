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
from collections.abc import Iterator

import torch
from torch import Tensor

from jetrl_compile.formats import E4M3_MAX
from jetrl_compile.granularity import Granularity

E4M3 = torch.float8_e4m3fn
_TILE_ELEMENTS = 1 << 20  # of one FP64 partial product: 8 MiB
_OPERAND_ELEMENTS = 1 << 22  # of one FP64 operand slice: 32 MiB


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
    if transpose:
        matrix = matrix.t()
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
        matrix = matrix.t()
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
    values = decode(codes).to(torch.float32)
    for row, row_span, height in _spans(codes.shape[0], rows):
        for col, col_span, width in _spans(codes.shape[1], cols):
            view = _regions(values[row_span, col_span], height, width)
            view *= scales[row, col][:, None, :, None]
    return values.to(out_dtype)


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
    out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    groups = _slices(k, a_cols or max(k, 1))
    s_a, s_b = a_scales.double(), b_scales.double()
    if a_rows != 1:
        s_a = _per_row(s_a, a_rows, m)
    if b_rows != 1:
        s_b = _per_row(s_b, b_rows, n)
    s_b = s_b.t()
    for n_span in _slices(n, max(_OPERAND_ELEMENTS // max(k, 1), 128)):
        b_NK, s_b_KN = decode(b[n_span]), s_b[:, n_span]
        height = _TILE_ELEMENTS // (n_span.stop - n_span.start)
        for m_span in _slices(m, max(min(height, _OPERAND_ELEMENTS // max(k, 1)), 16)):
            a_MK, s_a_MK = decode(a[m_span]), s_a[m_span]
            shape = (a_MK.shape[0], b_NK.shape[0])
            total = torch.zeros(shape, dtype=torch.float64, device=a.device)
            part = torch.empty_like(total)
            for group, span in enumerate(groups):
                torch.mm(a_MK[:, span], b_NK[:, span].t(), out=part)
                part *= s_a_MK[:, group, None] * s_b_KN[group]
                total += part
            out[m_span, n_span] = total
    return out


def decode(codes: Tensor) -> Tensor:
    """Return the values of E4M3 codes in FP64, exactly, row-major."""
    table = _table(codes.device)
    index = codes.contiguous().view(torch.uint8).view(-1).to(torch.int32)
    return table.index_select(0, index).view(codes.shape)


@functools.cache
def _table(device: torch.device) -> Tensor:
    # A gather from 256 values is 4 times as fast on a CPU as a cast from E4M3.
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3)
    return codes.to(torch.float64).to(device)


def _encode(
    matrix: Tensor, rows: int, cols: int, scale_format: str, amax_floor: float
) -> tuple[Tensor, Tensor]:
    shape = matrix.shape
    counts = Granularity(rows, cols).scale_shape((shape[0], shape[1]))
    codes = torch.empty(shape, dtype=E4M3, device=matrix.device)
    scales = torch.empty(counts, dtype=torch.float32, device=matrix.device)
    for row, row_span, height in _spans(shape[0], rows):
        for col, col_span, width in _spans(shape[1], cols):
            view = _regions(matrix[row_span, col_span], height, width)
            amax = view.abs().amax((1, 3)).to(torch.float32)
            scale = amax.clamp_(min=amax_floor).div_(E4M3_MAX)
            if scale_format == "ue8m0":
                scale = power_of_two_above(scale)
            scales[row, col] = scale
            quotient = view / scale[:, None, :, None]
            target = _regions(codes[row_span, col_span], height, width)
            target.copy_(quotient.clamp_(-E4M3_MAX, E4M3_MAX))
    return codes, scales


def power_of_two_above(scale: Tensor) -> Tensor:
    """Return the smallest power of two that is not below each scale, exactly.

    Args:
        scale: Positive normal FP32 numbers; an infinity or NaN stays as it is.

    Returns:
        FP32, in the shape of `scale`.
    """
    mantissa, exponent = torch.frexp(scale)
    power = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    return torch.where(torch.isfinite(scale), power, scale)


def _per_row(scales: Tensor, rows: int, size: int) -> Tensor:
    return scales.repeat_interleave(rows or max(size, 1), 0)[:size]


def _slices(size: int, step: int) -> list[slice]:
    return [slice(at, min(at + step, size)) for at in range(0, size, step)]


def _spans(size: int, step: int) -> Iterator[tuple[slice, slice, int]]:
    """Yield the regions of a dimension: the whole ones, then the partial last one.

    Each is a slice of the scales, the slice of the elements, and elements a region.
    """
    step = step or max(size, 1)
    whole = size // step
    if whole:
        yield slice(0, whole), slice(0, whole * step), step
    if size % step:
        yield slice(whole, whole + 1), slice(whole * step, size), size % step


def _regions(matrix: Tensor, height: int, width: int) -> Tensor:
    """View whole regions as (row of regions, row, column of regions, column)."""
    rows, cols = matrix.shape
    return matrix.view(rows // height, height, cols // width, width)
