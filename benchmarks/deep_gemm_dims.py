"""What DeepGEMM gains where the contraction is a constant of its kernels.

    python benchmarks/deep_gemm_dims.py

The fused fprop and dgrad GEMMs of a Qwen3-8B layer, 8192 tokens, TFLOP/s, medians of
interleaved runs: with the rows of b compiled in ("n"), and the contraction too ("nk").
Needs a Hopper GPU; compiles a kernel for each, several at once.
"""

import statistics
import subprocess
import sys

import torch
from triton.testing import do_bench

from jetrl_compile.kernels import ops
from jetrl_compile.kernels.provider_deep_gemm import library

TOKENS = 8192
SIZES = (  # rows of b, contraction
    (6144, 4096),
    (24576, 4096),
    (4096, 12288),
    (4096, 4096),
    (12288, 4096),
    (4096, 24576),
    (4096, 6144),
)
ROUNDS = 3


def operands(n: int, k: int) -> tuple[torch.Tensor, ...]:
    """Return codes and scales of random a and b, and an empty result."""
    x = torch.randn(TOKENS, k, device="cuda").to(torch.bfloat16)
    w = torch.randn(n, k, device="cuda").to(torch.bfloat16)
    a = ops.quantize(x, 1, 128, False, "fp32", 1e-10, None)
    b = ops.quantize(w, 128, 128, False, "fp32", 1e-10, None)
    return (*a, *b, torch.empty(TOKENS, n, device="cuda", dtype=torch.bfloat16))


def call(tensors: tuple[torch.Tensor, ...], dims: str) -> None:
    """Run the GEMM."""
    a, a_scales, b, b_scales, out = tensors
    library().fp8_gemm_nt(
        (a, a_scales),
        (b, b_scales),
        out,
        c=None,
        recipe=(1, 128, 128),
        compiled_dims=dims,
        disable_ue8m0_cast=True,
    )


def main() -> int:
    """Print the table; with two numbers, only compile that GEMM's kernels."""
    if len(sys.argv) > 1:
        tensors = operands(*map(int, sys.argv[1:3]))
        for dims in ("n", "nk"):
            call(tensors, dims)
        torch.cuda.synchronize()
        return 0
    workers = [
        subprocess.Popen([sys.executable, __file__, str(n), str(k)]) for n, k in SIZES
    ]
    if any([worker.wait() for worker in workers]):
        return 1
    print("rows of b  contraction      n     nk")
    for n, k in SIZES:
        tensors = operands(n, k)
        found: dict[str, list[float]] = {"n": [], "nk": []}
        for _ in range(ROUNDS):
            for dims, times in found.items():

                def work(dims: str = dims) -> None:
                    call(tensors, dims)  # noqa: B023

                times.append(do_bench(work, warmup=10, rep=60, return_mode="median"))
        work_done = 2 * TOKENS * n * k / 1e9  # GFLOP, and times are in ms
        rates = [work_done / statistics.median(times) for times in found.values()]
        print(f"{n:9}  {k:11}  {rates[0]:5.0f}  {rates[1]:5.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
