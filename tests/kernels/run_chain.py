"""Run chains of dependent kernels without waiting between; print a digest of results.

    JETRL_OVERLAP=1 python tests/kernels/run_chain.py

A decoder layer's kernels, forward and backward, on batches from one row to many tiles,
launched one by one and as a CUDA graph. Memory of what is no longer needed is used
again at once, so a kernel that began too early would read another's results. Exits with
1 if the graph gives other bits than the launches.
"""

import hashlib
import sys
from functools import cache

import torch
from torch import Tensor

from jetrl_compile.kernels import fused_ops, ops
from jetrl_compile.kernels.dispatch import ORDERS, provider_statuses

FLOOR = ("fp32", 1e-10)
GROUP, BLOCK = (1, 128), (128, 128)
HIDDEN, WIDE, LAYERS = 512, 1024, 12
ROWS = (1, 8, 64, 256, 1000, 4096)
Quantized = tuple[Tensor, Tensor]


@cache
def provider() -> str:
    """Return the fastest provider that can run here."""
    usable = [s.provider.name for s in provider_statuses() if s.reason is None]
    return next(name for name in ORDERS["cuda"] if name in usable)


def gemm(a: Quantized, b: Quantized, b_region: tuple[int, int] = BLOCK) -> Tensor:
    """Return a b^T in BF16."""
    made: Tensor = ops.gemm(*a, *b, *GROUP, *b_region, torch.bfloat16, provider())
    return made


def layer(x: Tensor, residual: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Run a layer forward, and what the backward of its MLP quantizes."""
    norm, square, both, down = weights
    made = fused_ops.rms_norm_quantize(
        x, residual, norm, 1e-6, None, *GROUP, *BLOCK, *FLOOR
    )
    y = gemm(made[:2], ops.quantize(square, *BLOCK, False, *FLOOR, None))
    a = ops.quantize(y, *GROUP, False, *FLOOR, None)
    gate_up = gemm(a, ops.quantize(both, *BLOCK, False, *FLOOR, None))
    gate, up = gate_up[:, :WIDE], gate_up[:, WIDE:]
    act = fused_ops.silu_mul_quantize(gate, up, *GROUP, *BLOCK, *FLOOR)
    out = gemm(act[:2], ops.quantize(down, *BLOCK, False, *FLOOR, None))
    back = fused_ops.silu_mul_backward_quantize(
        gate, gate, up, None, None, *GROUP, *GROUP, *BLOCK, *FLOOR
    )
    dx = gemm(back[:2], ops.quantize(both, *BLOCK, True, *FLOOR, None))
    dw = gemm(back[2:4], made[2:4])
    return out + dx * 1e-3, made[5] + dw.sum() * 1e-6


def chain(x: Tensor, weights: list[Tensor]) -> Tensor:
    """Run the layers one after the other."""
    residual = torch.zeros_like(x)
    for _ in range(LAYERS):
        x, residual = layer(x, residual, weights)
        x = x / (x.float().pow(2).mean() + 1e-6).sqrt().to(torch.bfloat16)
    return x + residual


def captured(x: Tensor, weights: list[Tensor]) -> Tensor:
    """Run the layers as a CUDA graph, some times."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(x, weights)
    for _ in range(5):
        graph.replay()
    return found


def main() -> int:
    """Run all."""
    torch.manual_seed(0)
    shapes = ((HIDDEN,), (HIDDEN, HIDDEN), (2 * WIDE, HIDDEN), (HIDDEN, WIDE))
    weights = [torch.randn(s, device="cuda").to(torch.bfloat16) * 0.05 for s in shapes]
    digest, same = hashlib.sha256(), True
    for rows in ROWS:
        x = torch.randn(rows, HIDDEN, device="cuda").to(torch.bfloat16)
        chain(x, weights)  # records what each operator launches
        first = chain(x, weights)
        same &= torch.equal(captured(x, weights), first)
        digest.update(first.float().cpu().numpy().tobytes())
    print(digest.hexdigest())
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
