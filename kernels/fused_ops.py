"""Operators that quantize what they make, in the namespace `jetrl`.

    jetrl::quantize_parts              matrices side by side -> codes, scales
    jetrl::quantize_twice              ... -> also of the transpose
    jetrl::rms_norm_quantize           residual add, RMSNorm -> codes, scales, ...
    jetrl::scale_rows_quantize         what a norm returned, remade in backward -> ...
    jetrl::silu_mul_quantize           gate, up -> codes, scales, ...
    jetrl::silu_mul_backward_quantize  dy, gate, up -> gradients' codes, scales, ...

`jetrl_compile.kernels.reference_fused` says what they compute. A pass puts them in the
place of the operators that they stand for; `passes/expand_fused.py` does the reverse,
so that the precision graph of a fused graph is that of the model.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jetrl_compile.errors import PrecisionFlowError
from jetrl_compile.formats import short_name
from jetrl_compile.kernels import quantizers
from jetrl_compile.kernels.layouts import E4M3, empty_quantized
from jetrl_compile.kernels.op_definition import (
    check_codes,
    check_source,
    check_target,
    define,
)

_QUANTIZER = "str scale_format, float amax_floor"
_TWICE = "int rows, int cols, int rows_t, int cols_t"
_EMPTY: tuple[int, int] = (0, 0)


def _check_parts(parts: Sequence[Tensor], dim: int) -> None:
    if not parts or dim not in (0, 1):
        raise PrecisionFlowError(
            f"got {len(parts)} parts along dimension {dim}; it needs at least one, "
            "along 0 or 1"
        )
    for part in parts:
        check_source(part)
        if part.shape[1 - dim] != parts[0].shape[1 - dim]:
            shapes = ", ".join(str(tuple(p.shape)) for p in parts)
            raise PrecisionFlowError(
                f"got parts of shapes {shapes}; beside dimension {dim} they need the "
                "same size"
            )


def _check_activations(op: str, *tensors: Tensor) -> None:
    """Check that tensors are BF16 and of one size."""
    for x in tensors:
        if x.dtype is not torch.bfloat16:
            raise PrecisionFlowError(
                f"{op} got {short_name(x.dtype)} of shape {tuple(x.shape)}; it needs "
                "BF16"
            )
    _check_sizes(op, *tensors)


def _check_sizes(op: str, *tensors: Tensor) -> None:
    first = tensors[0]
    for x in tensors:
        if x.shape[-1] != first.shape[-1] or _unequal(_rows(x), _rows(first)):
            raise PrecisionFlowError(
                f"{op} got shapes {', '.join(str(tuple(t.shape)) for t in tensors)}; "
                "they need the same numbers of rows and columns"
            )


def _check_weight(op: str, x: Tensor, weight: Tensor) -> None:
    if weight.dtype is not torch.bfloat16 or weight.shape != x.shape[-1:]:
        raise PrecisionFlowError(
            f"{op} got a weight of shape {tuple(weight.shape)} in "
            f"{short_name(weight.dtype)} for x {tuple(x.shape)}; it needs "
            f"{x.shape[-1]} numbers in BF16"
        )


def _check_kept(
    op: str,
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_scales: Tensor | None,
    up_scales: Tensor | None,
) -> None:
    """Check gate and up in BF16, or as codes with their scales."""
    if gate_scales is None and up_scales is None:
        return _check_activations(op, dy, gate, up)
    if gate_scales is None or up_scales is None:
        raise PrecisionFlowError(
            f"{op} got scales of one of gate and up; both are codes, or neither is"
        )
    _check_activations(op, dy)
    check_codes(op, "gate", gate, gate_scales, 1, 128)
    check_codes(op, "up", up, up_scales, 1, 128)
    _check_sizes(op, dy, gate, up)


def _unequal(a: Any, b: Any) -> bool:
    """Whether two sizes are known to differ; symbolic ones are not asked."""
    return isinstance(a, int) and isinstance(b, int) and a != b


def _rows(x: Tensor) -> Any:
    """The number of rows of (..., C), symbolic sizes too."""
    rows: Any = 1
    for size in x.shape[:-1]:
        rows = rows * size
    return rows


def _whole_shape(parts: Sequence[Tensor], dim: int) -> tuple[Any, Any]:
    length: Any = sum(part.shape[dim] for part in parts)
    other = parts[0].shape[1 - dim]
    return (length, other) if dim == 0 else (other, length)


def _twice(
    shape: tuple[Any, Any],
    rows: int,
    cols: int,
    rows_t: int,
    cols_t: int,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    straight = empty_quantized(shape, rows, cols, device)
    if rows_t < 0:
        return (
            *straight,
            torch.empty(_EMPTY, dtype=E4M3, device=device),
            torch.empty(_EMPTY, dtype=torch.float32, device=device),
        )
    return (*straight, *empty_quantized(shape[::-1], rows_t, cols_t, device, True))


def _quantize_parts(
    parts: Sequence[Tensor],
    dim: int,
    rows: int,
    cols: int,
    transpose: bool,
    scale_format: str,
    amax_floor: float,
    after: Tensor | None,
) -> tuple[Tensor, Tensor]:
    _check_parts(parts, dim)
    check_target(rows, cols, scale_format, amax_floor)
    return quantizers.quantize_parts(
        parts, dim, rows, cols, transpose, scale_format, amax_floor
    )


def _fake_quantize_parts(
    parts: Sequence[Tensor],
    dim: int,
    rows: int,
    cols: int,
    transpose: bool,
    scale_format: str,
    amax_floor: float,
    after: Tensor | None,
) -> tuple[Tensor, Tensor]:
    _check_parts(parts, dim)
    check_target(rows, cols, scale_format, amax_floor)
    shape = _whole_shape(parts, dim)
    return empty_quantized(
        shape[::-1] if transpose else shape, rows, cols, parts[0].device, transpose
    )


def _quantize_twice(
    parts: Sequence[Tensor], dim: int, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_parts(parts, dim)
    check_target(args[0], args[1], *args[-2:])
    return quantizers.quantize_twice(parts, dim, *args)


def _fake_quantize_twice(
    parts: Sequence[Tensor],
    dim: int,
    rows: int,
    cols: int,
    rows_t: int,
    cols_t: int,
    scale_format: str,
    amax_floor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_parts(parts, dim)
    check_target(rows, cols, scale_format, amax_floor)
    shape = _whole_shape(parts, dim)
    return _twice(shape, rows, cols, rows_t, cols_t, parts[0].device)


def _eps(eps: float, eps_tensor: Tensor | None) -> float:
    """Return eps; Dynamo makes a float of a module a tensor on the CPU."""
    return eps if eps_tensor is None else float(eps_tensor.item())


def _rms_norm_quantize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    eps_tensor: Tensor | None,
    *args: Any,
) -> tuple[Tensor, ...]:
    _check_activations("rms_norm_quantize", x, x if residual is None else residual)
    _check_weight("rms_norm_quantize", x, weight)
    check_target(args[0], args[1], *args[-2:])
    return quantizers.rms_norm_quantize(
        x, residual, weight, _eps(eps, eps_tensor), *args
    )


def _fake_rms_norm_quantize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    eps_tensor: Tensor | None,
    rows: int,
    cols: int,
    rows_t: int,
    cols_t: int,
    scale_format: str,
    amax_floor: float,
) -> tuple[Tensor, ...]:
    _check_activations("rms_norm_quantize", x, x if residual is None else residual)
    _check_weight("rms_norm_quantize", x, weight)
    check_target(rows, cols, scale_format, amax_floor)
    shape = (_rows(x), x.shape[-1])
    rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    total = torch.empty(
        (0,) if residual is None else x.shape, dtype=x.dtype, device=x.device
    )
    return (*_twice(shape, rows, cols, rows_t, cols_t, x.device), rstd, total)


def _check_rstd(x: Tensor, rstd: Tensor) -> None:
    _check_activations("scale_rows_quantize", x)
    if rstd.dtype is not torch.float32 or _unequal(rstd.numel(), _rows(x)):
        raise PrecisionFlowError(
            f"scale_rows_quantize got a factor of shape {tuple(rstd.shape)} in "
            f"{short_name(rstd.dtype)} for x {tuple(x.shape)}; it needs one FP32 "
            "number a row"
        )


def _scale_rows_quantize(
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    rows: int,
    cols: int,
    transpose: bool,
    scale_format: str,
    amax_floor: float,
    after: Tensor | None,
) -> tuple[Tensor, Tensor]:
    _check_rstd(x, rstd)
    _check_weight("scale_rows_quantize", x, weight)
    check_target(rows, cols, scale_format, amax_floor)
    return quantizers.scale_rows_quantize(
        x, rstd, weight, rows, cols, transpose, scale_format, amax_floor
    )


def _fake_scale_rows_quantize(
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    rows: int,
    cols: int,
    transpose: bool,
    scale_format: str,
    amax_floor: float,
    after: Tensor | None,
) -> tuple[Tensor, Tensor]:
    _check_rstd(x, rstd)
    _check_weight("scale_rows_quantize", x, weight)
    check_target(rows, cols, scale_format, amax_floor)
    shape = (_rows(x), x.shape[-1])
    return empty_quantized(
        shape[::-1] if transpose else shape, rows, cols, x.device, transpose
    )


def _silu_mul_quantize(gate: Tensor, up: Tensor, *args: Any) -> tuple[Tensor, ...]:
    _check_activations("silu_mul_quantize", gate, up)
    check_target(args[0], args[1], *args[-2:])
    return quantizers.silu_mul_quantize(gate, up, *args)


def _fake_silu_mul_quantize(
    gate: Tensor,
    up: Tensor,
    rows: int,
    cols: int,
    rows_t: int,
    cols_t: int,
    scale_format: str,
    amax_floor: float,
) -> tuple[Tensor, ...]:
    _check_activations("silu_mul_quantize", gate, up)
    check_target(rows, cols, scale_format, amax_floor)
    shape = (_rows(gate), gate.shape[-1])
    return _twice(shape, rows, cols, rows_t, cols_t, gate.device)


def _silu_mul_backward_quantize(
    dy: Tensor, gate: Tensor, up: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    _check_kept("silu_mul_backward_quantize", dy, gate, up, args[0], args[1])
    check_target(args[2], args[3], *args[-2:])
    return quantizers.silu_mul_backward_quantize(dy, gate, up, *args)


def _fake_silu_mul_backward_quantize(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_scales: Tensor | None,
    up_scales: Tensor | None,
    rows: int,
    cols: int,
    rows_dy: int,
    cols_dy: int,
    rows_x: int,
    cols_x: int,
    scale_format: str,
    amax_floor: float,
) -> tuple[Tensor, ...]:
    _check_kept("silu_mul_backward_quantize", dy, gate, up, gate_scales, up_scales)
    check_target(rows, cols, scale_format, amax_floor)
    tokens, width = _rows(dy), dy.shape[-1]
    return (
        *_twice((tokens, 2 * width), rows, cols, rows_dy, cols_dy, dy.device),
        *empty_quantized((width, tokens), rows_x, cols_x, dy.device, True),
    )


quantize_parts = define(
    "quantize_parts(Tensor[] parts, int dim, int rows, int cols, bool transpose, "
    f"{_QUANTIZER}, Tensor? after) -> (Tensor codes, Tensor scales)",
    _quantize_parts,
    _fake_quantize_parts,
)
quantize_twice = define(
    f"quantize_twice(Tensor[] parts, int dim, {_TWICE}, {_QUANTIZER}) "
    "-> (Tensor codes, Tensor scales, Tensor codes_t, Tensor scales_t)",
    _quantize_twice,
    _fake_quantize_twice,
)
rms_norm_quantize = define(
    "rms_norm_quantize(Tensor x, Tensor? residual, Tensor weight, float eps, "
    f"Tensor? eps_tensor, {_TWICE}, {_QUANTIZER}) -> (Tensor codes, Tensor scales, "
    "Tensor codes_t, Tensor scales_t, Tensor rstd, Tensor total)",
    _rms_norm_quantize,
    _fake_rms_norm_quantize,
)
scale_rows_quantize = define(
    "scale_rows_quantize(Tensor x, Tensor rstd, Tensor weight, int rows, int cols, "
    f"bool transpose, {_QUANTIZER}, Tensor? after) -> (Tensor codes, Tensor scales)",
    _scale_rows_quantize,
    _fake_scale_rows_quantize,
)
silu_mul_quantize = define(
    f"silu_mul_quantize(Tensor gate, Tensor up, {_TWICE}, {_QUANTIZER}) "
    "-> (Tensor codes, Tensor scales, Tensor codes_t, Tensor scales_t)",
    _silu_mul_quantize,
    _fake_silu_mul_quantize,
)
silu_mul_backward_quantize = define(
    "silu_mul_backward_quantize(Tensor dy, Tensor gate, Tensor up, "
    "Tensor? gate_scales, Tensor? up_scales, int rows, int cols, int rows_dy, "
    f"int cols_dy, int rows_x, int cols_x, {_QUANTIZER}) -> (Tensor codes, "
    "Tensor scales, Tensor codes_t, Tensor scales_t, Tensor x_codes_t, "
    "Tensor x_scales_t)",
    _silu_mul_backward_quantize,
    _fake_silu_mul_backward_quantize,
)
