"""Attention that gives a token the same bits in a decode step and in a full forward.

`jetrl_reference` is an attention implementation for transformers that computes in
float64 and rounds once to the dtype of q. A batch, padding, a cache or another length
only change the order of its float64 sums, hence its result by about 1e-16 of its size;
after the one rounding to BF16 that shows in about one element of 1e13. The kernels that
PyTorch chooses on a CPU differ between decode and prefill in a large part of their
elements, which hides what a precision flow does or does not do.

It is an opaque, differentiable operator, `jetrl_examples::reference_attention`, so a
compiler neither splits nor reorders it. It is slow; the models here are small.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from jetrl_compile.errors import ModelError

NAME = "jetrl_reference"

_torch_library: Any = torch.library  # untyped
_LIBRARY = _torch_library.Library("jetrl_examples", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)


def use_reference_attention(model: PreTrainedModel) -> None:
    """Make a Hugging Face model, and copies made of it later, use this attention.

    Raises:
        ModelError: The model has no replaceable attention.
    """
    try:
        model.set_attn_implementation(NAME)
    except (ValueError, NotImplementedError) as error:
        raise ModelError(
            f"{type(model).__name__} takes no other attention: {error}; use a model "
            "of transformers that supports AttentionInterface"
        ) from error


def _weights(
    q: Tensor, k: Tensor, mask: Tensor | None, scaling: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Return softmax weights (B, Hkv, G, L, S), and tanh(s / softcap) if it is > 0."""
    scores = q @ k.unsqueeze(2).transpose(-1, -2) * scaling
    bounded = scores
    if softcap > 0:
        bounded = torch.tanh(scores / softcap)
        scores = softcap * bounded
    rows, columns = scores.shape[-2:]
    if mask is None:
        allowed = torch.ones(rows, columns, dtype=torch.bool, device=q.device)
        allowed = allowed.tril(columns - rows)
    else:
        allowed = mask[..., :columns]
        heads = (1, 1) if mask.shape[1] == 1 else q.shape[1:3]
        allowed = allowed.reshape(mask.shape[0], *heads, *allowed.shape[-2:])
    scores = scores.masked_fill(~allowed, -math.inf)
    # A padding row attends to nothing: weights of zero, not NaN.
    highest = scores.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(q.dtype).min)
    weights = torch.exp(scores - highest)
    total = weights.sum(dim=-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1.0), bounded


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q as (B, Hkv, G, L, D), k and v as (B, Hkv, S, D), all in float64."""
    return _split(q.double(), k.shape[1]), k.double(), v.double()


def _split(x: Tensor, heads: int) -> Tensor:
    """Return (B, heads * G, L, D) as (B, heads, G, L, D)."""
    return x.reshape(x.shape[0], heads, -1, *x.shape[2:])


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, softcap: float
) -> Tensor:
    grouped, keys, values = _grouped(q, k, v)
    weights, _ = _weights(grouped, keys, mask, scaling, softcap)
    out = (weights @ values.unsqueeze(2)).flatten(1, 2)
    return out.transpose(1, 2).to(q.dtype).contiguous()


def _backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grouped, keys, values = _grouped(q, k, v)
    weights, bounded = _weights(grouped, keys, mask, scaling, softcap)
    dout = _split(dy.double().transpose(1, 2), k.shape[1])
    dweights = dout @ values.unsqueeze(2).transpose(-1, -2)
    mean = (dweights * weights).sum(dim=-1, keepdim=True)
    dscores = weights * (dweights - mean) * scaling
    if softcap > 0:
        dscores = dscores * (1 - bounded.square())
    dq = (dscores @ keys.unsqueeze(2)).flatten(1, 2)
    dk = (dscores.transpose(-1, -2) @ grouped).sum(dim=2)
    dv = (weights.transpose(-1, -2) @ dout).sum(dim=2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    batch, heads, rows, _ = q.shape
    return q.new_empty(batch, rows, heads, v.shape[-1])


def _backward_fake(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_LIBRARY.define(
    "reference_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scaling, "
    "float softcap) -> Tensor",
    tags=_TAGS,
)
_LIBRARY.define(
    "reference_attention_backward(Tensor dy, Tensor q, Tensor k, Tensor v, "
    "Tensor? mask, float scaling, float softcap) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
for _name, _kernel, _fake in (
    ("reference_attention", _forward, _forward_fake),
    ("reference_attention_backward", _backward, _backward_fake),
):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    _torch_library.register_fake(f"jetrl_examples::{_name}", _fake, lib=_LIBRARY)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, mask, ctx.scaling, ctx.softcap = inputs
    ctx.save_for_backward(q, k, v, mask)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.jetrl_examples.reference_attention_backward(
        dy, *ctx.saved_tensors, ctx.scaling, ctx.softcap
    )
    return (*grads, None, None, None)


_torch_library.register_autograd(
    "jetrl_examples::reference_attention",
    _differentiate,
    setup_context=_setup_context,
    lib=_LIBRARY,
)


def reference_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' AttentionInterface asks for it.

    Args:
        module: The attention layer; not read.
        query: (B, Hq, L, D), floating, any strides.
        key: (B, Hkv, S, D); Hq is a multiple of Hkv.
        value: (B, Hkv, S, Dv).
        attention_mask: (B, 1 or Hq, L, S), bool: which keys a query reads (padding,
            causality and sliding windows included), or None for causal alone.
        dropout: Needs to be 0.
        scaling: What q k^T is multiplied by; None for 1 / sqrt(D).
        softcap: Bound of the scores, as in Gemma 2, or None.
        **kwargs: Others; only `s_aux`, attention sinks, would change the result.

    Returns:
        The result, (B, L, Hq, Dv), contiguous, dtype of `query`, and None for the
        attention weights. A row that may read nothing is zero.

    Raises:
        ModelError: Dropout or attention sinks are asked for, or the mask is additive.
    """
    if dropout > 0 or kwargs.get("s_aux") is not None:
        raise ModelError(
            f"{NAME} attention has neither dropout (found {dropout}) nor sinks; set "
            "attention_dropout to 0 or use another attention implementation"
        )
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise ModelError(
            f"{NAME} attention got a mask of {attention_mask.dtype}; needed is a bool "
            "mask that is true where a query may read a key"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = torch.ops.jetrl_examples.reference_attention(
        query, key, value, attention_mask, scaling, softcap or 0.0
    )
    return out, None


def reference_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return the bool mask that SDPA would get, and never leave it out.

    A mask that is left out depends on the batch (is there padding?), and a compiled
    model would be compiled once more for it.
    """
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


AttentionInterface.register(NAME, reference_attention)
AttentionMaskInterface.register(NAME, reference_mask)
