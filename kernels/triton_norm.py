"""RMSNorm with residual add, quantized by the Triton kernel that computes it.

What it computes is in `reference_fused`. The order of the FP32 sum differs from
PyTorch's, so `rstd` may differ in its last bits, and an element of the BF16 matrix that
is quantized in its last bit. Codes and scales are those of that matrix, bit for bit.
The order depends on C alone, so a row has the same bits whatever the other rows are.

The transpose is quantized along tokens, 128 rows at a time, and no program of the norm
has so many: `scale_rows_quantize` makes it in a second launch, from `rstd`.
"""

import torch
from torch import Tensor

from jetrl_compile.kernels.launch_recorder import launch_kernel
from jetrl_compile.kernels.triton_common import (
    cannot_run,
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
from jetrl_compile.kernels.triton_norm_kernels import norm_kernel, scale_kernel

MAX_COLS = 65536  # of a norm: 64 elements a thread of 32 warps
ELEMENTS_PER_THREAD = 32  # of a row: 4 reads of 16 bytes in flight
STRAIGHT = Launch(height=32, warps=4)
BLOCKS = Launch(height=128, warps=8, registers=80)


def rms_norm_quantize_rejects(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    rows: int,
    cols: int,
    rows_t: int,
    cols_t: int,
    scale_format: str,
    amax_floor: float,
) -> str | None:
    """Return why the kernel cannot run, or None; arguments of `rms_norm_quantize`."""
    inputs = [x, weight] if residual is None else [x, residual, weight]
    if x.shape[-1] > MAX_COLS:
        return f"a row of {x.shape[-1]} columns is kept in registers: {MAX_COLS} fit"
    if residual is not None and residual.shape != x.shape:
        return f"the residual is {tuple(residual.shape)}, x is {tuple(x.shape)}"
    if (rows, cols) != (1, TILE):
        return "the norm quantizes rows in 1x128 groups"
    return (
        _not_bf16(inputs)
        or (None if rows_t < 0 else region_unsupported(rows_t, cols_t))
        or (cannot_run if rows_t < 0 else words_cannot_run)(inputs, amax_floor)
    )


def rms_norm_quantize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    rows: int,
    cols: int,
    rows_t: int,
    cols_t: int,
    scale_format: str,
    amax_floor: float,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run `reference_fused.rms_norm_quantize`, into the memory order of `layouts`.

    Moves 2 bytes an element in and 1 out; with a residual 4 in and 3 out. The transpose
    is another 2 in and 1 out.

    Args:
        x: (..., C) in BF16; R rows in all, any distance apart, columns adjacent.
        residual: Like `x`, or None.
        weight: (C,) in BF16.
        eps: As in the reference.
        rows: 1.
        cols: 128.
        rows_t: As in the reference; below 0: no transpose.
        cols_t: As in the reference.
        scale_format: As in the reference.
        amax_floor: As in the reference.
        kept: Receives the matrix that is quantized, (R, C) in BF16, row-major: for
            tests.

    Returns:
        Codes (R, C), scales, and the same of the transpose; `rstd` (..., 1) in FP32;
        and the sum (..., C) in BF16, (0,) without a residual.
    """
    shape, device = x.shape, x.device
    x = _aligned(rows_of(x))
    r, c = x.shape
    added = None if residual is None else _aligned(rows_of(residual))
    codes, scales, scale_stride = outputs((r, c), 1, TILE, device)
    rstd = torch.empty((*shape[:-1], 1), dtype=torch.float32, device=device)
    total = x.new_empty((0,) if residual is None else shape)
    if r and c:
        first, last = split_groups(-(-c // TILE))
        with on_device(x):
            launch_kernel(norm_kernel, (r,), overlaps(x.device))(
                x,
                added,
                _aligned(weight),
                None if residual is None else total,
                rstd,
                codes,
                scales,
                kept,
                c,
                x.stride(0),
                0 if added is None else added.stride(0),
                codes.stride(0),
                scale_stride,
                eps,
                FIRST=first,
                LAST=last,
                FULL=(first + last) * TILE == c,
                FLOOR=amax_floor,
                UE8M0=scale_format == "ue8m0",
                num_warps=warps_of(first + last),
            )
    turned = no_output(device)
    if rows_t >= 0:
        turned = scale_rows_quantize(
            x if residual is None else total,
            rstd,
            weight,
            rows_t,
            cols_t,
            True,
            scale_format,
            amax_floor,
        )
    return (codes, scales, *turned, rstd, total)


def split_groups(groups: int) -> tuple[int, int]:
    """Return powers of two that together hold a row: 40 groups of 128 are 32 + 8.

    Triton's tiles are powers of two; one for the whole row would idle up to half of
    the threads.
    """
    first = 1 << groups.bit_length() - 1
    rest = groups - first
    if not rest:
        return first, 0
    last = 1 << (rest - 1).bit_length()
    return (2 * first, 0) if last == first else (first, last)


def warps_of(groups: int) -> int:
    """Return how many warps run a row of some groups: a power of two up to 32."""
    warps = max(groups * TILE // (32 * ELEMENTS_PER_THREAD), 1)
    return min(1 << warps.bit_length() - 1, 32)


def scale_rows_quantize_rejects(
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    rows: int,
    cols: int,
    transpose: bool,
    scale_format: str,
    amax_floor: float,
) -> str | None:
    """Return why the kernel cannot run, or None; arguments of `scale_rows_quantize`."""
    if rstd.dtype != torch.float32:
        return f"rstd is {rstd.dtype}, not FP32"
    return (
        _not_bf16([x, weight])
        or region_unsupported(rows, cols)
        or words_cannot_run([x, rstd, weight], amax_floor)
    )


def scale_rows_quantize(
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    rows: int,
    cols: int,
    transpose: bool,
    scale_format: str,
    amax_floor: float,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run `reference_fused.scale_rows_quantize`, into the memory order of `layouts`.

    Moves 2 bytes an element in and 1 out.

    Args:
        x: (..., C) in BF16; R rows in all, any distance apart, columns adjacent.
        rstd: (..., 1) in FP32.
        weight: (C,) in BF16.
        rows: As in the reference.
        cols: As in the reference.
        transpose: As in the reference.
        scale_format: As in the reference.
        amax_floor: As in the reference.
        kept: Receives the matrix that is quantized, (R, C) in BF16, row-major and not
            transposed: for tests.

    Returns:
        Codes (R, C) or (C, R), and scales.
    """
    x, weight = word_rows(x), _aligned(weight)
    factors = rstd.reshape(-1).contiguous()
    r, c = x.shape
    shape = (c, r) if transpose else (r, c)
    codes, scales, scale_stride = outputs(shape, rows, cols, x.device, transpose)
    launch = BLOCKS if transpose or rows != 1 else STRAIGHT
    if r and c:
        with on_device(x):
            launch_kernel(scale_kernel, (launch.tiles(r, c),), overlaps(x.device))(
                x,
                factors,
                weight,
                codes,
                scales,
                kept,
                r,
                c,
                x.stride(0),
                codes.stride(0),
                scale_stride,
                QUARTER=launch.height // 4,
                TRANSPOSE=transpose,
                BLOCKS=rows != 1,
                FULL=launch.is_full(r, c),
                FLOOR=amax_floor,
                UE8M0=scale_format == "ue8m0",
                num_warps=launch.warps,
                maxnreg=launch.registers,
            )
    return codes, scales


def _not_bf16(inputs: list[Tensor]) -> str | None:
    wrong = [str(t.dtype) for t in inputs if t.dtype != torch.bfloat16]
    return f"an input is {wrong[0]}, not BF16" if wrong else None


def _aligned(x: Tensor) -> Tensor:
    """Return x where its rows begin as those of a fresh tensor do, else a copy.

    Of a vector, elements must be adjacent: a view of a wider one may have them apart.
    Triton spreads a row over threads by the alignment of its reads, and the order of
    the sum follows: it must depend on C alone.
    """
    cols = x.shape[-1]
    stride = cols * x.stride(0) if x.dim() == 1 else x.stride(0)
    alike = stride == cols or (x.dim() > 1 and stride % 16 == cols % 16 == 0)
    if alike and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
