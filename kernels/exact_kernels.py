"""Which code runs an operator of exact mode: Triton or a library on a GPU.

On a GPU nothing falls back: another kernel would give other bits, so what cannot run is
an error.
"""

import torch
from torch import Tensor

from jetrl_compile.errors import PrecisionFlowError, ProviderError
from jetrl_compile.kernels import reference_exact
from jetrl_compile.kernels.launch_recorder import call_library
from jetrl_compile.kernels.layouts import align
from jetrl_compile.kernels.provider_deep_gemm import DEEP_GEMM, library

BF16_GEMMS = ("deep_gemm", "reference")
"""Providers of `bf16_gemm`, the one for GPUs first."""

LOG_PROBS = ("aten", "blocks")
"""Kernels of `log_probs`: PyTorch's log_softmax, as the sampler of vLLM's first model
runner has it, and sums over blocks of 1024, as that of its second one. The same on a
CPU."""


def bf16_gemm_provider(device_type: str) -> str:
    """Return the provider of `bf16_gemm` on a device.

    Args:
        device_type: "cuda", "cpu", "meta".

    Raises:
        ProviderError: It cannot run in this process.
    """
    if device_type != "cuda":
        return "reference"
    why = DEEP_GEMM.usable()
    if why is not None:
        raise ProviderError(
            f"exact mode runs BF16 GEMMs (the output head) by deep_gemm: {why}; "
            "install 'jetrl-compile[hopper]'"
        )
    return "deep_gemm"


def _triton(x: Tensor, op: str) -> bool:
    if not x.is_cuda:
        return False
    from jetrl_compile.kernels.triton_common import triton_missing

    why = triton_missing()
    if why is not None:
        raise ProviderError(
            f"exact mode runs {op} by Triton on a GPU: {why}; install triton"
        )
    return True


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Run `reference_exact.rms_norm`; both results are contiguous."""
    if _triton(x, "rms_norm"):
        from jetrl_compile.kernels import triton_exact

        return triton_exact.rms_norm(x, weight, eps)
    y, rstd = reference_exact.rms_norm(x, weight, eps)
    return y.contiguous(), rstd.contiguous()


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Run `reference_exact.silu_mul`; the result is contiguous."""
    if _triton(gate, "silu_mul"):
        from jetrl_compile.kernels import triton_exact

        return triton_exact.silu_mul(gate, up)
    return reference_exact.silu_mul(gate, up).contiguous()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Run `reference_exact.rope`; the result is laid out as x is."""
    if _triton(x, "rope"):
        from jetrl_compile.kernels import triton_exact

        return triton_exact.rope(x, cos, sin)
    return torch.empty_like(x).copy_(reference_exact.rope(x, cos, sin))


def bf16_gemm(x: Tensor, w: Tensor, provider: str) -> Tensor:
    """Run `reference_exact.bf16_gemm` by a provider.

    DeepGEMM writes rows that begin at multiples of 16 bytes: for N that is no multiple
    of 8 they are written so, and copied.

    Raises:
        ProviderError: The provider has no such GEMM, or not for this K.
    """
    if provider == "reference":
        return reference_exact.bf16_gemm(x, w)
    if provider != "deep_gemm":
        raise ProviderError(
            f"provider {provider!r} has no batch-invariant BF16 GEMM; use one of "
            f"{', '.join(BF16_GEMMS)}"
        )
    (m, k), n = x.shape, w.shape[0]
    if k % 8:
        raise ProviderError(
            f"deep_gemm got a BF16 GEMM of {m}x{n}x{k}; it reads rows of multiples of "
            "8 elements: pad the hidden size"
        )
    x, w = x.contiguous(), w.contiguous()
    if not k:
        return torch.zeros((m, n), dtype=x.dtype, device=x.device)
    out = torch.empty((m, align(n, 8)), dtype=x.dtype, device=x.device)[:, :n]
    if out.numel():
        call_library(library().bf16_gemm_nt, (x, w, out))
    return out.contiguous()


def log_probs(
    logits: Tensor, labels: Tensor, temperature: float, kernel: str
) -> Tensor:
    """Run `reference_exact.log_softmax` and choose the labels'.

    Args:
        logits: (..., V), BF16 or FP32.
        labels: (...), int64.
        temperature: Above 0.
        kernel: One of `LOG_PROBS`.

    Raises:
        PrecisionFlowError: The kernel is unknown; or on a GPU V is no multiple of 4,
            and the order of a row's sums depends on its address modulo 16 bytes.
    """
    if kernel not in LOG_PROBS:
        raise PrecisionFlowError(
            f"log_probs got the kernel {kernel!r}; use one of {', '.join(LOG_PROBS)}"
        )
    if logits.is_cuda and logits.shape[-1] % 4:
        raise PrecisionFlowError(
            f"log_probs got a vocabulary of {logits.shape[-1]}; on a GPU it needs a "
            "multiple of 4, so that every row of logits begins at 16 bytes: pad the "
            "output head"
        )
    if kernel == "blocks" and _triton(logits, "log_probs"):
        from jetrl_compile.kernels import triton_exact

        return triton_exact.log_probs(logits, labels, temperature)
    scores = reference_exact.log_softmax(logits, temperature)
    return scores.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
