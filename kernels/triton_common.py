"""What all Triton kernels share: the guarded import, and the quantizer's arithmetic.

This module imports without Triton; then `triton_missing` says so, and what `jit`
decorates must not be called. Kernel modules take `jit`, `tl` and `triton` from here.
Annotate their parameters `tl.tensor` or `tl.constexpr`: Triton's compiler reads these
names, and it knows no `Any`.

The jit helpers give the bits of `reference.quantize` (a NaN code is always 0x7f; in
PyTorch it has the sign that the hardware gave to the NaN). On Triton's CPU interpreter,
which truncates casts to BF16 and E4M3 and has no fused multiply-add, they compute the
same bits in another way.
"""

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from jetrl_compile.formats import AMAX_FLOOR
from jetrl_compile.kernels.triton_device import capability

_MISSING: str | None = None
triton: Any
tl: Any
try:
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
except ImportError:
    _MISSING = "triton is not installed"
    tl = SimpleNamespace(constexpr=lambda value: value, tensor=Any)
    triton = SimpleNamespace(jit=lambda function, **options: function)


def jit(function: Callable[..., Any], **options: Any) -> Any:
    """Return a Triton kernel; without Triton, what cannot be launched.

    Args:
        function: Its source.
        options: Of `triton.jit`.
    """
    return triton.jit(function, **options)


# Below this, the remainder of a division in `encode` could lose bits to underflow.
SMALLEST_FLOOR = 1e-20


@jit
def magnitude(x: tl.tensor) -> tl.tensor:
    """Return the bits of |x|, which are ordered as |x| is, with NaN on top.

    Args:
        x: Any shape, in BF16 or FP32.

    Returns:
        int16 for BF16 (two of which fit into one register), int32 for FP32.
    """
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.int16, bitcast=True) & 0x7FFF
    else:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return bits


@jit
def largest(bits: tl.tensor, axis: tl.constexpr) -> tl.tensor:
    """Return the FP32 number that the largest of what `magnitude` returned stands for.

    Args:
        bits: Any shape, in int16 or int32.
        axis: The axis that vanishes.
    """
    top = tl.max(bits, axis=axis).to(tl.int32)
    if bits.dtype == tl.int16:
        top = top << 16
    return top.to(tl.float32, bitcast=True)


@jit
def absmax(x: tl.tensor, axis: tl.constexpr) -> tl.tensor:
    """Return the largest magnitude along an axis in FP32; a NaN wins.

    Args:
        x: Any shape, in BF16 (which takes fewer registers) or FP32. Masked elements
            must be 0.
        axis: The axis that vanishes.
    """
    return largest(magnitude(x), axis)


@jit
def region_scale(
    amax: tl.tensor, FLOOR: tl.constexpr, UE8M0: tl.constexpr
) -> tl.tensor:
    """Return `max(amax, floor) / 448`, a true division; NaN and infinity stay.

    Args:
        amax: FP32, any shape, at least 0.
        FLOOR: The smallest amax that a scale is made from; at least `SMALLEST_FLOOR`.
        UE8M0: Whether the scale is rounded up to a power of two.
    """
    amax = tl.maximum(amax, FLOOR, propagate_nan=tl.PropagateNan.ALL)
    if INTERPRETED:
        scale = tl.div_rn(amax, 448.0)
    else:
        # The bits of a true division by 448, for 2 fused multiply-adds: tried for every
        # mantissa. The remainder of infinity is NaN, and then the maximum is -infinity;
        # it is no other number than the remainder elsewhere.
        scale = amax * (1.0 / 448.0)
        excess = tl.fma(scale, tl.full(amax.shape, 448.0, tl.float32), amax * -1.0)
        excess = tl.maximum(excess, amax * -1.0)
        minus = tl.full(amax.shape, -1.0 / 448.0, tl.float32)
        scale = tl.fma(excess, minus, scale)
    if UE8M0:
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & ~0x7FFFFF
        power = bits.to(tl.float32, bitcast=True)
        scale = tl.where(scale == scale, power, scale)
    return scale


