"""SiLU*mul and its backward, quantized by the Triton kernel that computes them.

What they compute is in `reference_fused`. The exponential and the division are the
GPU's fast ones (about 2^-21 of the value), so an element of the BF16 matrix that is
quantized may differ from PyTorch's in its last bit. Codes and scales are those of that
matrix, bit for bit. Bits of a row do not depend on the number of rows.
"""

import torch
from torch import Tensor

from jetrl_compile.kernels.launch_recorder import launch_kernel
from jetrl_compile.kernels.layouts import E4M3
from jetrl_compile.kernels.triton_common import (
    rows_of,
)
from jetrl_compile.kernels.triton_device import on_device, overlaps
from jetrl_compile.kernels.triton_launch import (
    TILE,
    Launch,
    no_output,
    outputs,
    region_unsupported,
    word_rows,
    words_cannot_run,
)
from jetrl_compile.kernels.triton_silu_kernels import backward_kernel, forward_kernel

# Straight alone: regions are rows, so tiles are small, and few tokens make enough
# programs. Else 128x128, with registers for three programs on a multiprocessor: some
# compute while another one reads.
STRAIGHT = Launch(height=32, warps=4)
TWICE = Launch(height=128, warps=8, registers=80)
# The three tiles of the backward fill the registers of a multiprocessor, so that there
# is one program on each, and it reads the tiles after the next one while it computes.
BACKWARD = Launch(height=128, warps=8)
STAGES = 3
# Two tiles of three matrices that wait, in BF16, and the codes of one transpose.
SHARED_BYTES = 2 * 3 * TILE * TILE * 2 + TILE * TILE


def silu_mul_quantize_rejects(
    gate: Tensor,
    up: Tensor,
    rows: int,
    cols: int,
    rows_t: int,
    cols_t: int,
    scale_format: str,
    amax_floor: float,
) -> str | None:
    """Return why the kernel cannot run, or None; arguments of `silu_mul_quantize`."""
    if gate.dtype != torch.bfloat16 or up.dtype != torch.bfloat16:
        return f"gate and up are {gate.dtype} and {up.dtype}, not BF16"
    return (
        region_unsupported(rows, cols)
        or (None if rows_t < 0 else region_unsupported(rows_t, cols_t))
        or words_cannot_run([gate, up], amax_floor)
    )


