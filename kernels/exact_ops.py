"""Operators that give a row the same bits in every batch, in the namespace `jetrl`.

    jetrl::rms_norm   x, weight, eps -> the norm, its factor
    jetrl::silu_mul   gate, up -> silu(gate) * up
    jetrl::rope       x, cos, sin -> x rotated
    jetrl::bf16_gemm  x, w -> x w^T in BF16, by a provider
    jetrl::log_probs  logits, labels -> log-probs of the labels

`jetrl_compile.kernels.reference_exact` says what they compute; attention is in
`attention_ops`. In exact mode a pass puts them in the place of the model's operators,
in the trainer and in the rollout model. All are differentiable, for use outside of a
compiled graph: their gradients are plain PyTorch, and need not be the same bits.
"""

from typing import Any

import torch
from torch import Tensor

from jetrl_compile.errors import PrecisionFlowError
from jetrl_compile.formats import short_name
from jetrl_compile.kernels import exact_kernels, reference_exact
from jetrl_compile.kernels.op_definition import define, differentiate


def _check_bf16(op: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype is not torch.bfloat16:
            raise PrecisionFlowError(
                f"{op} got {name} of shape {tuple(tensor.shape)} in "
                f"{short_name(tensor.dtype)}; exact mode needs BF16: convert the model "
                "with model.to(torch.bfloat16)"
            )


def _check_last(op: str, a: Tensor, b: Tensor) -> None:
    if a.shape[-1] != b.shape[-1]:
        raise PrecisionFlowError(
            f"{op} got shapes {tuple(a.shape)} and {tuple(b.shape)}; their last "
            "dimensions need to be equal"
        )


def _rms_norm(
    x: Tensor, weight: Tensor, eps: float | None, eps_tensor: Tensor | None
) -> tuple[Tensor, Tensor]:
    _check_bf16("rms_norm", x=x, weight=weight)
    _check_last("rms_norm", x, weight)
    # Dynamo makes a float of a module a tensor on the CPU.
    number = eps if eps_tensor is None else float(eps_tensor.item())
    assert number is not None
    return exact_kernels.rms_norm(x, weight, number)


def _fake_rms_norm(
    x: Tensor, weight: Tensor, eps: float | None, eps_tensor: Tensor | None
) -> tuple[Tensor, Tensor]:
    _check_bf16("rms_norm", x=x, weight=weight)
    _check_last("rms_norm", x, weight)
    rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), rstd


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    _check_bf16("silu_mul", gate=gate, up=up)
    _check_last("silu_mul", gate, up)
    return exact_kernels.silu_mul(gate, up)


def _fake_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    _check_bf16("silu_mul", gate=gate, up=up)
    _check_last("silu_mul", gate, up)
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    _check_bf16("rope", x=x, cos=cos, sin=sin)
    _check_last("rope", x, cos)
    return exact_kernels.rope(x, cos, sin)


def _fake_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    _check_bf16("rope", x=x, cos=cos, sin=sin)
    _check_last("rope", x, cos)
    return torch.empty_like(x)


def _bf16_gemm(x: Tensor, w: Tensor, provider: str) -> Tensor:
    _check_bf16("bf16_gemm", x=x, w=w)
    _check_last("bf16_gemm", x, w)
    return exact_kernels.bf16_gemm(x, w, provider)


def _fake_bf16_gemm(x: Tensor, w: Tensor, provider: str) -> Tensor:
    _check_bf16("bf16_gemm", x=x, w=w)
    _check_last("bf16_gemm", x, w)
    return torch.empty((x.shape[0], w.shape[0]), dtype=x.dtype, device=x.device)


def _log_probs(
    logits: Tensor, labels: Tensor, temperature: float, kernel: str
) -> Tensor:
    if temperature <= 0:
        raise PrecisionFlowError(
            f"log_probs got the temperature {temperature:g}; it needs to be above 0"
        )
    return exact_kernels.log_probs(logits, labels, temperature, kernel)


def _fake_log_probs(
    logits: Tensor, labels: Tensor, temperature: float, kernel: str
) -> Tensor:
    return torch.empty(labels.shape, dtype=torch.float32, device=logits.device)


rms_norm = define(
    "rms_norm(Tensor x, Tensor weight, float? eps, Tensor? eps_tensor) "
    "-> (Tensor y, Tensor rstd)",
    _rms_norm,
    _fake_rms_norm,
)
silu_mul = define(
    "silu_mul(Tensor gate, Tensor up) -> Tensor", _silu_mul, _fake_silu_mul
)
rope = define("rope(Tensor x, Tensor cos, Tensor sin) -> Tensor", _rope, _fake_rope)
bf16_gemm = define(
    "bf16_gemm(Tensor x, Tensor w, str provider) -> Tensor", _bf16_gemm, _fake_bf16_gemm
)
log_probs = define(
    "log_probs(Tensor logits, Tensor labels, float temperature, str kernel) -> Tensor",
    _log_probs,
    _fake_log_probs,
    repeats=False,
)


def _keep_norm(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, *_ = inputs
    ctx.save_for_backward(x, weight, output[1])


def _norm_backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, weight, rstd = ctx.saved_tensors
    unit = x.float() * rstd
    dunit = (dy * weight).float()
    dx = rstd * (dunit - unit * (dunit * unit).mean(-1, keepdim=True))
    dweight = (dy * unit.to(x.dtype)).reshape(-1, weight.shape[0]).sum(0)
    return dx.to(x.dtype), dweight, None, None


def _keep_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*(each for each in inputs if isinstance(each, Tensor)))
    ctx.rest = [each for each in inputs if not isinstance(each, Tensor)]


def _silu_mul_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    from jetrl_compile.kernels.reference_fused import silu_mul_backward

    return silu_mul_backward(dy, *ctx.saved_tensors)


def _rope_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    _, cos, sin = ctx.saved_tensors
    low, high = (dy * sin).chunk(2, -1)
    return dy * cos + torch.cat((high, -low), -1), None, None


def _gemm_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    return dy @ w, dy.t() @ x, None


def _log_probs_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    logits, labels = ctx.saved_tensors
    temperature, _ = ctx.rest
    scores = reference_exact.log_softmax(logits, temperature)
    grad = scores.exp().mul_(-dy.unsqueeze(-1))
    grad.scatter_add_(-1, labels.unsqueeze(-1), dy.unsqueeze(-1))
    return (grad / temperature).to(logits.dtype), None, None, None


differentiate("rms_norm", _norm_backward, _keep_norm)
differentiate("silu_mul", _silu_mul_backward, _keep_inputs)
differentiate("rope", _rope_backward, _keep_inputs)
differentiate("bf16_gemm", _gemm_backward, _keep_inputs)
differentiate("log_probs", _log_probs_backward, _keep_inputs)
