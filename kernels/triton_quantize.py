"""Triton kernels that quantize BF16: the bits of `reference_fused`, one read.

Bytes moved for each element: 2 read, and 1 written for each copy (straight or
transposed), plus 4 for each scale (1/32 of a byte an element for 1x128 groups).

The kernels (`triton_quantize_kernels`) have fixed parameters: the bits do not depend on
them, no tuning run can fall into a CUDA graph capture, and the kernels wait for memory,
not for arithmetic. On an H200 they run at 82-92% of the bandwidth of a copy for
8192x4096, and at 90-99% for 8192x12288 (docs/log.md, 2026-11-30).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from jetrl_compile.errors import ProviderError
from jetrl_compile.formats import AMAX_FLOOR, short_name
from jetrl_compile.granularity import BLOCK_128X128, GROUP_1X128, Granularity
from jetrl_compile.kernels.launch_recorder import launch_kernel
from jetrl_compile.kernels.layouts import empty_quantized
from jetrl_compile.kernels.triton_common import (
    cannot_run,
    no_words,
)
from jetrl_compile.kernels.triton_device import multiprocessors, on_device, overlaps
from jetrl_compile.kernels.triton_quantize_kernels import (
    BLOCKS,
    GROUPS,
    NONE,
    rows_kernel,
    tile_kernel,
)

SIDE = 128
REGIONS = tuple((g.rows, g.cols) for g in (GROUP_1X128, BLOCK_128X128))
Region = tuple[int, int]
MOST_PARTS = 3  # of one launch
TOGETHER = 2  # programs at a time on a multiprocessor, for the distance of a prefetch


def rejects(
    parts: Sequence[Tensor],
    straight: Region | None,
    transposed: Region | None,
    amax_floor: float = AMAX_FLOOR,
) -> str | None:
    """Return why the kernels cannot quantize these parts, or None if they can.

    Args:
        parts: As in `quantize_parts`.
        straight: Rows and columns of a region of the matrix; None: not wanted.
        transposed: Rows and columns of a region of the transpose; None: not wanted.
        amax_floor: As in `quantize_parts`.
    """
    for region in (straight, transposed):
        if region is not None and region not in REGIONS:
            return f"no kernel for regions of {Granularity(*region)}"
    for part in parts:
        if part.dtype not in (torch.bfloat16, torch.float32):
            return f"no kernel quantizes {short_name(part.dtype)}"
        if part.dim() != 2:
            return f"no kernel quantizes {part.dim()} dimensions"
    reason = cannot_run(list(parts), amax_floor)
    if reason is None and (transposed is not None or straight != REGIONS[0]):
        return no_words(parts[0])
    return reason


def quantize_parts(
    parts: Sequence[Tensor],
    dim: int,
    rows: int,
    cols: int,
    transpose: bool,
    scale_format: str,
    amax_floor: float,
) -> tuple[Tensor, Tensor]:
    """Run `reference_fused.quantize_parts` in one launch for every 3 parts.

    1x128 groups that are not transposed take a launch for each part.

    Args:
        parts: Matrices in BF16 or FP32 that differ in size only along `dim`. Rows may
            lie apart; other strides cost a copy, and so does a seam that cuts a group.
        dim: Along which they lie side by side: 0 or 1.
        rows: Rows of a region of the quantized matrix.
        cols: Columns of such a region; (rows, cols) is (1, 128) or (128, 128).
        transpose: Whether the transpose of the whole is what is quantized.
        scale_format: "fp32" or "ue8m0".
        amax_floor: The smallest amax that a scale is made from.

    Returns:
        Codes and scales in the memory order of `layouts`.

    Raises:
        ProviderError: `rejects` has a reason.
    """
    region = (rows, cols)
    straight, turned = (None, region) if transpose else (region, None)
    made = _quantize(parts, dim, straight, turned, scale_format, amax_floor)
    return made[2:] if transpose else made[:2]


def quantize_twice(
    parts: Sequence[Tensor],
    dim: int,
    rows: int,
    cols: int,
    rows_t: int,
    cols_t: int,
    scale_format: str,
    amax_floor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run `reference_fused.quantize_twice`: one read, a launch for every 3 parts.

    Args:
        parts: As in `quantize_parts`.
        dim: As in `quantize_parts`.
        rows: Rows of a region of the matrix.
        cols: Columns of a region of the matrix.
        rows_t: Rows of a region of the transpose; below 0: it is not made.
        cols_t: Columns of a region of the transpose.
        scale_format: As in `quantize_parts`.
        amax_floor: As in `quantize_parts`.

    Returns:
        Codes and scales of the matrix, and of its transpose (both (0, 0) where it is
        not made), in the memory order of `layouts`.

    Raises:
        ProviderError: `rejects` has a reason.
    """
    turned = None if rows_t < 0 else (rows_t, cols_t)
    return _quantize(parts, dim, (rows, cols), turned, scale_format, amax_floor)


def quantize_into(
    parts: Sequence[Tensor],
    region: Region,
    scale_format: str,
    amax_floor: float,
    out: tuple[Tensor, Tensor],
) -> None:
    """Quantize matrices below each other into codes and scales that exist."""
    _quantize(parts, 0, region, None, scale_format, amax_floor, out)


