"""Which code runs attention in exact mode.

- `fa3`: FlashAttention 3 as vLLM ships it, one split; head size 128 on Hopper. Paged
  decode, chunks and packed batches give a query the same bits (measured on an H200).
- `triton`: `triton_attention`, other head sizes.
- `reference`: FP64, on a CPU.

Backward of both GPU kernels takes the result and the log-sum-exp: cuDNN's where each
row of a batch is one sequence, which is faster on Hopper, else PyTorch's flash
backward. They may add up in another order; no log-prob depends on it.
"""

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from jetrl_compile.errors import ProviderError
from jetrl_compile.kernels import reference_exact
from jetrl_compile.kernels.provider import no_hopper
from jetrl_compile.kernels.sequences import Sequences, find_sequences

KERNELS = ("fa3", "triton", "reference")
FA3_HEAD_SIZE = 128
"""The head size at which FA3 gives a query the same bits from pages as packed."""
CUDNN_VERSION = 90501  # from which on PyTorch hands it gradients of any strides
CUDNN_HEAD_SIZE = 128
"""The largest head size of which cuDNN computes gradients in all these versions."""
_FA3 = "vllm.vllm_flash_attn.flash_attn_interface"


@cache
def fa3_missing() -> str | None:
    """Return why FlashAttention 3 cannot run in this process, or None if it can."""
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed, whose build of FlashAttention 3 both sides run"
    return no_hopper()


def attention_kernel(device_type: str, head_size: int) -> str:
    """Return the kernel of an attention: the same one in trainer and rollout.

    Args:
        device_type: "cuda", "cpu", "meta".
        head_size: D.
    """
    if device_type != "cuda":
        return "reference"
    return "fa3" if head_size == FA3_HEAD_SIZE else "triton"


def check_kernel(kernel: str) -> None:
    """Check that a kernel can run in this process.

    Raises:
        ProviderError: It cannot.
    """
    why = fa3_missing() if kernel == "fa3" else None
    if why is not None:
        raise ProviderError(
            f"exact attention of head size {FA3_HEAD_SIZE} runs FlashAttention 3: "
            f"{why}; install vllm==0.24.0 beside the trainer, on Hopper"
        )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Run `reference_exact.attention` by a kernel; without a query, none."""
    rows, heads, queries, size = q.shape
    if not q.numel():
        out = torch.empty((rows, queries, heads, size), dtype=q.dtype, device=q.device)
        return out, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if kernel == "reference":
        return reference_exact.attention(q, k, v, mask, positions, scale)
    check_kernel(kernel)
    found = find_sequences(rows, queries, k.shape[2], mask, positions, q.device)
    run = _fa3 if kernel == "fa3" else _triton
    out, lse = run(_packed(q), _packed(k), _packed(v), found, scale)
    out = out.view(rows, queries, heads, size)
    return out, lse.view(-1, rows, queries).transpose(0, 1).contiguous()


def attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `reference_exact.attention_backward`, or cuDNN's or the flash backward.

    Returns:
        Gradients of q, k and v, of their shapes, in the order of (B, L, H, D).
    """
    if not q.numel():
        return _by_tokens(*(torch.zeros_like(x) for x in (q, k, v)))
    dy = dy.contiguous()  # the gradient of a sum has strides of 0
    if kernel == "reference":
        return _by_tokens(
            *reference_exact.attention_backward(dy, q, k, v, mask, positions, scale)
        )
    rows, _, queries, _ = q.shape
    found = find_sequences(rows, queries, k.shape[2], mask, positions, q.device)
    if found.are_rows and fits_cudnn(*q.shape) and has_cudnn_backward():
        # PyTorch keeps cuDNN's graphs by the strides of q, k and v, and asks neither
        # for those of dy nor of out (torch 2.11): all have one order here.
        ordered = _by_tokens(q, k, v)
        return _by_tokens(*_cudnn_backward(dy, *ordered, out, lse, scale))
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of no dropout
    grads = torch.ops.aten._flash_attention_backward(
        dy.reshape(-1, *dy.shape[2:]),
        _packed(q),
        _packed(k),
        _packed(v),
        out.view(-1, *out.shape[2:]),
        lse.transpose(0, 1).reshape(lse.shape[1], -1).contiguous(),
        found.starts_q,
        found.starts_k,
        found.longest_q,
        found.longest_k,
        0.0,
        True,
        state,
        state.new_empty(0),
        scale=scale,
    )
    return _by_tokens(
        *(grad.view(rows, -1, *grad.shape[1:]).transpose(1, 2) for grad in grads)
    )


