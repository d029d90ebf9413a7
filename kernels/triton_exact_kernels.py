"""The Triton kernels of exact mode; `triton_exact` launches them.

The rounding points are those of `reference_exact`: each product and sum of BF16 numbers
is rounded on its own, so no fused multiply-add can take its place.
"""

from collections.abc import Callable
from typing import Any

from jetrl_compile.kernels.triton_common import jit, round_bf16, tl
from jetrl_compile.kernels.triton_norm_kernels import _scaled
from jetrl_compile.kernels.triton_silu_math import sigmoid


def _kernel(function: Callable[..., Any]) -> Any:
    """Make a kernel of which no other is compiled for another batch.

    Another one might spread its reads over threads, and so add, in another order.
    """
    return jit(function, do_not_specialize=["rows", "n1", "n2"])


@jit
def _row_offset(
    row: tl.tensor,
    n1: tl.tensor,
    n2: tl.tensor,
    s0: tl.tensor,
    s1: tl.tensor,
    s2: tl.tensor,
) -> tl.tensor:
    outer, inner = row // n2, row % n2
    return (outer // n1) * s0 + (outer % n1) * s1 + inner * s2


@_kernel
def head_norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    rstd: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    n1: tl.tensor,
    n2: tl.tensor,
    x0: tl.tensor,
    x1: tl.tensor,
    x2: tl.tensor,
    eps: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
) -> None:
    """Normalize ROWS short rows: heads of q or k."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    at = _row_offset(row, n1, n2, x0, x1, x2)[:, None] + col[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    squares = tl.sum(value * value, axis=1)
    factor = tl.rsqrt(tl.div_rn(squares, cols.to(tl.float32)) + eps)
    w = tl.load(weight + col, mask=col < cols, other=0.0).to(tl.float32)
    result = _scaled(value, factor[:, None], w[None, :])
    tl.store(y + row[:, None] * cols + col[None, :], result, mask=inside)
    tl.store(rstd + row, factor, mask=row < rows)


@_kernel
def rope_kernel(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    half: tl.tensor,
    n1: tl.tensor,
    n2: tl.tensor,
    x0: tl.tensor,
    x1: tl.tensor,
    x2: tl.tensor,
    c0: tl.tensor,
    c1: tl.tensor,
    c2: tl.tensor,
    s0: tl.tensor,
    s1: tl.tensor,
    s2: tl.tensor,
    o0: tl.tensor,
    o1: tl.tensor,
    o2: tl.tensor,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """Rotate ROWS rows of 2 half elements."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, HALF)
    inside = (row < rows)[:, None] & (col < half)[None, :]
    to_x = _row_offset(row, n1, n2, x0, x1, x2)[:, None] + col[None, :]
    to_cos = _row_offset(row, n1, n2, c0, c1, c2)[:, None] + col[None, :]
    to_sin = _row_offset(row, n1, n2, s0, s1, s2)[:, None] + col[None, :]
    to_out = _row_offset(row, n1, n2, o0, o1, o2)[:, None] + col[None, :]
    low = tl.load(x + to_x, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x + to_x + half, mask=inside, other=0.0).to(tl.float32)
    cos_low = tl.load(cos + to_cos, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + to_cos + half, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + to_sin, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + to_sin + half, mask=inside, other=0.0).to(tl.float32)
    first = round_bf16(low * cos_low) - round_bf16(high * sin_low)
    second = round_bf16(high * cos_high) + round_bf16(low * sin_high)
    tl.store(out + to_out, round_bf16(first).to(tl.bfloat16), mask=inside)
    tl.store(out + to_out + half, round_bf16(second).to(tl.bfloat16), mask=inside)


@_kernel
def silu_mul_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    y: tl.tensor,
    cols: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Compute silu(gate) * up for BLOCK elements of a row, as the fused kernels do."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < cols
    g = tl.load(gate + row * gate_stride + col, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + col, mask=inside, other=0.0).to(tl.float32)
    silu = round_bf16(g * sigmoid(g))
    tl.store(y + row * cols + col, round_bf16(silu * u).to(tl.bfloat16), mask=inside)


@_kernel
def log_probs_kernel(
    out: tl.tensor,
    logits: tl.tensor,
    labels: tl.tensor,
    stride: tl.tensor,
    temperature: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """Compute a row's log-prob of its label: x - max - log(sum(exp(x - max)))."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    highest = float("-inf")
    for start in range(0, SIZE, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(logits + col, mask=col < SIZE, other=float("-inf")).to(tl.float32)
        if SCALED:
            x = x / temperature
        highest = tl.max(tl.maximum(x, highest))
    total = 0.0
    for start in range(0, SIZE, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(logits + col, mask=col < SIZE, other=0.0).to(tl.float32)
        if SCALED:
            x = x / temperature
        total += tl.sum(tl.where(col < SIZE, tl.exp(x - highest), 0.0))
    picked = tl.load(logits + tl.load(labels + row)).to(tl.float32)
    if SCALED:
        picked = picked / temperature
    tl.store(out + row, picked - highest - tl.log(total))
