"""The Triton kernel of the provider `triton`.

One program makes one tile of the result. It walks the contraction upwards in groups of
128: one product of codes on the tensor cores, accumulated from zero, then
`total += part * (a_scale * b_scale)` in FP32. A row's bits do not depend on the batch:
no program adds another's sums, the order is fixed, and every tile has at least 64 rows,
so on Hopper each row goes through the same instruction (wgmma with 64 rows).
"""

from typing import Any

import torch
from torch import Tensor

from jetrl_compile.kernels.launch_recorder import launch_kernel
from jetrl_compile.kernels.triton_common import interpreted, jit, tl, triton

GROUP = 128


@jit
def _gemm_kernel(
    a: tl.tensor,
    a_scales: tl.tensor,
    b: tl.tensor,
    b_scales: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    a_stride: tl.tensor,
    a_scales_row: tl.tensor,
    a_scales_group: tl.tensor,
    b_stride: tl.tensor,
    b_scales_row: tl.tensor,
    b_scales_group: tl.tensor,
    out_stride: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS_OF_B: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_M: tl.constexpr,
) -> None:
    """Make one tile of a b^T; `gemm` says what the arguments are."""
    # Programs walk GROUP_M rows of tiles together, so that panels of b stay in L2.
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    program = tl.program_id(0)
    in_group = GROUP_M * tiles_n
    first = (program // in_group) * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    tile_m = first + (program % in_group) % height
    tile_n = (program % in_group) // height

    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows outside read the last row instead: that needs no mask, and none is stored.
    a_rows = tl.minimum(rows, m - 1).to(tl.int64)
    b_rows = tl.minimum(cols, n - 1).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    a_at = a + a_rows[:, None] * a_stride + inner[None, :]
    b_at = b + b_rows[None, :] * b_stride + inner[:, None]
    a_scales_at = a_scales + a_rows * a_scales_row
    if BLOCKS_OF_B:  # BLOCK_N divides 128, so a tile lies in one row of blocks
        b_scales_at = b_scales + (tile_n * BLOCK_N // 128).to(tl.int64) * b_scales_row
    else:
        b_scales_at = b_scales + b_rows * b_scales_row

    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(0, GROUPS if GROUPS > 0 else tl.cdiv(k, BLOCK_K)):
        if EVEN_K:
            a_codes = tl.load(a_at)
            b_codes = tl.load(b_at)
        else:
            inside = inner < k - group * BLOCK_K
            a_codes = tl.load(a_at, mask=inside[None, :], other=0.0)
            b_codes = tl.load(b_at, mask=inside[:, None], other=0.0)
        a_scale = tl.load(a_scales_at + group * a_scales_group)
        b_scale = tl.load(b_scales_at + group * b_scales_group)
        part = tl.dot(a_codes, b_codes, out_dtype=tl.float32)
        if BLOCKS_OF_B:
            total += part * (a_scale * b_scale)[:, None]
        else:
            total += part * (a_scale[:, None] * b_scale[None, :])
        a_at += BLOCK_K
        b_at += BLOCK_K

    out_at = out + rows.to(tl.int64)[:, None] * out_stride + cols[None, :]
    inside_out = (rows[:, None] < m) & (cols[None, :] < n)
    tl.store(out_at, total.to(out.dtype.element_ty), mask=inside_out)


def gemm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    b_rows: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply codes of 1x128 groups by codes of 1x128 groups or 128x128 blocks.

    Args:
        a: (m, k) codes in E4M3; columns contiguous, any row stride.
        a_scales: (m, ceil(k / 128)) in FP32, any strides.
        b: (n, k) codes in E4M3; columns contiguous, any row stride.
        b_scales: FP32, one for each region of `b`, any strides.
        b_rows: Rows of a region of `b`: 1 or 128.
        out_dtype: BF16 or FP32.

    Returns:
        (m, n), row-major; m, n and k are at least 1.
    """
    (m, k), n = a.shape, b.shape[0]
    out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    block_m, block_n, options = _tile(m, n)
    grid = (triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)
    launch_kernel(_gemm_kernel, grid)(
        a,
        a_scales,
        b,
        b_scales,
        out,
        m,
        n,
        k,
        a.stride(0),
        a_scales.stride(0),
        a_scales.stride(1),
        b.stride(0),
        b_scales.stride(0),
        b_scales.stride(1),
        out.stride(0),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=GROUP,
        BLOCKS_OF_B=b_rows == 128,
        EVEN_K=k % GROUP == 0,
        # Not compiled in, except for the interpreter: there a loop's bound must be no
        # tensor (triton 3.6 calls int() on an array of one element, numpy 2.4 refuses).
        GROUPS=triton.cdiv(k, GROUP) if interpreted() else 0,
        GROUP_M=8,
        **options,
    )
    return out


def _tile(m: int, n: int) -> tuple[int, int, dict[str, Any]]:
    """Return rows and columns of a tile and launch options; no bit depends on them."""
    if m <= 64:
        return 64, 64, {"num_warps": 4, "num_stages": 5}
    return 128, 128, {"num_warps": 8, "num_stages": 4}
