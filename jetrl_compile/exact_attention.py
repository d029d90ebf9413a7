"""Attention of exact mode in Hugging Face's models: `jetrl_exact`.

    use_exact_attention(model)

It goes through transformers' attention interface, so that a model, and copies made of
it later, run `jetrl::attention`. Masks are of padding alone: causality and packed
sequences (by `position_ids`) are the operator's.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from jetrl_compile.errors import ModelError
from jetrl_compile.kernels.attention_kernels import attention_kernel, check_kernel
from jetrl_compile.kernels.attention_ops import attention

NAME = "jetrl_exact"


def use_exact_attention(model: PreTrainedModel) -> None:
    """Make a Hugging Face model run the attention of exact mode.

    Frequencies of rotary embeddings that `model.to(torch.bfloat16)` rounded are made
    again in FP32, as an engine has them.

    Args:
        model: A causal model; its config changes.

    Raises:
        ModelError: The model's attention cannot be replaced.
        ProviderError: The kernel for its head size cannot run in this process.
    """
    for module in model.modules():
        size = getattr(module, "head_dim", None)
        if isinstance(size, int):
            device = next(module.parameters(), torch.empty(0)).device
            check_kernel(attention_kernel(device.type, size))
        frequencies = getattr(module, "inv_freq", None)
        if isinstance(frequencies, Tensor) and frequencies.dtype != torch.float32:
            _make_again(module, frequencies.device)
    try:
        model.set_attn_implementation(NAME)
    except (ValueError, NotImplementedError) as error:
        raise ModelError(
            f"{type(model).__name__} takes no other attention: {error}; exact mode "
            "needs a model of transformers that supports AttentionInterface"
        ) from error


def _make_again(module: Any, device: torch.device) -> None:
    """Give a rotary embedding the buffers that it was made with."""
    fresh = type(module)(config=module.config)
    for name, buffer in fresh.named_buffers():
        setattr(module, name, buffer.to(device))


def is_exact(model: nn.Module) -> bool:
    """Return whether a model runs the attention of exact mode."""
    config = getattr(model, "config", None)
    return getattr(config, "_attn_implementation", "") == NAME


def exact_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' AttentionInterface asks for it.

    Args:
        module: The attention layer; not read.
        query: (B, Hq, L, D), BF16, any strides.
        key: (B, Hkv, S, D), S >= L; Hq is a multiple of Hkv.
        value: (B, Hkv, S, D).
        attention_mask: (B, S), bool: which keys are tokens; None: all.
        dropout: Needs to be 0.
        scaling: What q k^T is multiplied by; None for 1 / sqrt(D).
        **kwargs: `position_ids`, (B or 1, L), tells packed sequences apart. Sliding
            windows, soft caps and sinks have no kernel.

    Returns:
        The result, (B, L, Hq, D), contiguous, in BF16, and None for the weights.

    Raises:
        ModelError: Something is asked for that the kernels do not do.
    """
    unknown = [
        name
        for name in ("sliding_window", "softcap", "s_aux")
        if kwargs.get(name) is not None
    ]
    if dropout > 0:
        unknown.append(f"dropout={dropout}")
    if unknown:
        raise ModelError(
            f"exact attention has no kernel with {', '.join(unknown)}; use a model "
            "with full causal attention, and attention_dropout=0"
        )
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ModelError(
            f"exact attention got a mask of shape {tuple(attention_mask.shape)}; it "
            "needs one of padding, (batch, keys): pass attention_mask in two dimensions"
        )
    size = query.shape[-1]
    out, _ = attention(
        query,
        key,
        value,
        attention_mask,
        kwargs.get("position_ids"),
        float(size) ** -0.5 if scaling is None else scaling,
        attention_kernel(query.device.type, size),
    )
    return out, None


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *args: Any,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return which keys are tokens, (B, S), bool, or None where all may be."""
    if attention_mask is None:
        return None
    return attention_mask[:, -kv_length:].to(torch.bool)


AttentionInterface.register(NAME, exact_attention)
AttentionMaskInterface.register(NAME, padding_mask)
