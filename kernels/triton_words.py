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
def low_again(word: tl.tensor) -> tl.tensor:
    """As `low`, by another instruction.

    Where a tile is encoded twice, the compiler would keep what `low` returned in
    registers from the first time to the second, and there is no room for it.
    """
    if INTERPRETED:
        return low(word)
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, 0x1044;", "=f,r", [word], tl.float32, True, 1
    )


@jit
def high_again(word: tl.tensor) -> tl.tensor:
    """As `high`, by another instruction: see `low_again`."""
    if INTERPRETED:
        return high(word)
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, 0x3244;", "=f,r", [word], tl.float32, True, 1
    )


@jit
def _lows(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Return words of the first halves of two words."""
    if INTERPRETED:
        return (a & 0xFFFF) | (b << 16)
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [a, b], tl.int32, True, 1
    )


@jit
def _highs(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Return words of the second halves of two words."""
    if INTERPRETED:
        return ((a >> 16) & 0xFFFF) | (b & -65536)
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [a, b], tl.int32, True, 1
    )


@jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Return the larger magnitude of each half of two words; NaN wins.

    The signs of the result mean nothing.
    """
    if INTERPRETED:
        # Without their signs, BF16 numbers are ordered as their bits are.
        a, b = a & 0x7FFF7FFF, b & 0x7FFF7FFF
        return tl.maximum(a & 0xFFFF, b & 0xFFFF) | (tl.maximum(a >> 16, b >> 16) << 16)
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1
    )


@jit
def _largest(word: tl.tensor, axis: tl.constexpr) -> tl.tensor:
    """Return the largest magnitudes of the halves along an axis, in FP32; NaN wins."""
    if INTERPRETED:
        bits = word & 0x7FFF7FFF
        first, second = tl.max(bits & 0xFFFF, axis), tl.max(bits >> 16, axis) << 16
    else:
        top = tl.reduce(word, axis, _larger)
        first, second = top & 0x7FFF, top & 0x7FFF0000
    return (
        (first << 16).to(tl.float32, bitcast=True),
        second.to(tl.float32, bitcast=True),
    )


@jit
def row_amaxes(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Return the amaxes of the rows of two tensors of words, (rows,) each.

    Rows of one and of the other cross from thread to thread in one word.
    """
    return _largest(_larger(_lows(a, b), _highs(a, b)), 1)


@jit
def column_amax(quad: tl.tensor) -> tl.tensor:
    """Return the amax of even columns, and of odd ones, each (64,)."""
    a, b = _larger(quad[0], quad[1]), _larger(quad[2], quad[3])
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
