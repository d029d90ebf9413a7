"""The operators of the precision flow, as torch.library ops of the namespace `jetrl`.

    jetrl::quantize    matrix -> codes, scales
    jetrl::requantize  codes, scales -> codes, scales in other regions
    jetrl::dequantize  codes, scales -> matrix
    jetrl::gemm        a b^T of two block-scaled matrices, by a provider

`jetrl_compile.kernels.reference` says what they compute. They change no argument, work
for any number of rows including 0 and for symbolic sizes, and are not differentiable:
the compiler inserts them into graphs that already hold forward and backward. All check
their arguments alike when they run and when they are traced.

They are defined through `Library.define`: a call costs 2.7 us, through `custom_op` 7.9
us (torch 2.13, one thread), and a decode step of a 30-layer model makes 330.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jetrl_compile.errors import PrecisionFlowError
from jetrl_compile.formats import E4M3_MAX, SCALE_FORMATS, short_name
from jetrl_compile.granularity import Granularity
from jetrl_compile.kernels import reference
from jetrl_compile.kernels.dispatch import get_provider

NAMESPACE = "jetrl"
E4M3 = torch.float8_e4m3fn
OUT_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
MIN_AMAX_FLOOR: float = torch.finfo(torch.float32).tiny * E4M3_MAX
MAX_COLS = 1 << 17

_torch_library: Any = torch.library  # untyped in torch 2.13
_LIBRARY = _torch_library.Library(NAMESPACE, "FRAGMENT")
# Inductor may otherwise re-stride the arguments of an op that it does not know.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def _define(
    schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]
) -> torch._ops.OpOverload:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=_TAGS)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    _torch_library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    op: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return op


def _check_source(x: Tensor) -> None:
    if x.dim() != 2:
        raise PrecisionFlowError(
            f"quantize got a tensor of shape {tuple(x.shape)}; it needs a matrix: "
            "flatten the leading dimensions into tokens"
        )
    if x.dtype not in (torch.bfloat16, torch.float32):
        advice = (
            "convert the model to BF16"
            if x.dtype is torch.float16
            else "cast it to BF16"
        )
        raise PrecisionFlowError(
            f"quantize got a matrix in {short_name(x.dtype).upper()}; it needs BF16, "
            f"or FP32 that is rounded to BF16 first: {advice}"
        )


def _check_target(rows: int, cols: int, scale_format: str, amax_floor: float) -> None:
    if rows < 0 or cols < 0:
        raise PrecisionFlowError(
            f"quantize got regions of {rows}x{cols}; use positive sizes, or 0 for all"
        )
    if scale_format not in SCALE_FORMATS:
        raise PrecisionFlowError(
            f"quantize got the scale format {scale_format!r}; use one of "
            f"{', '.join(SCALE_FORMATS)}"
        )
    if not MIN_AMAX_FLOOR <= amax_floor < float("inf"):
        raise PrecisionFlowError(
            f"quantize got the amax floor {amax_floor:g}; it needs at least "
            f"{MIN_AMAX_FLOOR:.2g}, so that a scale is a positive normal FP32 number"
        )


def _check_codes(
    op: str, operand: str, codes: Tensor, scales: Tensor, rows: int, cols: int
) -> None:
    if codes.dtype is not E4M3 or codes.dim() != 2:
        raise PrecisionFlowError(
            f"{op} got {operand} of shape {tuple(codes.shape)} in "
            f"{short_name(codes.dtype)}; it needs a matrix of e4m3 codes: quantize it"
        )
    if rows < 0 or cols < 0:
        raise PrecisionFlowError(
            f"{op} got regions of {rows}x{cols} for {operand}; use positive sizes, or "
            "0 for all"
        )
    expected = Granularity(rows, cols).scale_shape((codes.shape[0], codes.shape[1]))
    if scales.dtype is not torch.float32 or scales.shape != expected:
        raise PrecisionFlowError(
            f"{op} got scales of shape {tuple(scales.shape)} in "
            f"{short_name(scales.dtype)} for {operand} {tuple(codes.shape)}; regions "
            f"of {Granularity(rows, cols)} need fp32 scales of shape {expected}"
        )


def _check_out_dtype(op: str, out_dtype: torch.dtype) -> None:
    if out_dtype not in OUT_DTYPES:
        raise PrecisionFlowError(
            f"{op} got the result dtype {short_name(out_dtype)}; use one of "
            f"{', '.join(map(short_name, OUT_DTYPES))}"
        )


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
    _check_codes("gemm", "a", a, a_scales, a_rows, a_cols)
    _check_codes("gemm", "b", b, b_scales, b_rows, b_cols)
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
    _check_out_dtype("gemm", out_dtype)


def _empty_quantized(
    like: Tensor, rows: int, cols: int, transpose: bool
) -> tuple[Tensor, Tensor]:
    shape = (like.shape[0], like.shape[1])
    if transpose:
        shape = shape[::-1]
    scale_shape = Granularity(rows, cols).scale_shape(shape)
    return (
        torch.empty(shape, dtype=E4M3, device=like.device),
        torch.empty(scale_shape, dtype=torch.float32, device=like.device),
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
    _check_source(x)
    _check_target(rows, cols, scale_format, amax_floor)
    return reference.quantize(x, rows, cols, transpose, scale_format, amax_floor)


def _fake_quantize(
    x: Tensor,
    rows: int,
    cols: int,
    transpose: bool,
    scale_format: str,
    amax_floor: float,
    after: Tensor | None,
) -> tuple[Tensor, Tensor]:
    _check_source(x)
    _check_target(rows, cols, scale_format, amax_floor)
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
    _check_codes("requantize", "codes", codes, scales, rows_in, cols_in)
    _check_target(rows, cols, scale_format, amax_floor)
    return reference.requantize(
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
    _check_codes("requantize", "codes", codes, scales, rows_in, cols_in)
    _check_target(rows, cols, scale_format, amax_floor)
    return _empty_quantized(codes, rows, cols, transpose)


def _dequantize(
    codes: Tensor, scales: Tensor, rows: int, cols: int, out_dtype: torch.dtype
) -> Tensor:
    _check_codes("dequantize", "codes", codes, scales, rows, cols)
    _check_out_dtype("dequantize", out_dtype)
    return reference.dequantize(codes, scales, rows, cols, out_dtype)


def _fake_dequantize(
    codes: Tensor, scales: Tensor, rows: int, cols: int, out_dtype: torch.dtype
) -> Tensor:
    _check_codes("dequantize", "codes", codes, scales, rows, cols)
    _check_out_dtype("dequantize", out_dtype)
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


quantize = _define(
    "quantize(Tensor x, int rows, int cols, bool transpose, str scale_format, "
    "float amax_floor, Tensor? after) -> (Tensor codes, Tensor scales)",
    _quantize,
    _fake_quantize,
)
requantize = _define(
    "requantize(Tensor codes, Tensor scales, int rows_in, int cols_in, int rows, "
    "int cols, bool transpose, str scale_format, float amax_floor, Tensor? after) "
    "-> (Tensor codes, Tensor scales)",
    _requantize,
    _fake_requantize,
)
dequantize = _define(
    "dequantize(Tensor codes, Tensor scales, int rows, int cols, "
    "ScalarType out_dtype) -> Tensor",
    _dequantize,
    _fake_dequantize,
)
gemm = _define(
    "gemm(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, int a_rows, "
    "int a_cols, int b_rows, int b_cols, ScalarType out_dtype, str provider) "
    "-> Tensor",
    _gemm,
    _fake_gemm,
)
