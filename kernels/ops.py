"""The operators of the precision flow, as torch.library ops of the namespace `jetrl`.

    jetrl::quantize    matrix -> codes, scales
    jetrl::requantize  codes, scales -> codes, scales in other regions
    jetrl::dequantize  codes, scales -> matrix
    jetrl::gemm        a b^T of two block-scaled matrices, by a provider

`jetrl_compile.kernels.reference` says what they compute. They change no argument, work
for any number of rows including 0 and for symbolic sizes, and are not differentiable:
the compiler inserts them into graphs that already hold forward and backward. All check
their arguments alike when they run and when they are traced.

Codes and scales are in the memory order of `jetrl_compile.kernels.layouts`.
"""

import torch
from torch import Tensor

from jetrl_compile.errors import PrecisionFlowError
from jetrl_compile.kernels import quantizers, reference
from jetrl_compile.kernels.dispatch import get_provider
from jetrl_compile.kernels.layouts import empty_quantized
from jetrl_compile.kernels.op_definition import (
    check_codes,
    check_out_dtype,
    check_source,
    check_target,
    define,
)

MAX_COLS = 1 << 17


def _check_gemm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    a_rows: int,
    a_cols: int,
    b_rows: int,
    b_cols: int,
    out_dtype: torch.dtype,
) -> None:
    if a_cols != b_cols:
        raise PrecisionFlowError(
            f"gemm got scales along the contraction every {a_cols} for a and every "
            f"{b_cols} for b; both need the same: quantize them alike"
        )
    check_codes("gemm", "a", a, a_scales, a_rows, a_cols)
    check_codes("gemm", "b", b, b_scales, b_rows, b_cols)
    if a.shape[1] != b.shape[1]:
        raise PrecisionFlowError(
            f"gemm got a {tuple(a.shape)} and b {tuple(b.shape)}; both need the same "
            "number of columns, the contraction: it computes a b^T"
        )
    if a_cols > MAX_COLS or (a_cols == 0 and a.shape[1] > MAX_COLS):
        raise PrecisionFlowError(
            f"gemm got regions of {a_cols or a.shape[1]} columns; at most {MAX_COLS} "
            "can be added exactly: use regions of 128"
        )
    check_out_dtype("gemm", out_dtype)


def _empty_quantized(
    like: Tensor, rows: int, cols: int, transpose: bool
) -> tuple[Tensor, Tensor]:
    shape = (like.shape[0], like.shape[1])
    return empty_quantized(
        shape[::-1] if transpose else shape, rows, cols, like.device, transpose
    )


def _quantize(
    x: Tensor,
    rows: int,
    cols: int,
    transpose: bool,
    scale_format: str,
    amax_floor: float,
    after: Tensor | None,
) -> tuple[Tensor, Tensor]:
    check_source(x)
    check_target(rows, cols, scale_format, amax_floor)
    return quantizers.quantize(x, rows, cols, transpose, scale_format, amax_floor)


def _fake_quantize(
    x: Tensor,
    rows: int,
    cols: int,
    transpose: bool,
    scale_format: str,
    amax_floor: float,
    after: Tensor | None,
) -> tuple[Tensor, Tensor]:
    check_source(x)
    check_target(rows, cols, scale_format, amax_floor)
    return _empty_quantized(x, rows, cols, transpose)


def _requantize(
    codes: Tensor,
    scales: Tensor,
    rows_in: int,
    cols_in: int,
    rows: int,
    cols: int,
    transpose: bool,
    scale_format: str,
    amax_floor: float,
    after: Tensor | None,
) -> tuple[Tensor, Tensor]:
    check_codes("requantize", "codes", codes, scales, rows_in, cols_in)
    check_target(rows, cols, scale_format, amax_floor)
    return quantizers.requantize(
        codes,
        scales,
        rows_in,
        cols_in,
        rows,
        cols,
        transpose,
        scale_format,
        amax_floor,
    )


def _fake_requantize(
    codes: Tensor,
    scales: Tensor,
    rows_in: int,
    cols_in: int,
    rows: int,
    cols: int,
    transpose: bool,
    scale_format: str,
    amax_floor: float,
    after: Tensor | None,
) -> tuple[Tensor, Tensor]:
    check_codes("requantize", "codes", codes, scales, rows_in, cols_in)
    check_target(rows, cols, scale_format, amax_floor)
    return _empty_quantized(codes, rows, cols, transpose)


def _dequantize(
    codes: Tensor, scales: Tensor, rows: int, cols: int, out_dtype: torch.dtype
) -> Tensor:
    check_codes("dequantize", "codes", codes, scales, rows, cols)
    check_out_dtype("dequantize", out_dtype)
    return reference.dequantize(codes, scales, rows, cols, out_dtype)


def _fake_dequantize(
    codes: Tensor, scales: Tensor, rows: int, cols: int, out_dtype: torch.dtype
) -> Tensor:
    check_codes("dequantize", "codes", codes, scales, rows, cols)
    check_out_dtype("dequantize", out_dtype)
    return torch.empty(codes.shape, dtype=out_dtype, device=codes.device)


def _gemm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    a_rows: int,
    a_cols: int,
    b_rows: int,
    b_cols: int,
    out_dtype: torch.dtype,
    provider: str,
) -> Tensor:
    _check_gemm(a, a_scales, b, b_scales, a_rows, a_cols, b_rows, b_cols, out_dtype)
    return get_provider(provider).gemm(
        a, a_scales, b, b_scales, a_rows, a_cols, b_rows, b_cols, out_dtype
    )


def _fake_gemm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    a_rows: int,
    a_cols: int,
    b_rows: int,
    b_cols: int,
    out_dtype: torch.dtype,
    provider: str,
) -> Tensor:
    _check_gemm(a, a_scales, b, b_scales, a_rows, a_cols, b_rows, b_cols, out_dtype)
    get_provider(provider)
    return torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)


quantize = define(
    "quantize(Tensor x, int rows, int cols, bool transpose, str scale_format, "
    "float amax_floor, Tensor? after) -> (Tensor codes, Tensor scales)",
    _quantize,
    _fake_quantize,
)
requantize = define(
    "requantize(Tensor codes, Tensor scales, int rows_in, int cols_in, int rows, "
    "int cols, bool transpose, str scale_format, float amax_floor, Tensor? after) "
    "-> (Tensor codes, Tensor scales)",
    _requantize,
    _fake_requantize,
)
dequantize = define(
    "dequantize(Tensor codes, Tensor scales, int rows, int cols, "
    "ScalarType out_dtype) -> Tensor",
    _dequantize,
    _fake_dequantize,
)
gemm = define(
    "gemm(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, int a_rows, "
    "int a_cols, int b_rows, int b_cols, ScalarType out_dtype, str provider) "
    "-> Tensor",
    _gemm,
    _fake_gemm,
)
