"""Operators of vLLM in plain PyTorch, in its namespaces: norms, attention, all-reduce.

`vllm_engine_model` runs them, where vLLM is not installed.
"""

from typing import Any

import torch
from torch import Tensor, nn

_library: Any = torch.library
_IR = _library.Library("vllm_ir", "FRAGMENT")
_VLLM = _library.Library("vllm", "FRAGMENT")
_NORM = "(Tensor x, Tensor? weight, float epsilon, int? variance_size=None) -> Tensor"
_ADD = "Tensor x, Tensor x_residual, Tensor? weight, float epsilon"
_ATTENTION = (
    "unified_attention_with_output(Tensor query, Tensor key, Tensor value, "
    "Tensor(a!) output, str layer_name) -> ()"
)


def _rms_norm(
    x: Tensor, weight: Tensor, epsilon: float, variance_size: int | None = None
) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return wide.to(weight.dtype) * weight


def _add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """vLLM's native form: the norm reads the sum in FP32."""
    wide = x.to(torch.float32) + x_residual.to(torch.float32)
    total = wide.to(x.dtype)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return wide.to(weight.dtype) * weight, total


def _attention(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, layer_name: str
) -> None:
    q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
    mixed = nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    output.copy_(mixed[0].transpose(0, 1))


def define_operators() -> None:
    """Define vLLM's operators, unless they are there."""
    if hasattr(torch.ops.vllm_ir, "rms_norm"):
        return
    _IR.define(f"rms_norm{_NORM}")
    _IR.define(
        f"fused_add_rms_norm({_ADD}, int? variance_size=None) -> (Tensor, Tensor)"
    )
    _VLLM.define(_ATTENTION)
    _VLLM.define("all_reduce(Tensor x, str group) -> Tensor")
    key = "CompositeExplicitAutograd"
    for library, name, kernel in (
        (_IR, "rms_norm", _rms_norm),
        (_IR, "fused_add_rms_norm", _add_rms_norm),
        (_VLLM, "unified_attention_with_output", _attention),
        (_VLLM, "all_reduce", lambda x, group: x.clone()),
    ):
        library.impl(name, kernel, key)
        fake = (lambda *_: None) if kernel is _attention else kernel
        _library.register_fake(f"{library.ns}::{name}", fake, lib=library)