@jit
def encode(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return E4M3 codes (float8e4nv) of BF16 values: x / scale, rounded to even.

    The codes are those of a true division, for a multiplication and a fused
    multiply-add an element: x is multiplied by 1 / scale in two parts. Tried for every
    amax and every x that BF16 holds; and for all 2^30 pairs of a BF16 mantissa and a
    scale's, but for a scale of 24 ones, which no BF16 amax gives. No clamp is needed:
    |x| is at most the amax that made the scale, and the cast saturates.

    Args:
        x: BF16, or FP32 that BF16 holds exactly.
        scale: FP32, from `region_scale` of the amax of such values, of a shape that
            broadcasts to that of `x`.
    """
    x = x.to(tl.float32)
    if INTERPRETED:
        return _round_e4m3(tl.div_rn(x, scale))
    return _quotient(x, scale).to(tl.float8e4nv)


@jit
def encode_words(
    x0: tl.tensor, x1: tl.tensor, x2: tl.tensor, x3: tl.tensor, scale: tl.tensor
) -> tl.tensor:
    """Return the codes of four tensors packed in int32, the first in the lowest byte.

    Where these are four rows of a matrix, the words are 4 adjacent codes of its
    transpose, and cost no more instructions than a cast.

    Args:
        x0: As `x` of `encode`.
        x1: The same.
        x2: The same.
        x3: The same.
        scale: As in `encode`.
    """
    if INTERPRETED:
        low = _byte(encode(x0, scale)) | (_byte(encode(x1, scale)) << 8)
        high = _byte(encode(x2, scale)) | (_byte(encode(x3, scale)) << 8)
        return low | (high << 16)
    return _pack(
        _quotient(x0.to(tl.float32), scale),
        _quotient(x1.to(tl.float32), scale),
        _quotient(x2.to(tl.float32), scale),
        _quotient(x3.to(tl.float32), scale),
    )


@jit
def _pack(q0: tl.tensor, q1: tl.tensor, q2: tl.tensor, q3: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }
        """,
        "=r,f,f,f,f",
        [q0, q1, q2, q3],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@jit
def _byte(code: tl.tensor) -> tl.tensor:
    return code.to(tl.uint8, bitcast=True).to(tl.int32)


@jit
def encode_words_fp32(
    x0: tl.tensor, x1: tl.tensor, x2: tl.tensor, x3: tl.tensor, scale: tl.tensor
) -> tl.tensor:
    """Return what `encode_words` returns, of any FP32 values and any scale.

    Three operations an element: the quotient is x times the correctly rounded 1 /
    scale, corrected once by its remainder, which is exact. Tried for every mantissa of
    a scale with every x within 3 units in the last place of a boundary of two codes.
    """
    if INTERPRETED:
        return encode_words(x0, x1, x2, x3, scale)
    reciprocal = _reciprocal(scale)
    return _pack(
        _divide(x0, scale, reciprocal),
        _divide(x1, scale, reciprocal),
        _divide(x2, scale, reciprocal),
        _divide(x3, scale, reciprocal),
    )


@jit
def decode(code: tl.tensor) -> tl.tensor:
    """Return the values of E4M3 codes (float8e4nv) in FP32, NaN included."""
    value = code.to(tl.float32)
    if INTERPRETED:
        low = _byte(code) & 0x7F
        value = tl.where(low == 0x7F, float("nan"), value)
    return value


@jit
def _approximate_reciprocal(scale: tl.tensor) -> tl.tensor:
    """Return 1 / scale with an error of 1 unit in the last place; 0 of infinity."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;",
        "=f,f",
        [scale],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@jit
def _quotient(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    # 1 / scale = high + low, so that x high + x low, rounded once, is the quotient.
    # Less 2 units in the last place of high, low is at least 0, and then the sum keeps
    # the sign of x = -0. The maxima make both 0 for an infinite scale, whose high would
    # be below 0 as an integer, and whose low would be NaN.
    high = tl.maximum(_approximate_reciprocal(scale).to(tl.int32, bitcast=True) - 2, 0)
    high = high.to(tl.float32, bitcast=True)
    low = tl.fma(scale * -1.0, high, tl.full(high.shape, 1.0, tl.float32)) * high
    return tl.fma(x, tl.broadcast_to(high, x.shape), x * tl.maximum(low, 0.0))


@jit
def _reciprocal(scale: tl.tensor) -> tl.tensor:
    """Return 1 / scale, correctly rounded wherever that matters; 0 of infinity."""
    near = _approximate_reciprocal(scale)
    # One Newton step; for an infinite scale the error would be NaN. For a scale of 24
    # ones the step may miss the last bit, which is 1.
    error = tl.fma(scale * -1.0, near, tl.full(near.shape, 1.0, tl.float32))
    bits = tl.fma(tl.maximum(error, -1.0), near, near).to(tl.int32, bitcast=True)
    ones = (scale.to(tl.int32, bitcast=True) & 0x7FFFFF) == 0x7FFFFF
    return (bits | ones.to(tl.int32)).to(tl.float32, bitcast=True)


@jit
def _divide(x: tl.tensor, scale: tl.tensor, reciprocal: tl.tensor) -> tl.tensor:
    # For an infinite scale the quotient is 0, and 0 * infinity must not become NaN.
    divisor = tl.broadcast_to(tl.minimum(scale, LARGEST), x.shape)
    # Times -1 and not `-`, which Triton takes for `0 -`: the signs of zeros matter.
    minus = tl.broadcast_to(reciprocal * -1.0, x.shape)
    quotient = x * reciprocal
    return tl.fma(tl.fma(quotient, divisor, x * -1.0), minus, quotient)


@jit
def round_bf16(x: tl.tensor) -> tl.tensor:
    """Return FP32 values rounded to BF16 (nearest even), still in FP32."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), float("nan"))
    return x.to(tl.bfloat16).to(tl.float32)


@jit
def dot_bf16(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Return the product of two BF16 tiles in FP32."""
    if INTERPRETED:  # it takes BF16 for integers; its FP32 sums differ between rows
        wide = tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64)
        return wide.to(tl.float32)
    return tl.dot(a, b)


@jit
def _round_e4m3(x: tl.tensor) -> tl.tensor:
    bits = x.to(tl.int32, bitcast=True)
    sign, bits = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    # Normal: add half a step, less one where the result is even; rebias the exponent.
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1) - (120 << 23)) >> 20
    # Subnormal (below 2^-6): adding 2^14 rounds to multiples of 2^-9.
    shifted = bits.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(bits < 0x3C800000, subnormal, tl.minimum(normal, 0x7E))
    code = tl.where(x == x, code | sign, 0x7F)
    return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


# The largest number in FP32.
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
# Whether the kernels run on Triton's CPU interpreter: TRITON_INTERPRET=1 when this
# module was imported.
INTERPRETED = tl.constexpr(type(encode).__name__ == "InterpretedFunction")


def triton_missing() -> str | None:
    """Return why there is no Triton, or None if there is."""
    return _MISSING


def interpreted() -> bool:
    """Return whether the kernels run on Triton's CPU interpreter."""
    return type(encode).__name__ == "InterpretedFunction"


def cannot_run(tensors: list[Tensor], amax_floor: float = AMAX_FLOOR) -> str | None:
    """Return why kernels cannot read these tensors here, or None if they can.

    Args:
        tensors: All inputs of a kernel.
        amax_floor: Of the quantizer.
    """
    if _MISSING is not None:
        return _MISSING
    if amax_floor < SMALLEST_FLOOR:
        return f"the amax floor {amax_floor:g} is below {SMALLEST_FLOOR:g}"
    if interpreted():
        return None
    for tensor in tensors:
        if not tensor.is_cuda:
            return f"Triton runs on CUDA, and a tensor is on {tensor.device}"
    device = tensors[0].device
    if any(tensor.device != device for tensor in tensors):
        return "the tensors are on different devices"
    if torch.version.hip is None and capability(device) < (8, 9):
        return "the GPU has no E4M3: compute capability below 8.9"
    return None


def no_words(tensor: Tensor) -> str | None:
    """Return why kernels cannot compare two BF16 numbers at once, or None if they can.

    Args:
        tensor: One that a kernel that compares words (`triton_words`) reads.
    """
    if not tensor.is_cuda or torch.version.hip is not None:
        return None
    if capability(tensor.device) >= (9, 0):
        return None
    return "the GPU compares no words of two BF16 numbers: capability below 9.0"


def rows_of(x: Tensor) -> Tensor:
    """Return (..., C) as (R, C) with adjacent columns; a view where that is possible.

    The rows may lie further apart than C, as in a column slice of a wider matrix.
    """
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        x = x.contiguous()
    return x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.reshape(0, 0)