def silu_mul_quantize(
    gate: Tensor,
    up: Tensor,
    rows: int,
    cols: int,
    rows_t: int,
    cols_t: int,
    scale_format: str,
    amax_floor: float,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run `reference_fused.silu_mul_quantize`, into the memory order of `layouts`.

    Moves 4 bytes an element in, 1 out, and 1 more for the transpose; scales add 3% of
    the bytes out.

    Args:
        gate: (..., C) in BF16; R rows in all, any distance apart, columns adjacent.
        up: Like `gate`.
        rows: As in the reference.
        cols: As in the reference.
        rows_t: As in the reference; below 0: no transpose.
        cols_t: As in the reference.
        scale_format: As in the reference.
        amax_floor: As in the reference.
        kept: Receives the matrix that is quantized, (R, C) in BF16, row-major: for
            tests.

    Returns:
        Codes (R, C), scales, and the same of the transpose.
    """
    gate, up = word_rows(gate), word_rows(up)
    r, c = gate.shape
    device, turned = gate.device, rows_t >= 0
    codes, scales, scale_stride = outputs((r, c), rows, cols, device)
    codes_t, scales_t = no_output(device)
    scale_stride_t = 0
    if turned:
        codes_t, scales_t, scale_stride_t = outputs(
            (c, r), rows_t, cols_t, device, True
        )
    launch = TWICE if turned or rows != 1 else STRAIGHT
    if r and c:
        with on_device(gate):
            tiles = launch.tiles(r, c)
            launch_kernel(forward_kernel, (tiles,), overlaps(gate.device))(
                gate,
                up,
                codes,
                scales,
                codes_t if turned else None,
                scales_t if turned else None,
                kept,
                r,
                c,
                gate.stride(0),
                up.stride(0),
                codes.stride(0),
                scale_stride,
                codes_t.stride(0),
                scale_stride_t,
                QUARTER=launch.height // 4,
                BLOCKS=rows != 1,
                BLOCKS_T=rows_t > 1,
                FULL=launch.is_full(r, c),
                FLOOR=amax_floor,
                UE8M0=scale_format == "ue8m0",
                num_warps=launch.warps,
                maxnreg=launch.registers,
            )
    return codes, scales, codes_t, scales_t


def silu_mul_backward_quantize_rejects(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_scales: Tensor | None,
    up_scales: Tensor | None,
    rows: int,
    cols: int,
    rows_dy: int,
    cols_dy: int,
    rows_x: int,
    cols_x: int,
    scale_format: str,
    amax_floor: float,
) -> str | None:
    """Return why the kernel cannot run, or None.

    The arguments are those of `silu_mul_backward_quantize`.
    """
    kept = E4M3 if gate_scales is not None else torch.bfloat16
    if dy.dtype != torch.bfloat16 or gate.dtype != kept or up.dtype != kept:
        return (
            f"dy, gate and up are {dy.dtype}, {gate.dtype} and {up.dtype}; the kernel "
            f"reads BF16, {kept} and {kept}"
        )
    if dy.shape[-1] % TILE:
        return (
            f"C = {dy.shape[-1]} is not a multiple of 128: regions of [dgate, dup] "
            "straddle the seam"
        )
    scales = [s for s in (gate_scales, up_scales) if s is not None]
    if len(scales) == 1:
        return "only one of gate and up has scales"
    return (
        region_unsupported(rows, cols)
        or region_unsupported(rows_dy, cols_dy)
        or region_unsupported(rows_x, cols_x)
        or words_cannot_run([dy, gate, up, *scales], amax_floor)
    )


def silu_mul_backward_quantize(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_scales: Tensor | None,
    up_scales: Tensor | None,
    rows: int,
    cols: int,
    rows_dy: int,
    cols_dy: int,
    rows_x: int,
    cols_x: int,
    scale_format: str,
    amax_floor: float,
    kept: Tensor | None = None,
    kept_x: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run `reference_fused.silu_mul_backward_quantize`, in the order of `layouts`.

    Moves, for each of the R x C elements, 6 bytes in (4 where gate and up are codes),
    and 5 out: 2 of the gradients, 2 of their transposes, 1 of the result's transpose.

    Args:
        dy: (..., C) in BF16; C a multiple of 128; R rows in all, any distance apart,
            columns adjacent.
        gate: Like `dy`, or (R, C) codes in E4M3.
        up: Like `gate`.
        gate_scales: (R, C / 128) in FP32 where `gate` is codes, column-major, the
            columns any distance apart.
        up_scales: The same of `up`.
        rows: As in the reference.
        cols: As in the reference.
        rows_dy: As in the reference.
        cols_dy: As in the reference.
        rows_x: As in the reference.
        cols_x: As in the reference.
        scale_format: As in the reference.
        amax_floor: As in the reference.
        kept: Receives [dgate, dup], (R, 2 C) in BF16, row-major: for tests.
        kept_x: Receives silu(gate) * up, (R, C) in BF16, row-major: for tests.

    Returns:
        Codes (R, 2 C) and scales of [dgate, dup]; of its transpose (2 C, R); and of
        the transpose of silu(gate) * up, (C, R).
    """
    read = word_rows if gate_scales is None else rows_of
    dy, gate, up = word_rows(dy), read(gate), read(up)
    (r, c), device = dy.shape, dy.device
    codes, scales, scale_stride = outputs((r, 2 * c), rows, cols, device)
    codes_t, scales_t, scale_stride_t = outputs(
        (2 * c, r), rows_dy, cols_dy, device, True
    )
    codes_x, scales_x, scale_stride_x = outputs((c, r), rows_x, cols_x, device, True)
    gate_scales, up_scales = _column_major(gate_scales), _column_major(up_scales)
    if r and c:
        with on_device(dy):
            programs, stages = _pipelined(dy, BACKWARD.tiles(r, c))
            launch_kernel(backward_kernel, (programs,), overlaps(dy.device))(
                dy,
                gate,
                up,
                gate_scales,
                up_scales,
                codes,
                scales,
                codes_t,
                scales_t,
                codes_x,
                scales_x,
                kept,
                kept_x,
                r,
                c,
                dy.stride(0),
                gate.stride(0),
                up.stride(0),
                0 if gate_scales is None else gate_scales.stride(1),
                0 if up_scales is None else up_scales.stride(1),
                codes.stride(0),
                scale_stride,
                codes_t.stride(0),
                scale_stride_t,
                scale_stride_x,
                BLOCKS=rows != 1,
                BLOCKS_T=rows_dy != 1,
                BLOCKS_X=rows_x != 1,
                FULL=BACKWARD.is_full(r, c),
                FLOOR=amax_floor,
                UE8M0=scale_format == "ue8m0",
                STAGES=stages,
                num_warps=BACKWARD.warps,
            )
    return codes, scales, codes_t, scales_t, codes_x, scales_x


def _column_major(scales: Tensor | None) -> Tensor | None:
    if scales is None or scales.shape[0] < 2 or scales.stride(0) == 1:
        return scales
    return scales.t().contiguous().t()


def _pipelined(x: Tensor, tiles: int) -> tuple[int, int]:
    """Return how many programs run the backward, and their STAGES, on x's device."""
    if not x.is_cuda:
        return tiles, 0
    gpu = torch.cuda.get_device_properties(x.device)
    if getattr(gpu, "shared_memory_per_block_optin", 0) < SHARED_BYTES:
        return tiles, 0
    return min(tiles, gpu.multi_processor_count), STAGES
