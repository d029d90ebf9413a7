"""Norms of vLLM IR as the trainer computes them, for models that run eagerly.

Where vLLM compiles a model a pass writes the same operators (`spelling`). Source of the
formulas: transformers 5, modeling_llama.py.
"""

import torch
from torch import Tensor
from vllm import ir

PROVIDER = "jetrl"
OPS = ("rms_norm", "fused_add_rms_norm")


def _fits(x: Tensor, weight: Tensor | None, variance_size: int | None) -> bool:
    return (
        variance_size is None
        and weight is not None
        and x.dtype is torch.bfloat16
        and weight.dtype is torch.bfloat16
    )


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.to(torch.float32)
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * (wide * rstd).to(torch.bfloat16)


def register_norms() -> None:
    """Make the implementations known to vLLM IR, once."""
    if PROVIDER in ir.ops.rms_norm.impls:
        return

    @ir.ops.rms_norm.register_impl(  # type: ignore[untyped-decorator, unused-ignore]
        PROVIDER,
        supports_args=lambda x, weight, epsilon, variance_size=None: _fits(
            x, weight, variance_size
        ),
    )
    def rms_norm(
        x: Tensor,
        weight: Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> Tensor:
        assert weight is not None
        return _norm(x, weight, epsilon)

    @ir.ops.fused_add_rms_norm.register_impl(  # type: ignore[untyped-decorator, unused-ignore]
        PROVIDER,
        supports_args=lambda x, x_residual, weight, epsilon, variance_size=None: _fits(
            x, weight, variance_size
        ),
    )
    def fused_add_rms_norm(
        x: Tensor,
        x_residual: Tensor,
        weight: Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Add in BF16, and normalize the rounded sum."""
        assert weight is not None
        total = x_residual + x
        return _norm(total, weight, epsilon), total


def prefer_norms() -> None:
    """Let vLLM IR run them first in this process."""
    for name in OPS:
        op = getattr(ir.ops, name)
        before = [impl for impl in op.get_priority() if impl != PROVIDER]
        op.set_default([PROVIDER, *before])
