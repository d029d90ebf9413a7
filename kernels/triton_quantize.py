"""Triton kernels that quantize BF16: the bits of `reference_fused`, one read.

Bytes moved for each element: 2 read, and 1 written for each copy (straight or
transposed), plus 4 for each scale (1/32 of a byte an element for 1x128 groups).

Two kernels, with fixed parameters: the bits do not depend on them, no tuning run can
fall into a CUDA graph capture, and the kernels wait for memory, not for arithmetic.

- `_rows_kernel`, 1x128 straight: a tile of some rows by 128 columns, 16 elements a
  thread and row, so that reads and writes have 16 bytes.
- `_tile_kernel`, all else: a tile of 128x128 as four tiles of 32x128 that hold every
  fourth row. So a thread has 4 tokens of a column, and the transposed codes cross the
  shared memory as 32-bit words of 4 codes, a quarter of the accesses; a row of them is
  written as 128 adjacent bytes.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from jetrl_compile.errors import ProviderError
from jetrl_compile.formats import AMAX_FLOOR, short_name
from jetrl_compile.granularity import BLOCK_128X128, GROUP_1X128, Granularity
from jetrl_compile.kernels.layouts import empty_quantized
from jetrl_compile.kernels.triton_common import (
    absmax,
    cannot_run,
    encode,
    encode_words,
    jit,
    largest,
    magnitude,
    on_device,
    region_scale,
    round_bf16,
    tl,
)

SIDE = 128
REGIONS = tuple((g.rows, g.cols) for g in (GROUP_1X128, BLOCK_128X128))
# What a kernel makes of a tile, straight or transposed. Constants of the kernel.
NONE, GROUPS, BLOCKS = 0, 1, 2
_NONE, _GROUPS, _BLOCKS = (tl.constexpr(made) for made in (NONE, GROUPS, BLOCKS))
Region = tuple[int, int]


@partial(jit, do_not_specialize=["R"])
def _rows_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    codes: tl.tensor,
    codes_stride: tl.tensor,
    scales: tl.tensor,
    scales_stride: tl.tensor,
    R: tl.tensor,
    C: tl.tensor,
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
    EVEN: tl.constexpr,
    HEIGHT: tl.constexpr,
) -> None:
    """Quantize (R, C) in 1x128 groups; a program takes HEIGHT groups of one column."""
    groups = tl.cdiv(C, 128)
    group = tl.program_id(0) % groups
    row = tl.program_id(0) // groups * HEIGHT + tl.arange(0, HEIGHT)
    col = group * 128 + tl.arange(0, 128)
    at = row[:, None].to(tl.int64)
    inside = row[:, None] < R
    if not EVEN:
        inside = inside & (col[None, :] < C)
    value = load(x + at * x_stride + col[None, :], inside, False)
    scale = region_scale(absmax(value, 1), FLOOR, UE8M0)
    code = encode(value, scale[:, None])
    tl.store(codes + at * codes_stride + col[None, :], code, mask=inside)
    tl.store(scales + group * scales_stride + row, scale, mask=row < R)


@partial(jit, do_not_specialize=["R"])
def _tile_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    codes: tl.tensor,
    codes_stride: tl.tensor,
    scales: tl.tensor,
    scales_stride: tl.tensor,
    codes_t: tl.tensor,
    codes_t_stride: tl.tensor,
    scales_t: tl.tensor,
    scales_t_stride: tl.tensor,
    R: tl.tensor,
    C: tl.tensor,
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
    EVEN: tl.constexpr,
    STRAIGHT: tl.constexpr,
    TURNED: tl.constexpr,
) -> None:
    """Quantize (R, C) and its transpose; a program takes a tile of 128x128."""
    tiles = tl.cdiv(C, 128)
    tile_c = tl.program_id(0) % tiles
    tile_r = tl.program_id(0) // tiles
    # Rows 4 i + 0 to 4 i + 3 of the tile are row i of four tiles of 32x128.
    row = tile_r * 128 + 4 * tl.arange(0, 32)
    col = tile_c * 128 + tl.arange(0, 128)
    in_row, in_col = row[:, None], col[None, :] < C
    at = x + in_row.to(tl.int64) * x_stride + col[None, :]
    x0 = load(at, (in_row < R) & in_col, EVEN)
    x1 = load(at + x_stride, (in_row + 1 < R) & in_col, EVEN)
    x2 = load(at + 2 * x_stride, (in_row + 2 < R) & in_col, EVEN)
    x3 = load(at + 3 * x_stride, (in_row + 3 < R) & in_col, EVEN)

    to = codes + in_row.to(tl.int64) * codes_stride + col[None, :]
    if STRAIGHT == _GROUPS:
        s0 = region_scale(absmax(x0, 1), FLOOR, UE8M0)
        s1 = region_scale(absmax(x1, 1), FLOOR, UE8M0)
        s2 = region_scale(absmax(x2, 1), FLOOR, UE8M0)
        s3 = region_scale(absmax(x3, 1), FLOOR, UE8M0)
        _store(to, encode(x0, s0[:, None]), in_row, in_col, R, EVEN)
        to += codes_stride
        _store(to, encode(x1, s1[:, None]), in_row + 1, in_col, R, EVEN)
        to += codes_stride
        _store(to, encode(x2, s2[:, None]), in_row + 2, in_col, R, EVEN)
        to += codes_stride
        _store(to, encode(x3, s3[:, None]), in_row + 3, in_col, R, EVEN)
        # Four scales of adjacent rows lie beside each other.
        all4 = tl.join(tl.join(s0, s2), tl.join(s1, s3)).reshape(128)
        every = tile_r * 128 + tl.arange(0, 128)
        tl.store(scales + tile_c * scales_stride + every, all4, mask=every < R)

    if STRAIGHT == _BLOCKS or TURNED != _NONE:
        top = tl.maximum(
            tl.maximum(magnitude(x0), magnitude(x1)),
            tl.maximum(magnitude(x2), magnitude(x3)),
        )
        amax = largest(top, 0)
    if STRAIGHT == _BLOCKS or TURNED == _BLOCKS:
        block_scale = region_scale(absmax(amax, 0), FLOOR, UE8M0)
    if STRAIGHT == _BLOCKS:
        tl.store(scales + tile_r * scales_stride + tile_c, block_scale)
        _store(to, encode(x0, block_scale), in_row, in_col, R, EVEN)
        to += codes_stride
        _store(to, encode(x1, block_scale), in_row + 1, in_col, R, EVEN)
        to += codes_stride
        _store(to, encode(x2, block_scale), in_row + 2, in_col, R, EVEN)
        to += codes_stride
        _store(to, encode(x3, block_scale), in_row + 3, in_col, R, EVEN)

    if TURNED == _BLOCKS:
        tl.store(scales_t + tile_c * scales_t_stride + tile_r, block_scale)
        word = encode_words(x0, x1, x2, x3, block_scale)
    if TURNED == _GROUPS:
        scale = region_scale(amax, FLOOR, UE8M0)
        tl.store(scales_t + tile_r * scales_t_stride + col, scale, mask=col < C)
        word = encode_words(x0, x1, x2, x3, scale[None, :])
    if TURNED != _NONE:
        store_turned(word, codes_t, codes_t_stride, tile_r, tile_c, R, C, EVEN)


@jit
def load(at: tl.tensor, inside: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    """Return values of the source in BF16; 0 outside."""
    value = tl.load(at) if EVEN else tl.load(at, mask=inside, other=0.0)
    if value.dtype == tl.float32:
        value = round_bf16(value).to(tl.bfloat16)
    return value


@jit
def store_turned(
    word: tl.tensor,
    codes_t: tl.tensor,
    codes_t_stride: tl.tensor,
    tile_r: tl.tensor,
    tile_c: tl.tensor,
    R: tl.tensor,
    C: tl.tensor,
    EVEN: tl.constexpr,
) -> None:
    """Store a tile of packed codes into its place in the transpose.

    Args:
        word: (32, 128) in int32: four codes of adjacent rows of the source.
        codes_t: (C, R) codes, rows begin at multiples of 16 bytes. Padding after the
            last code of a row, up to a multiple of 4, is written.
        codes_t_stride: Between rows of `codes_t`, in codes.
        tile_r: Which 128 rows of the source.
        tile_c: Which 128 columns of the source.
        R: Rows of the source.
        C: Columns of the source.
        EVEN: Whether the tile is full.
    """
    row = (tile_c * 128 + tl.arange(0, 128))[:, None]
    quad = (tile_r * 32 + tl.arange(0, 32))[None, :]
    words = codes_t.to(tl.pointer_type(tl.int32), bitcast=True)
    at = words + row.to(tl.int64) * (codes_t_stride // 4) + quad
    if EVEN:
        tl.store(at, tl.trans(word))
    else:
        tl.store(at, tl.trans(word), mask=(row < C) & (quad * 4 < R))


@jit
def _store(
    at: tl.tensor,
    code: tl.tensor,
    row: tl.tensor,
    in_col: tl.tensor,
    R: tl.tensor,
    EVEN: tl.constexpr,
) -> None:
    if EVEN:
        tl.store(at, code)
    else:
        tl.store(at, code, mask=(row < R) & in_col)


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
    return cannot_run(list(parts), amax_floor)


def quantize_parts(
    parts: Sequence[Tensor],
    dim: int,
    rows: int,
    cols: int,
    transpose: bool,
    scale_format: str,
    amax_floor: float,
) -> tuple[Tensor, Tensor]:
    """Run `reference_fused.quantize_parts` in one launch for each part.

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
    """Run `reference_fused.quantize_twice` in one launch and one read for each part.

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


def _quantize(
    parts: Sequence[Tensor],
    dim: int,
    straight: Region | None,
    turned: Region | None,
    scale_format: str,
    amax_floor: float,
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
    out = _allocate((shape[0], shape[1]), straight, device)
    out_t = _allocate((shape[1], shape[0]), turned, device)
    start = 0
    for part, size in zip(parts, sizes, strict=True):
        place = (start, 0) if dim == 0 else (0, start)
        start += size
        if part.numel() == 0:
            continue
        _launch(
            part if part.stride(1) == 1 or part.shape[1] == 1 else part.contiguous(),
            _at(*out, straight, place),
            straight,
            _at(*out_t, turned, (place[1], place[0])),
            turned,
            scale_format,
            amax_floor,
        )
    return (*out, *out_t)


def _allocate(
    shape: tuple[int, int], region: Region | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    if region is None:
        shape, region = (0, 0), REGIONS[0]
    return empty_quantized(shape, *region, device)


def _at(
    codes: Tensor, scales: Tensor, region: Region | None, place: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return the codes and scales from a row and column of the matrix on."""
    if region is None or place == (0, 0):
        return codes, scales
    first, second = (at // size for at, size in zip(place, region, strict=True))
    return codes[place[0] :, place[1] :], scales[first:, second:]


def _launch(
    x: Tensor,
    out: tuple[Tensor, Tensor],
    straight: Region | None,
    out_t: tuple[Tensor, Tensor],
    turned: Region | None,
    scale_format: str,
    amax_floor: float,
) -> None:
    rows, cols = x.shape
    ue8m0 = scale_format == "ue8m0"
    groups = -(-cols // SIDE)
    with on_device(x):
        if turned is None and straight == REGIONS[0]:
            # A warp has two rows at a time. Few rows (decoding): more programs.
            height, warps = (32, 4) if rows > 16 else (4, 1)
            _rows_kernel[(groups * -(-rows // height),)](
                x,
                x.stride(0),
                out[0],
                out[0].stride(0),
                out[1],
                out[1].stride(1),
                rows,
                cols,
                FLOOR=amax_floor,
                UE8M0=ue8m0,
                EVEN=cols % SIDE == 0,
                HEIGHT=height,
                num_warps=warps,
            )
            return
        # Of blocks the rows lie apart, of groups the columns.
        step = out[1].stride(0 if straight == REGIONS[1] else 1)
        step_t = out_t[1].stride(0 if turned == REGIONS[1] else 1)
        _tile_kernel[(groups * -(-rows // SIDE),)](
            x,
            x.stride(0),
            out[0],
            out[0].stride(0),
            out[1],
            step,
            out_t[0],
            out_t[0].stride(0),
            out_t[1],
            step_t,
            rows,
            cols,
            FLOOR=amax_floor,
            UE8M0=ue8m0,
            EVEN=rows % SIDE == 0 and cols % SIDE == 0,
            STRAIGHT=_made(straight),
            TURNED=_made(turned),
            num_warps=8,
        )


def _made(region: Region | None) -> int:
    return NONE if region is None else GROUPS if region == REGIONS[0] else BLOCKS