def has_cudnn_backward() -> bool:
    """Return whether cuDNN computes gradients of attention here.

    It is asked by itself, so `torch.backends.cuda.enable_cudnn_sdp`, which importing
    vLLM turns off, does not matter. Where PyTorch is to be deterministic it is not
    used.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    cudnn: Any = torch.backends.cudnn  # untyped
    version = cudnn.version() if cudnn.enabled else None
    return not deterministic and (version or 0) >= CUDNN_VERSION and not no_hopper()


def fits_cudnn(rows: int, heads: int, queries: int, size: int) -> bool:
    """Return whether cuDNN computes gradients of q of this shape.

    Source: `check_cudnn_tensor_shapes` of PyTorch, which the operator does not ask.
    """
    return (
        max(rows, heads) < 65536
        and queries > 1
        and size <= CUDNN_HEAD_SIZE
        and size % 8 == 0
    )


def _cudnn_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> Any:
    """Run cuDNN's backward.

    Args:
        dy: (B, L, Hq, D), contiguous, as out is.
        q: (B, Hq, L, D), in the order of (B, L, Hq, D), as k and v are.
        k: (B, Hkv, L, D).
        v: (B, Hkv, L, D).
        out: The result.
        lse: The log-sum-exp, (B, Hq, L), contiguous.
        scale: What q k^T was multiplied by.
    """
    none = torch.zeros((), dtype=torch.int64, device=q.device)  # of no dropout
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dy.transpose(1, 2),
        q,
        k,
        v,
        out.transpose(1, 2),
        lse.unsqueeze(-1),
        none,
        none,
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        True,
        scale=scale,
    )


def _by_tokens(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bring three of (B, H, L, D) into the order of (B, L, H, D)."""
    return in_token_order(q), in_token_order(k), in_token_order(v)


def in_token_order(x: Tensor) -> Tensor:
    """Return (B, H, L, D) in the memory order of (B, L, H, D), copied if it is not."""
    turned = x.transpose(1, 2)
    if not x.numel():  # contiguous, whatever its strides
        turned = turned.new_empty(turned.shape)
    return turned.contiguous().transpose(1, 2)


def _packed(x: Tensor) -> Tensor:
    """Return (B, H, L, D) as (B L, H, D)."""
    turned = x.transpose(1, 2)
    return turned.reshape(-1, *turned.shape[2:])


def _fa3(
    q: Tensor, k: Tensor, v: Tensor, found: Sequences, scale: float
) -> tuple[Tensor, Tensor]:
    library = _fa3_library()
    out, lse, *_ = library.flash_attn_varlen_func(
        q,
        k,
        v,
        found.longest_q,
        found.starts_q,
        found.longest_k,
        cu_seqlens_k=found.starts_k,
        softmax_scale=scale,
        causal=True,
        return_softmax_lse=True,
        num_splits=1,
        fa_version=3,
    )
    return out, lse


@cache
def _fa3_library() -> Any:
    """Import FA3 as vLLM ships it, without what importing vLLM turns off.

    vLLM's platform disables cuDNN's attention in the whole process, which a model that
    runs PyTorch's attention beside would pay for.
    """
    cuda: Any = torch.backends.cuda  # untyped
    enabled = cuda.cudnn_sdp_enabled()
    try:
        return importlib.import_module(_FA3)
    finally:
        cuda.enable_cudnn_sdp(enabled)


def _triton(
    q: Tensor, k: Tensor, v: Tensor, found: Sequences, scale: float
) -> tuple[Tensor, Tensor]:
    from jetrl_compile.kernels.triton_attention import packed_attention

    return packed_attention(
        q, k, v, found.starts_q, found.starts_k, found.longest_q, scale
    )