def _quantize(
    parts: Sequence[Tensor],
    dim: int,
    straight: Region | None,
    turned: Region | None,
    scale_format: str,
    amax_floor: float,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    reason = rejects(parts, straight, turned, amax_floor)
    if reason is not None:
        raise ProviderError(f"triton: {reason}; use the provider reference")
    if any(part.shape[dim] % SIDE for part in parts[:-1]):
        parts = [torch.cat(list(parts), dim)]
    sizes = [part.shape[dim] for part in parts]
    shape = [*parts[0].shape]
    shape[dim] = sum(sizes)
    device = parts[0].device
    out = into or _allocate((shape[0], shape[1]), straight, device)
    out_t = _allocate((shape[1], shape[0]), turned, device, True)
    start = 0
    for group in _launches(parts, rows_only=straight == REGIONS[0] and turned is None):
        place = (start, 0) if dim == 0 else (0, start)
        start += sum(part.shape[dim] for part in group)
        if all(part.numel() == 0 for part in group):
            continue
        _launch(
            group,
            dim,
            _at(*out, straight, place),
            straight,
            _at(*out_t, turned, (place[1], place[0])),
            turned,
            scale_format == "ue8m0",
            amax_floor,
        )
    return (*out, *out_t)


def _launches(parts: Sequence[Tensor], rows_only: bool) -> Iterator[list[Tensor]]:
    """Yield the parts that are quantized in one launch: at most 3, of one dtype."""
    group: list[Tensor] = []
    for part in parts:
        if part.stride(1) != 1 and part.shape[1] > 1:
            part = part.contiguous()
        full = len(group) == (1 if rows_only else MOST_PARTS)
        if group and (full or group[0].dtype != part.dtype):
            yield group
            group = []
        group.append(part)
    yield group


def _allocate(
    shape: tuple[int, int],
    region: Region | None,
    device: torch.device,
    transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    if region is None:
        shape, region = (0, 0), REGIONS[0]
    return empty_quantized(shape, *region, device, transposed)


def _at(
    codes: Tensor, scales: Tensor, region: Region | None, place: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return the codes and scales from a row and column of the matrix on."""
    if region is None or place == (0, 0):
        return codes, scales
    first, second = (at // size for at, size in zip(place, region, strict=True))
    return codes[place[0] :, place[1] :], scales[first:, second:]


def _launch(
    parts: list[Tensor],
    dim: int,
    out: tuple[Tensor, Tensor],
    straight: Region | None,
    out_t: tuple[Tensor, Tensor],
    turned: Region | None,
    ue8m0: bool,
    amax_floor: float,
) -> None:
    with on_device(parts[0]):
        if turned is None and straight == REGIONS[0]:
            _launch_rows(parts[0], *out, ue8m0, amax_floor)
        else:
            _launch_tiles(parts, dim, out, straight, out_t, turned, ue8m0, amax_floor)


def _launch_rows(
    x: Tensor, codes: Tensor, scales: Tensor, ue8m0: bool, amax_floor: float
) -> None:
    rows, cols = x.shape
    # A warp has two rows at a time. Few rows (decoding): more programs.
    height, warps = (32, 4) if rows > 16 else (4, 1)
    work = -(-cols // SIDE) * -(-rows // height)
    launch_kernel(rows_kernel, (work,), overlaps(x.device))(
        x,
        x.stride(0),
        codes,
        codes.stride(0),
        scales,
        scales.stride(1),
        rows,
        cols,
        FLOOR=amax_floor,
        UE8M0=ue8m0,
        EVEN=cols % SIDE == 0,
        HEIGHT=height,
        num_warps=warps,
    )


def _launch_tiles(
    parts: list[Tensor],
    dim: int,
    out: tuple[Tensor, Tensor],
    straight: Region | None,
    out_t: tuple[Tensor, Tensor],
    turned: Region | None,
    ue8m0: bool,
    amax_floor: float,
) -> None:
    size = [*parts[0].shape]
    size[dim] = sum(part.shape[dim] for part in parts)
    rows, cols = size
    # In words where all rows begin at multiples of 4 bytes.
    words = parts[0].dtype == torch.bfloat16 and cols % 2 == 0
    words = words and all(
        part.data_ptr() % 4 == 0 and (part.stride(0) % 2 == 0 or part.shape[0] == 1)
        for part in parts
    )
    seams = [sum(part.shape[dim] for part in parts[:count]) for count in (1, 2)]
    given = [*parts, *parts[-1:] * (MOST_PARTS - len(parts))]
    launch_kernel(
        tile_kernel, (-(-rows // SIDE) * -(-cols // SIDE),), overlaps(parts[0].device)
    )(
        *given,
        *(part.stride(0) for part in given),
        *seams,
        out[0],
        out[0].stride(0),
        out[1],
        # Of blocks the rows lie apart, of groups the columns.
        out[1].stride(0 if straight == REGIONS[1] else 1),
        out_t[0],
        out_t[0].stride(0),
        out_t[1],
        out_t[1].stride(0 if turned == REGIONS[1] else 1),
        rows,
        cols,
        multiprocessors(parts[0].device) * TOGETHER,
        PARTS=len(parts),
        BELOW=dim == 0,
        WORDS=words,
        FLOOR=amax_floor,
        UE8M0=ue8m0,
        EVEN=rows % SIDE == 0 and cols % SIDE == 0,
        STRAIGHT=_made(straight),
        TURNED=_made(turned),
        num_warps=8,
    )


def _made(region: Region | None) -> int:
    return NONE if region is None else GROUPS if region == REGIONS[0] else BLOCKS
