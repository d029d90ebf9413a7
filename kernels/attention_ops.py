"""Attention that gives a query the same bits in every batch: `jetrl::attention`.

`jetrl_compile.kernels.reference_exact` says what it computes, `attention_kernels` which
code runs it. It is opaque to compilers, and differentiable.
"""

from typing import Any

import torch
from torch import Tensor

from jetrl_compile.errors import PrecisionFlowError
from jetrl_compile.formats import short_name
from jetrl_compile.kernels import attention_kernels
from jetrl_compile.kernels.op_definition import define, differentiate


def _check(q: Tensor, k: Tensor, v: Tensor, kernel: str) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype is not torch.bfloat16 or tensor.dim() != 4:
            raise PrecisionFlowError(
                f"attention got {name} of shape {tuple(tensor.shape)} in "
                f"{short_name(tensor.dtype)}; exact mode needs (batch, heads, tokens, "
                "head size) in BF16: convert the model with model.to(torch.bfloat16)"
            )
    if kernel not in attention_kernels.KERNELS:
        raise PrecisionFlowError(
            f"attention got the kernel {kernel!r}; use one of "
            f"{', '.join(attention_kernels.KERNELS)}"
        )


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    _check(q, k, v, kernel)
    return attention_kernels.attention(q, k, v, mask, positions, scale, kernel)


def _fake_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    _check(q, k, v, kernel)
    rows, heads, queries, size = q.shape
    out = torch.empty((rows, queries, heads, size), dtype=q.dtype, device=q.device)
    lse = torch.empty((rows, heads, queries), dtype=torch.float32, device=q.device)
    return out, lse


def _attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return attention_kernels.attention_backward(dy, q, k, v, *rest)


def _fake_attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    turned = (x.transpose(1, 2) for x in (q, k, v))
    dq, dk, dv = (x.new_empty(x.shape).transpose(1, 2) for x in turned)
    return dq, dk, dv


attention = define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? positions, "
    "float scale, str kernel) -> (Tensor out, Tensor lse)",
    _attention,
    _fake_attention,
    repeats=False,
)
attention_backward = define(
    "attention_backward(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor out, "
    "Tensor lse, Tensor? mask, Tensor? positions, float scale, str kernel) "
    "-> (Tensor dq, Tensor dk, Tensor dv)",
    _attention_backward,
    _fake_attention_backward,
    repeats=False,
)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, mask, positions, ctx.scale, ctx.kernel = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, mask, positions)


def _backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    grads = attention_backward(dy, *ctx.saved_tensors, ctx.scale, ctx.kernel)
    return (*grads, None, None, None, None)


differentiate("attention", _backward, _keep)
