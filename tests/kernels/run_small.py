"""Run every GPU kernel twice on small shapes with tails, for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/kernels/run_small.py

Prints what ran; exits with 1 if a kernel fell back to the reference without a GPU
kernel of its own, or made other codes than the reference.
"""

import sys

import torch
from torch import Tensor

from jetrl_compile.kernels import (
    attention_ops,
    exact_ops,
    fused_ops,
    ops,
    quantizers,
    reference,
)
from jetrl_compile.kernels.dispatch import provider_statuses

ROWS = (0, 1, 7, 129, 272)
COLS = (128, 192, 576)
FLOOR = ("fp32", 1e-10)
GROUP, BLOCK = (1, 128), (128, 128)


def normal(*shape: int) -> Tensor:
    """Return random BF16 values on the GPU."""
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether bytes are equal."""
    return torch.equal(a.contiguous().view(-1), b.contiguous().view(-1))


def quantizers_on(r: int, c: int) -> bool:
    """Run the quantizers."""
    x = normal(r, c)
    good = True
    for region in (GROUP, BLOCK):
        for transpose in (False, True):
            codes, scales = ops.quantize(x, *region, transpose, *FLOOR, None)
            wanted = reference.quantize(x, *region, transpose, *FLOOR)
            good &= same(codes.float(), wanted[0].float()) and same(scales, wanted[1])
    fused_ops.quantize_twice([x], 0, *GROUP, *GROUP, *FLOOR)
    fused_ops.quantize_twice([x, normal(r, 128)], 1, *GROUP, *BLOCK, *FLOOR)
    codes, scales = ops.quantize(x, *GROUP, False, *FLOOR, None)
    ops.requantize(codes, scales, *GROUP, *GROUP, True, *FLOOR, None)
    return good


def fused_on(r: int, c: int) -> None:
    """Run the kernels fused with quantization."""
    x, other, weight = normal(r, c), normal(r, c), normal(c)
    made = fused_ops.rms_norm_quantize(
        x, other, weight, 1e-6, None, *GROUP, *BLOCK, *FLOOR
    )
    fused_ops.rms_norm_quantize(x, None, weight, 1e-6, None, *GROUP, -1, 0, *FLOOR)
    fused_ops.scale_rows_quantize(x, made[4], weight, *GROUP, True, *FLOOR, None)
    if c % 128:
        return
    both = normal(r, 2 * c)
    gate, up = both[:, :c], both[:, c:]
    fused_ops.silu_mul_quantize(gate, up, *GROUP, *BLOCK, *FLOOR)
    fused_ops.silu_mul_quantize(gate, up, *GROUP, -1, 0, *FLOOR)
    fused_ops.silu_mul_backward_quantize(
        x, gate, up, None, None, *GROUP, *GROUP, *BLOCK, *FLOOR
    )
    codes, scales = ops.quantize(both, *GROUP, False, *FLOOR, None)
    halves = (codes[:, :c], codes[:, c:], scales[:, : c // 128], scales[:, c // 128 :])
    fused_ops.silu_mul_backward_quantize(x, *halves, *GROUP, *GROUP, *BLOCK, *FLOOR)


def exact_on(r: int, c: int, providers: list[str]) -> None:
    """Run the kernels of exact mode."""
    x, weight = normal(r, c), normal(c)
    exact_ops.rms_norm(x, weight, 1e-6, None)
    heads = normal(1, r, 4, 64).transpose(1, 2)
    exact_ops.rms_norm(heads, weight[:64], 1e-6, None)
    exact_ops.rope(heads, normal(1, 1, r, 64), normal(1, 1, r, 64))
    both = normal(r, 2 * c)
    exact_ops.silu_mul(both[:, :c], both[:, c:])
    labels = torch.arange(r, device=x.device) % c
    for kernel in ("aten", "blocks"):
        exact_ops.log_probs(x, labels, 0.7, kernel)
    if "deep_gemm" in providers:
        exact_ops.bf16_gemm(x, normal(193, c), "deep_gemm")
    q, k = normal(1, 4, r, 64), normal(1, 2, r, 64)
    attention_ops.attention(q, k, k, None, None, 0.125, "triton")


def gemms_on(m: int, k: int, providers: list[str]) -> None:
    """Run the GEMM providers in all roles."""
    n = 192
    x, w = normal(m, k), normal(n, k)
    a, b = (
        ops.quantize(t, *r, False, *FLOOR, None) for t, r in ((x, GROUP), (w, BLOCK))
    )
    for provider in providers:
        ops.gemm(*a, *b, *GROUP, *BLOCK, torch.bfloat16, provider)
    dy = normal(m, n)
    at = ops.quantize(dy, *GROUP, True, *FLOOR, None)
    bt = ops.quantize(x, *BLOCK, True, *FLOOR, None)
    for provider in providers:
        if provider != "scaled_mm":
            ops.gemm(*at, *bt, *GROUP, *BLOCK, torch.bfloat16, provider)


def main() -> int:
    """Run all."""
    torch.manual_seed(0)
    providers = [s.provider.name for s in provider_statuses() if s.reason is None]
    providers.remove("reference")
    good = True
    for _ in range(2):  # the second time as the first was recorded
        for r in ROWS:
            for c in COLS:
                good &= quantizers_on(r, c)
                fused_on(r, c)
                gemms_on(r, c, providers)
                exact_on(r, c, providers)
    torch.cuda.synchronize()
    print(f"ran on {torch.cuda.get_device_name()}: providers {', '.join(providers)}")
    for (operator, reason), count in quantizers.fallbacks().items():
        print(f"{operator} ran as the reference {count} times: {reason}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
