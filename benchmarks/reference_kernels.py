"""How long the reference kernels take on a CPU, in milliseconds, medians.

    OMP_NUM_THREADS=1 python benchmarks/reference_kernels.py

Shapes are those of a decoder layer of SmolLM2-135M: decode (16 tokens) and training
(1536 tokens). "floor" decodes both operands and runs one float64 matmul, which is not
the contract's result; "BF16" is torch's own matmul.
"""

import sys

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from jetrl_compile.kernels import ops

SHAPES = ((576, 576), (192, 576), (1536, 576), (576, 1536))
TOKENS = (16, 1536)


def milliseconds(statement: str, **names: object) -> float:
    """Return the median time of a statement."""
    timer = Timer(statement, globals={"torch": torch, "ops": ops, **names})
    return 1e3 * timer.blocked_autorange(min_run_time=0.3).median


def quantized(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales in rows x 128 regions."""
    codes, scales = ops.quantize(x, rows, 128, False, "fp32", 1e-10, None)
    return codes, scales


def main() -> int:
    """Print the table."""
    generator = torch.Generator().manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print("    M     N     K      gemm     floor      BF16  quantize")
    for m in TOKENS:
        for n, k in SHAPES:
            x = torch.randn(m, k, generator=generator).to(torch.bfloat16)
            w = torch.randn(n, k, generator=generator).to(torch.bfloat16)
            a, a_scales = quantized(x, 1)
            b, b_scales = quantized(w, 128)
            gemm = milliseconds(
                "ops.gemm(a, a_scales, b, b_scales, 1, 128, 128, 128, "
                "torch.bfloat16, 'reference')",
                a=a,
                a_scales=a_scales,
                b=b,
                b_scales=b_scales,
            )
            floor = milliseconds("a.double() @ b.double().t()", a=a, b=b)
            plain = milliseconds("x @ w.t()", x=x, w=w)
            quantize = milliseconds(
                "ops.quantize(x, 1, 128, False, 'fp32', 1e-10, None)", x=x
            )
            print(
                f"{m:5} {n:5} {k:5} {gemm:9.3f} {floor:9.3f} {plain:9.3f} "
                f"{quantize:9.3f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
