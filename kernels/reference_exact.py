"""What the operators of `jetrl_compile.kernels.exact_ops` compute, in PyTorch.

Rounding points are those of Hugging Face's model code. A row of a result depends on
that row's operands alone: sums over other things than a row's own elements do not
occur, and the two products of matrices (attention, `bf16_gemm`) add in FP64 and round
once, so that another shape of the same rows changes about one BF16 element of 1e13.
"""

import math

import torch
from torch import Tensor

from jetrl_compile.kernels import reference_fused

NARROW = 256
"""Rows of up to so many elements are normalized several a program on a GPU, heads of q
and k above all: no fused operator adds up their squares in the same order."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `reference_fused.rms_norm`: the norm in BF16, and its factor in FP32."""
    return reference_fused.rms_norm(x, weight, eps)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) rounded to BF16, times up, rounded."""
    return reference_fused.silu(gate) * up


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each row: x cos + cat(-x2, x1) sin.

    Both products and the sum are rounded to the dtype of x.

    Args:
        x: (..., D) in BF16, D even.
        cos: (..., D) in BF16, broadcast over the leading dimensions of x.
        sin: Like `cos`.
    """
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def bf16_gemm(x: Tensor, w: Tensor) -> Tensor:
    """Return x w^T in BF16, added in FP64.

    Args:
        x: (M, K) in BF16.
        w: (N, K) in BF16.
    """
    return (x.double() @ w.double().t()).to(torch.bfloat16)


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Return log-probs in FP32, nats, of logits that are divided by a temperature.

    Widen, divide (by a tensor: dividing by a number multiplies by its reciprocal on a
    GPU), then PyTorch's `log_softmax` of FP32: as vLLM's sampler computes
    "processed_logprobs". Where logits are in place, their rows are.

    Args:
        logits: (..., V), BF16 or FP32.
        temperature: Above 0.
    """
    wide = logits.float()
    if temperature != 1.0:
        divisor = torch.full((1,), temperature, dtype=wide.dtype, device=wide.device)
        wide = wide / divisor
    return torch.log_softmax(wide, -1)


def attention_mask(
    rows: int, columns: int, mask: Tensor | None, positions: Tensor | None, like: Tensor
) -> Tensor:
    """Return which keys each query reads, (B, rows, columns), bool.

    Query i is the key i + columns - rows; it reads the keys of its sequence up to
    itself.

    Args:
        rows: Queries a row of the batch.
        columns: Keys a row of the batch.
        mask: (B, columns), bool: which keys are tokens; None: all.
        positions: (B, rows), integer: where a position does not follow on the one
            before it, another sequence begins. Read where rows = columns. None: each
            row of the batch is one sequence.
        like: Of the device.
    """
    allowed = torch.ones(rows, columns, dtype=torch.bool, device=like.device)
    allowed = allowed.tril(columns - rows).unsqueeze(0)
    if mask is not None:
        allowed = allowed & mask.bool().unsqueeze(1)
    if positions is not None and rows == columns:
        breaks = positions[:, 1:] != positions[:, :-1] + 1
        sequence = torch.nn.functional.pad(breaks.long().cumsum(-1), (1, 0))
        allowed = allowed & (sequence.unsqueeze(1) == sequence.unsqueeze(2))
    return allowed


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Causal attention in FP64, rounded once.

    Args:
        q: (B, Hq, L, D).
        k: (B, Hkv, S, D), S >= L; Hq is a multiple of Hkv.
        v: (B, Hkv, S, D).
        mask: As in `attention_mask`.
        positions: As in `attention_mask`.
        scale: What q k^T is multiplied by.

    Returns:
        (B, L, Hq, D) in the dtype of q, zero where a query may read nothing, and the
        log-sum-exp of each query's scores in FP32, (B, Hq, L), nats.
    """
    weights, lse = _weights(q, k, mask, positions, scale)
    out = (weights @ v.double().unsqueeze(2)).flatten(1, 2)
    return out.transpose(1, 2).to(q.dtype).contiguous(), lse.flatten(1, 2).float()


def attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients for q, k and v in their dtypes; dy is (B, L, Hq, D)."""
    weights, _ = _weights(q, k, mask, positions, scale)
    dout = _grouped(dy.double().transpose(1, 2), k.shape[1])
    dweights = dout @ v.double().unsqueeze(2).transpose(-1, -2)
    mean = (dweights * weights).sum(-1, keepdim=True)
    dscores = weights * (dweights - mean) * scale
    dq = (dscores @ k.double().unsqueeze(2)).flatten(1, 2)
    dk = (dscores.transpose(-1, -2) @ _grouped(q.double(), k.shape[1])).sum(2)
    dv = (weights.transpose(-1, -2) @ dout).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _grouped(x: Tensor, heads: int) -> Tensor:
    """Return (B, heads * G, L, D) as (B, heads, G, L, D)."""
    return x.reshape(x.shape[0], heads, -1, *x.shape[2:])


def _weights(
    q: Tensor, k: Tensor, mask: Tensor | None, positions: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return softmax weights (B, Hkv, G, L, S) in FP64, and the log-sum-exp."""
    scores = _grouped(q.double(), k.shape[1]) @ k.double().unsqueeze(2).mT * scale
    rows, columns = scores.shape[-2:]
    allowed = attention_mask(rows, columns, mask, positions, q)[:, None, None]
    scores = scores.masked_fill(~allowed, -math.inf)
    lse = torch.logsumexp(scores, -1)
    kept = lse.masked_fill(lse == -math.inf, 0.0)  # a padding row reads nothing
    return torch.exp(scores - kept.unsqueeze(-1)), lse
