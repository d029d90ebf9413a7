"""Launches of the Triton kernels of exact mode; `triton_exact_kernels` has them.

How a kernel is spread over the GPU depends on the length of a row alone, so that a row
has the same bits whatever the other rows are.
"""

import torch
from torch import Tensor

from jetrl_compile.formats import AMAX_FLOOR
from jetrl_compile.kernels import triton_norm
from jetrl_compile.kernels.launch_recorder import launch_kernel
from jetrl_compile.kernels.reference_exact import NARROW
from jetrl_compile.kernels.triton_common import rows_of
from jetrl_compile.kernels.triton_device import on_device
from jetrl_compile.kernels.triton_exact_kernels import (
    head_norm_kernel,
    log_probs_kernel,
    rope_kernel,
    silu_mul_kernel,
)
from jetrl_compile.kernels.triton_launch import TILE

HEAD_ROWS = 16
ROPE_ROWS = 16
ELEMENTS = 2048  # of a program of `silu_mul_kernel`


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Run `reference_exact.rms_norm`.

    A row of more than 256 elements is normalized by the kernel that quantizes what it
    makes, and the codes are dropped: without them Triton would spread a row over
    threads in another way, and add its squares in another order.

    Args:
        x: (..., C) in BF16, columns adjacent.
        weight: (C,) in BF16.
        eps: Added to the mean square.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    cols = x.shape[-1]
    if cols > NARROW or not y.numel():
        made = triton_norm.rms_norm_quantize(
            x, None, weight, eps, 1, TILE, -1, 0, "fp32", AMAX_FLOOR, y
        )
        return y, made[4]
    rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    weight = weight.contiguous()
    x, sizes, strides = _three_strides(x)
    rows = y.numel() // cols
    with on_device(x):
        launch_kernel(head_norm_kernel, (-(-rows // HEAD_ROWS),))(
            x,
            weight,
            y,
            rstd,
            rows,
            cols,
            *sizes,
            *strides,
            eps,
            ROWS=HEAD_ROWS,
            COLS=1 << (cols - 1).bit_length(),
            num_warps=4,
        )
    return y, rstd


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Run `reference_exact.silu_mul`; each element on its own.

    Args:
        gate: (..., C) in BF16, columns adjacent.
        up: Like `gate`.
    """
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if not y.numel():
        return y
    a, b = rows_of(gate), rows_of(up)
    rows, cols = a.shape
    with on_device(gate):
        launch_kernel(silu_mul_kernel, (rows, -(-cols // ELEMENTS)))(
            a, b, y, cols, a.stride(0), b.stride(0), BLOCK=ELEMENTS, num_warps=8
        )
    return y


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Run `reference_exact.rope`; each element on its own.

    Args:
        x: (..., D) in BF16. More than 4 dimensions, or columns that are not adjacent,
            may cost a copy.
        cos: (..., D) in BF16, broadcast over the leading dimensions of x.
        sin: Like `cos`.
    """
    out = torch.empty_like(x)
    if not x.numel():
        return out
    size = x.shape[-1]
    cos, sin = cos.expand(x.shape), sin.expand(x.shape)
    x, sizes, strides = _three_strides(x)
    written, _, to = _three_strides(out)  # a copy where `out` has no such strides
    cos, _, of_cos = _three_strides(cos)
    sin, _, of_sin = _three_strides(sin)
    rows = x.numel() // size
    with on_device(x):
        launch_kernel(rope_kernel, (-(-rows // ROPE_ROWS),))(
            x,
            cos,
            sin,
            written,
            rows,
            size // 2,
            *sizes,
            *strides,
            *of_cos,
            *of_sin,
            *to,
            ROWS=ROPE_ROWS,
            HALF=1 << (size // 2 - 1).bit_length(),
            num_warps=4,
            # Else LLVM makes a product that is rounded to BF16, and the sum that reads
            # it, one multiply-add in BF16, which rounds once.
            enable_fp_fusion=False,
        )
    if written.data_ptr() == out.data_ptr():
        return out
    return out.copy_(written.view(out.shape))


def log_probs(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the log-probs of labels, each row's sum in blocks of 1024.

    Args:
        logits: (..., V), BF16 or FP32.
        labels: (...), int64.
        temperature: Above 0.
    """
    # In FP32, as samplers have them: how a row is spread over threads depends on it.
    flat, picked = rows_of(logits.float()), labels.reshape(-1).contiguous()
    out = torch.empty(picked.shape, dtype=torch.float32, device=logits.device)
    if out.numel():
        with on_device(logits):
            launch_kernel(log_probs_kernel, (flat.shape[0],))(
                out,
                flat,
                picked,
                flat.stride(0),
                temperature,
                SIZE=flat.shape[1],
                BLOCK=1024,
                SCALED=temperature != 1.0,
                num_warps=4,
            )
    return out.view(labels.shape)


def _three_strides(x: Tensor) -> tuple[Tensor, tuple[int, int], tuple[int, ...]]:
    """Return a tensor with adjacent columns, its 2nd and 3rd size, and 3 strides.

    Row r of up to four dimensions is at r // (n1 n2), r // n2 % n1, r % n2.
    """
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    if x.dim() > 4:
        x = x.reshape(-1, *x.shape[-3:])
    shape = [1] * (4 - x.dim()) + list(x.shape)
    stride = [0] * (4 - x.dim()) + list(x.stride())
    return x, (shape[1], shape[2]), tuple(stride[:3])
