"""What the fused operators of `jetrl_compile.kernels.fused_ops` mean, in PyTorch.

Each is a composition of the model's own operators, rounded where Hugging Face's model
code rounds, with `reference.quantize`. It is the oracle of the Triton kernels: given
the BF16 matrix that is quantized, codes and scales must be equal bit for bit. The
matrix itself may differ in the last bit of BF16 where the order of an FP32 sum, or the
last bit of an exponential, differs.

"Quantizing twice" is quantizing a matrix for the GEMM at hand and its transpose for
wgrad, from one read. `rows_t` below 0 means that the transpose is not wanted; its codes
and scales are then empty, of shape (0, 0).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from jetrl_compile.kernels import reference

Quantized = tuple[Tensor, Tensor]
QuantizedTwice = tuple[Tensor, Tensor, Tensor, Tensor]


def quantize_parts(
    parts: Sequence[Tensor],
    dim: int,
    rows: int,
    cols: int,
    transpose: bool,
    scale_format: str,
    amax_floor: float,
) -> Quantized:
    """Quantize matrices that lie side by side as one: `quantize(cat(parts, dim), ...)`.

    Args:
        parts: Matrices in BF16 that differ in size only along `dim`; any strides.
        dim: 0: the parts are below each other (weights of a fused GEMM); 1: beside
            each other (gradients of a fused GEMM's outputs).
        rows: As in `reference.quantize`, of the quantized matrix.
        cols: As in `reference.quantize`.
        transpose: Whether the transpose of the whole is what is quantized.
        scale_format: As in `reference.quantize`.
        amax_floor: As in `reference.quantize`.
    """
    return reference.quantize(
        _whole(parts, dim), rows, cols, transpose, scale_format, amax_floor
    )


def quantize_twice(
    parts: Sequence[Tensor],
    dim: int,
    rows: int,
    cols: int,
    rows_t: int,
    cols_t: int,
    scale_format: str,
    amax_floor: float,
) -> QuantizedTwice:
    """Quantize `cat(parts, dim)`, (R, C), and its transpose, (C, R).

    Args:
        parts: As in `quantize_parts`.
        dim: As in `quantize_parts`.
        rows: Rows of a region of the matrix.
        cols: Columns of a region of the matrix.
        rows_t: Rows of a region of the transpose; below 0: it is not made.
        cols_t: Columns of a region of the transpose.
        scale_format: As in `reference.quantize`.
        amax_floor: As in `reference.quantize`.

    Returns:
        Codes and scales of the matrix, and of its transpose.
    """
    whole = _whole(parts, dim)
    straight = reference.quantize(whole, rows, cols, False, scale_format, amax_floor)
    if rows_t < 0:
        return (
            *straight,
            straight[0].new_empty((0, 0)),
            straight[1].new_empty((0, 0)),
        )
    turned = reference.quantize(whole, rows_t, cols_t, True, scale_format, amax_floor)
    return (*straight, *turned)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalize rows by their root mean square, as Llama and Qwen do.

    In FP32: `x * rsqrt(mean(x^2) + eps)`, rounded to BF16; times `weight`, rounded.

    Args:
        x: (..., C) in BF16.
        weight: (C,) in BF16.
        eps: Added to the mean square.

    Returns:
        (..., C) in BF16, and the factor `rsqrt(...)` in FP32, (..., 1).
    """
    wide = x.to(torch.float32)
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return scale_rows(x, rstd, weight), rstd


def scale_rows(x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    """Return what `rms_norm` returns, from the factor that it returned."""
    return weight * (x.to(torch.float32) * rstd).to(torch.bfloat16)


def rms_norm_quantize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    rows: int,
    cols: int,
    rows_t: int,
    cols_t: int,
    scale_format: str,
    amax_floor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Add a residual (rounded to BF16), normalize, and quantize once or twice.

    Args:
        x: (..., C) in BF16; R rows in all.
        residual: (..., C) in BF16, or None.
        weight: (C,) in BF16.
        eps: Of the norm.
        rows: As in `quantize_twice`.
        cols: As in `quantize_twice`.
        rows_t: As in `quantize_twice`.
        cols_t: As in `quantize_twice`.
        scale_format: As in `reference.quantize`.
        amax_floor: As in `reference.quantize`.

    Returns:
        Codes (R, C), scales, codes of the transpose (C, R), their scales; the factor
        of the norm in FP32, (..., 1); and the sum in BF16, (..., C), which is empty,
        (0,), without a residual.
    """
    total = x.new_empty((0,)) if residual is None else x + residual
    y, rstd = rms_norm(x if residual is None else total, weight, eps)
    flat = y.reshape(-1, y.shape[-1])
    made = quantize_twice(
        [flat], 0, rows, cols, rows_t, cols_t, scale_format, amax_floor
    )
    return (*made, rstd, total)


def scale_rows_quantize(
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    rows: int,
    cols: int,
    transpose: bool,
    scale_format: str,
    amax_floor: float,
) -> Quantized:
    """Make again, and quantize, what a norm returned: for wgrad, in backward.

    Args:
        x: (..., C) in BF16, what was normalized; R rows in all.
        rstd: (..., 1) in FP32, the factor that `rms_norm_quantize` returned.
        weight: (C,) in BF16.
        rows: As in `reference.quantize`.
        cols: As in `reference.quantize`.
        transpose: Whether the transpose, (C, R), is what is quantized.
        scale_format: As in `reference.quantize`.
        amax_floor: As in `reference.quantize`.
    """
    y = scale_rows(x, rstd, weight)
    flat = y.reshape(-1, y.shape[-1])
    return reference.quantize(flat, rows, cols, transpose, scale_format, amax_floor)


def silu(gate: Tensor) -> Tensor:
    """Return gate / (1 + exp(-gate)), in FP32, rounded to BF16."""
    wide = gate.to(torch.float32)
    return (wide / (torch.exp(-wide) + 1)).to(torch.bfloat16)


def silu_mul_quantize(
    gate: Tensor,
    up: Tensor,
    rows: int,
    cols: int,
    rows_t: int,
    cols_t: int,
    scale_format: str,
    amax_floor: float,
) -> QuantizedTwice:
    """Return silu(gate) * up, each rounded to BF16, quantized once or twice.

    Args:
        gate: (..., C) in BF16; R rows in all. The last dimension is contiguous; rows
            may lie further apart than C, as in the result of a fused GEMM.
        up: Like `gate`.
        rows: As in `quantize_twice`.
        cols: As in `quantize_twice`.
        rows_t: As in `quantize_twice`.
        cols_t: As in `quantize_twice`.
        scale_format: As in `reference.quantize`.
        amax_floor: As in `reference.quantize`.

    Returns:
        As `quantize_twice`, of an (R, C) matrix.
    """
    y = silu(gate) * up
    flat = y.reshape(-1, y.shape[-1])
    return quantize_twice(
        [flat], 0, rows, cols, rows_t, cols_t, scale_format, amax_floor
    )


def silu_mul_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of silu(gate) * up for gate and up, in BF16.

    In FP32: s = sigmoid(gate); `dgate = (dy * up) s (gate (1 - s) + 1)`, with dy * up
    rounded to BF16; `dup = dy * silu(gate)`. As PyTorch decomposes silu's backward.
    """
    wide = gate.to(torch.float32)
    sigmoid = torch.sigmoid(wide)
    outer = (dy * up).to(torch.float32) * sigmoid
    dgate = outer * (wide * (1 - sigmoid) + 1)
    return dgate.to(torch.bfloat16), dy * silu(gate)


def silu_mul_backward_quantize(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of silu(gate) * up, quantized twice; and its result, for wgrad.

    Args:
        dy: (..., C) in BF16, the gradient of silu(gate) * up; R rows in all.
        gate: (..., C) in BF16, or (R, C) codes in E4M3 that were kept for backward.
        up: Like `gate`.
        gate_scales: FP32 scales of 1x128 groups where `gate` is codes: it is
            dequantized to BF16 first.
        up_scales: The same of `up`.
        rows: Rows of a region of the gradients, for dgrad.
        cols: Columns of such a region.
        rows_dy: Rows of a region of the transposed gradients, for the wgrad of gate
            and up.
        cols_dy: Columns of such a region.
        rows_x: Rows of a region of the transpose of silu(gate) * up, for the wgrad of
            the layer that reads it.
        cols_x: Columns of such a region.
        scale_format: As in `reference.quantize`.
        amax_floor: As in `reference.quantize`.

    Returns:
        Codes (R, 2 C) and scales of [dgate, dup]; of its transpose (2 C, R); and of
        the transpose of silu(gate) * up, (C, R).
    """
    if gate_scales is not None and up_scales is not None:
        gate = reference.dequantize(gate, gate_scales, 1, 128, torch.bfloat16)
        up = reference.dequantize(up, up_scales, 1, 128, torch.bfloat16)
    flat = [t.reshape(-1, t.shape[-1]) for t in (dy, gate, up)]
    both = torch.cat(silu_mul_backward(*flat), 1)
    made = quantize_twice(
        [both], 0, rows, cols, rows_dy, cols_dy, scale_format, amax_floor
    )
    y = silu(flat[1]) * flat[2]
    remade = reference.quantize(y, rows_x, cols_x, True, scale_format, amax_floor)
    return (*made, *remade)


def _whole(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
