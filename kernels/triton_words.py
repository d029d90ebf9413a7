"""Words of two BF16 numbers in Triton kernels: adjacent columns, the first one low.

Both halves are rounded, multiplied and compared by one instruction, and cross from
thread to thread together. Words are int32 tensors of any shape.
"""

from jetrl_compile.kernels import triton_common
from jetrl_compile.kernels.triton_common import (
    INTERPRETED,
    encode,
    jit,
    round_bf16,
    tl,
)


@jit
def low(word: tl.tensor) -> tl.tensor:
    """Return the first of the two BF16 numbers of each word, in FP32."""
    return (word << 16).to(tl.float32, bitcast=True)


@jit
def high(word: tl.tensor) -> tl.tensor:
    """Return the second of the two BF16 numbers of each word, in FP32."""
    return (word & -65536).to(tl.float32, bitcast=True)


@jit
def pack(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """Return words of two FP32 numbers, each rounded to BF16 (nearest even)."""
    if INTERPRETED:
        a = round_bf16(first).to(tl.int32, bitcast=True)
        b = round_bf16(second).to(tl.int32, bitcast=True)
        return ((a >> 16) & 0xFFFF) | (b & -65536)
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;",
        "=r,f,f",
        [first, second],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@jit
def multiply(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Return words of the products of BF16 numbers, rounded to BF16."""
    if INTERPRETED:
        return pack(low(a) * low(b), high(a) * high(b))
    return tl.inline_asm_elementwise(
        "mul.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1
    )


@jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Return the larger one of each half of two words, as unsigned numbers."""
    if INTERPRETED:
        return tl.maximum(a & 0xFFFF, b & 0xFFFF) | (tl.maximum(a >> 16, b >> 16) << 16)
    return tl.inline_asm_elementwise(
        "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1
    )


@jit
def _largest(word: tl.tensor, axis: tl.constexpr) -> tl.tensor:
    """Return the largest magnitudes of the halves along an axis, in FP32; NaN wins."""
    # Without their signs, BF16 numbers are ordered as their bits are.
    bits = word & 0x7FFF7FFF
    if INTERPRETED:
        first, second = tl.max(bits & 0xFFFF, axis), tl.max(bits >> 16, axis)
    else:
        top = tl.reduce(bits, axis, _larger)
        first, second = top & 0xFFFF, top >> 16
    return (
        (first << 16).to(tl.float32, bitcast=True),
        (second << 16).to(tl.float32, bitcast=True),
    )


@jit
def row_amax(word: tl.tensor) -> tl.tensor:
    """Return the amax of each row, (rows,), of words (rows, any)."""
    first, second = _largest(word, 1)
    return tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)


@jit
def column_amax(quad: tl.tensor) -> tl.tensor:
    """Return the amax of even columns, and of odd ones, each (64,)."""
    a = _larger(quad[0] & 0x7FFF7FFF, quad[1] & 0x7FFF7FFF)
    b = _larger(quad[2] & 0x7FFF7FFF, quad[3] & 0x7FFF7FFF)
    return _largest(_larger(a, b), 0)


@jit
def encode_pair(first: tl.tensor, second: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return the E4M3 codes of two adjacent columns in int16; arguments of `encode`."""
    if INTERPRETED:
        a = encode(first, scale).to(tl.uint8, bitcast=True).to(tl.int16)
        return a | (encode(second, scale).to(tl.uint8, bitcast=True).to(tl.int16) << 8)
    return tl.inline_asm_elementwise(
        "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;",
        "=h,f,f",
        [triton_common._quotient(first, scale), triton_common._quotient(second, scale)],
        dtype=tl.int16,
        is_pure=True,
        pack=1,
    )
