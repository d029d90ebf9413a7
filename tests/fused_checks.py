"""What tests of the fused Triton kernels share: operands, and checks of results.

The BF16 matrix that a kernel quantizes is read back (`kept`): codes and scales must be
the reference's of that matrix, bit for bit, and the matrix PyTorch's but for last bits.
"""

import os

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from jetrl_compile.kernels import (
    reference,
    reference_fused,
    triton_norm,
    triton_silu,
)
from jetrl_compile.kernels.layouts import code_strides

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS, FLOOR = 1e-6, 1e-10
GROUP, BLOCK = (1, 128), (128, 128)
NONE = (-1, 128)


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(shape, generator=generator, device=DEVICE)
    return x.mul_(std).bfloat16()


def halves(rows: int, cols: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Gate and up as a fused GEMM returns them: halves of the columns of a buffer."""
    both = normal(rows, 2 * cols, seed=seed, std=3.0)
    return both[:, :cols], both[:, cols:]


def empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)


def bits(x: Tensor) -> Tensor:
    """The bits of codes or of BF16 or FP32 values, with one NaN."""
    kinds = {1: (torch.uint8, 0x7F), 2: (torch.int16, 0x7FC0), 4: (torch.int32, -1)}
    kind, nan = kinds[x.element_size()]
    return x.contiguous().view(kind).masked_fill(x.float().isnan(), nan)


def same(got: Tensor, wanted: Tensor) -> bool:
    return got.dtype == wanted.dtype and torch.equal(bits(got), bits(wanted))


def check_quantized(
    got: tuple[Tensor, ...],
    matrix: Tensor,
    region: tuple[int, int],
    transpose: bool = False,
    scale_format: str = "fp32",
) -> None:
    codes, scales = got
    wanted = reference.quantize(matrix, *region, transpose, scale_format, FLOOR)
    assert same(scales, wanted[1])
    assert same(codes, wanted[0])
    if codes.numel():
        assert codes.stride() == code_strides(codes.shape[0], codes.shape[1], transpose)
        aligned = -(-scales.shape[0] // 4) * 4
        assert scales.stride()[:1] == ((1,) if region[0] == 1 else scales.shape[1:])
        assert region[0] != 1 or scales.shape[1] == 1 or scales.stride(1) == aligned


def check_near(got: Tensor, wanted: Tensor, rare: float = 2e-3) -> None:
    """At most two last bits of BF16 apart, and seldom at all."""
    assert torch.equal(got.isnan(), wanted.isnan())
    ordered = [
        torch.where(b < 0, -(b & 0x7FFF), b)
        for b in (bits(got).int(), bits(wanted).int())
    ]
    steps = (ordered[0] - ordered[1]).abs()
    if steps.numel():
        assert steps.max().item() <= 2
        assert (steps > 0).float().mean().item() <= rare + 2 / steps.numel()


def check_norm(
    x: Tensor,
    residual: Tensor | None,
    turned: tuple[int, int] = BLOCK,
    scale_format: str = "fp32",
    weight: Tensor | None = None,
) -> None:
    weight = normal(x.shape[-1], seed=3) if weight is None else weight
    args = (x, residual, weight, EPS, *GROUP, *turned, scale_format, FLOOR)
    assert triton_norm.rms_norm_quantize_rejects(*args) is None
    kept = empty(x.numel() // x.shape[-1], x.shape[-1])
    made = triton_norm.rms_norm_quantize(*args, kept=kept)
    total = x if residual is None else x + residual
    assert same(made[5], x.new_empty(0) if residual is None else total)
    y, rstd = reference_fused.rms_norm(total, weight, EPS)
    torch.testing.assert_close(made[4], rstd, rtol=1e-6, atol=0, equal_nan=True)
    check_near(kept, y.reshape(kept.shape))
    check_quantized(made[:2], kept, GROUP, False, scale_format)
    if turned == NONE:
        assert made[2].shape == made[3].shape == (0, 0)
    else:
        check_quantized(made[2:4], kept, turned, True, scale_format)
    remade = empty(*kept.shape)
    args_2 = (total, made[4], weight, *GROUP, False, scale_format, FLOOR)
    assert triton_norm.scale_rows_quantize_rejects(*args_2) is None
    straight = triton_norm.scale_rows_quantize(*args_2, kept=remade)
    assert same(remade, kept)
    assert all(map(same, straight, made))


def check_silu(
    gate: Tensor,
    up: Tensor,
    turned: tuple[int, int] = BLOCK,
    straight: tuple[int, int] = GROUP,
    scale_format: str = "fp32",
) -> None:
    args = (gate, up, *straight, *turned, scale_format, FLOOR)
    assert triton_silu.silu_mul_quantize_rejects(*args) is None
    kept = empty(gate.numel() // gate.shape[-1], gate.shape[-1])
    made = triton_silu.silu_mul_quantize(*args, kept=kept)
    check_near(kept, (reference_fused.silu(gate) * up).reshape(kept.shape))
    check_quantized(made[:2], kept, straight, False, scale_format)
    if turned == NONE:
        assert made[2].shape == made[3].shape == (0, 0)
    else:
        check_quantized(made[2:], kept, turned, True, scale_format)


def check_backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
    regions: tuple[tuple[int, int], ...] = (GROUP, GROUP, BLOCK),
    scale_format: str = "fp32",
) -> None:
    (straight, turned, remade), (rows, cols) = (
        regions,
        dy.reshape(-1, dy.shape[-1]).shape,
    )
    args = (dy, gate, up, *scales, *straight, *turned, *remade, scale_format, FLOOR)
    assert triton_silu.silu_mul_backward_quantize_rejects(*args) is None
    kept, kept_x = empty(rows, 2 * cols), empty(rows, cols)
    made = triton_silu.silu_mul_backward_quantize(*args, kept=kept, kept_x=kept_x)
    if scales[0] is not None and scales[1] is not None:
        gate = reference.dequantize(gate, scales[0], 1, 128, torch.bfloat16)
        up = reference.dequantize(up, scales[1], 1, 128, torch.bfloat16)
    gradients = torch.cat(reference_fused.silu_mul_backward(dy, gate, up), -1)
    check_near(kept, gradients.reshape(kept.shape))
    check_near(kept_x, (reference_fused.silu(gate) * up).reshape(kept_x.shape))
    check_quantized(made[:2], kept, straight, False, scale_format)
    check_quantized(made[2:4], kept, turned, True, scale_format)
    check_quantized(made[4:], kept_x, remade, True, scale_format)
