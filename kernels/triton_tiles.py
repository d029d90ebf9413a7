"""Tiles of a matrix in Triton kernels: read once, quantized straight and transposed.

A tile is 128 columns and 4 QUARTER rows of a row-major matrix, as a *quad*: a tuple of
four tensors (QUARTER, 128), where the i-th row of tensor k is row 4 i + k of the tile.
So a thread has 4 adjacent rows of a column: codes of the transpose are packed in 32-bit
words before they move between threads. A tile that is transposed or quantized in
128x128 blocks has 128 rows, so that every region of it lies inside.

Tiles are kept in registers: one of 128x128 in FP32 takes 32 a thread of 16 warps.
Kernels finish with one output before they begin the next.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetrl_compile.granularity import Granularity
from jetrl_compile.kernels.layouts import E4M3, empty_quantized
from jetrl_compile.kernels.triton_common import (
    absmax,
    encode,
    encode_words,
    jit,
    magnitude,
    region_scale,
    tl,
)

TILE = 128  # columns of a tile, and rows of one that is transposed or has blocks
WIDTH = tl.constexpr(TILE)
# Arguments of kernels that change with the number of tokens and help no vectorization:
# another value must not compile another kernel.
ANY_VALUE = [
    "rows",
    "scale_stride",
    "scale_stride_t",
    "scale_stride_x",
    "gate_scale_stride",
    "up_scale_stride",
]


def kernel(function: Callable[..., Any]) -> Any:
    """Make a kernel that programs are launched of."""
    return jit(function, do_not_specialize=ANY_VALUE)


@jit
def tile_origin(
    rows: tl.tensor, cols: tl.tensor, QUARTER: tl.constexpr, BAND: tl.constexpr
) -> tl.tensor:
    """Return the first row and column of this program's tile.

    Programs that run together write adjacent parts of memory: they walk down BAND
    tiles, then go to the next 128 columns.

    Args:
        rows: Of the matrix.
        cols: Of the matrix.
        QUARTER: Rows of a tile, divided by 4.
        BAND: Tiles below each other that are visited one after another.
    """
    program = tl.program_id(0)
    high, wide = tl.cdiv(rows, 4 * QUARTER), tl.cdiv(cols, WIDTH)
    first = program // (BAND * wide) * BAND
    height = tl.minimum(high - first, BAND)
    inside = program % (BAND * wide)
    return (first + inside % height) * 4 * QUARTER, inside // height * WIDTH


@jit
def _part(
    pointer: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    stride: tl.tensor,
    QUARTER: tl.constexpr,
    PART: tl.constexpr,
) -> tl.tensor:
    """Return addresses of a tensor of a quad, and which of them the matrix has."""
    down = 4 * tl.arange(0, QUARTER)[:, None] + PART
    right = tl.arange(0, WIDTH)[None, :]
    # 64 bits for the origin of the tile, 32 inside.
    at = pointer + (row.to(tl.int64) * stride + col) + (down * stride + right)
    return at, (row + down < rows) & (col + right < cols)


@jit
def load_quad(
    pointer: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    stride: tl.tensor,
    QUARTER: tl.constexpr,
    FULL: tl.constexpr,
) -> tl.tensor:
    """Return a tile in the matrix's dtype; 0 outside of the matrix.

    Args:
        pointer: To the matrix.
        row: First row of the tile.
        col: First column of the tile.
        rows: Of the matrix.
        cols: Of the matrix.
        stride: Between rows, in elements.
        QUARTER: Rows of the tile, divided by 4.
        FULL: Whether all tiles lie inside of the matrix.
    """
    at0, in0 = _part(pointer, row, col, rows, cols, stride, QUARTER, 0)
    at1, in1 = _part(pointer, row, col, rows, cols, stride, QUARTER, 1)
    at2, in2 = _part(pointer, row, col, rows, cols, stride, QUARTER, 2)
    at3, in3 = _part(pointer, row, col, rows, cols, stride, QUARTER, 3)
    if FULL:
        return tl.load(at0), tl.load(at1), tl.load(at2), tl.load(at3)
    return (
        tl.load(at0, mask=in0, other=0.0),
        tl.load(at1, mask=in1, other=0.0),
        tl.load(at2, mask=in2, other=0.0),
        tl.load(at3, mask=in3, other=0.0),
    )


@jit
def load_rows(
    pointer: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    QUARTER: tl.constexpr,
    FULL: tl.constexpr,
) -> tl.tensor:
    """Return one number for each row of a tile, (QUARTER, 1) for each tensor."""
    down = row + 4 * tl.arange(0, QUARTER)[:, None]
    at = pointer + down
    if FULL:
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    return (
        tl.load(at, mask=down < rows, other=0.0),
        tl.load(at + 1, mask=down + 1 < rows, other=0.0),
        tl.load(at + 2, mask=down + 2 < rows, other=0.0),
        tl.load(at + 3, mask=down + 3 < rows, other=0.0),
    )


@jit
def store_quad(
    quad: tl.tensor,
    pointer: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    stride: tl.tensor,
    QUARTER: tl.constexpr,
) -> None:
    """Store a tile; the arguments are those of `load_quad`."""
    for part in tl.static_range(4):
        at, inside = _part(pointer, row, col, rows, cols, stride, QUARTER, part)
        tl.store(at, quad[part].to(pointer.dtype.element_ty), mask=inside)


@jit
def _column_magnitude(quad: tl.tensor) -> tl.tensor:
    top = tl.maximum(
        tl.maximum(magnitude(quad[0]), magnitude(quad[1])),
        tl.maximum(magnitude(quad[2]), magnitude(quad[3])),
    )
    return tl.max(top, axis=0)


@jit
def _block_scale(
    quad: tl.tensor, FLOOR: tl.constexpr, UE8M0: tl.constexpr
) -> tl.tensor:
    amax = tl.max(_column_magnitude(quad), axis=0).to(tl.float32, bitcast=True)
    return region_scale(amax, FLOOR, UE8M0)


@jit
def quantize_quad(
    quad: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    code_stride: tl.tensor,
    scale_stride: tl.tensor,
    QUARTER: tl.constexpr,
    BLOCKS: tl.constexpr,
    FULL: tl.constexpr,
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
) -> None:
    """Quantize a tile and store its codes and scales.

    Args:
        quad: In FP32, that BF16 holds exactly; 0 outside of the matrix.
        codes: Pointer to the codes, row-major.
        scales: Pointer to the scales: column-major for groups, row-major for blocks.
        row: First row of the tile.
        col: First column of the tile.
        rows: Of the matrix.
        cols: Of the matrix.
        code_stride: Between rows of codes.
        scale_stride: Between columns (groups) or rows (blocks) of scales.
        QUARTER: Rows of the tile, divided by 4; 32 for blocks.
        BLOCKS: Whether regions are 128x128 blocks, not 1x128 groups.
        FULL: Whether all tiles lie inside of the matrix.
        FLOOR: As in `region_scale`.
        UE8M0: As in `region_scale`.
    """
    if BLOCKS:
        block = _block_scale(quad, FLOOR, UE8M0)
        tl.store(scales + row // WIDTH * scale_stride + col // WIDTH, block)
    for part in tl.static_range(4):
        if BLOCKS:
            scale = block
        else:
            groups = region_scale(absmax(quad[part], 1), FLOOR, UE8M0)
            down = row + 4 * tl.arange(0, QUARTER) + part
            to = scales + (col // WIDTH).to(tl.int64) * scale_stride + down
            tl.store(to, groups, mask=down < rows)
            scale = groups[:, None]
        code = encode(quad[part], scale)
        at, inside = _part(codes, row, col, rows, cols, code_stride, QUARTER, part)
        if FULL:
            tl.store(at, code)
        else:
            tl.store(at, code, mask=inside)


@jit
def quantize_turned(
    quad: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    code_stride: tl.tensor,
    scale_stride: tl.tensor,
    BLOCKS: tl.constexpr,
    FULL: tl.constexpr,
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
) -> None:
    """Quantize the transpose of a tile of 128x128 and store its codes and scales.

    Arguments are those of `quantize_quad`, of the matrix that is not transposed, but
    for `codes`, `scales` and their strides. Padding after the last code of a row, up to
    a multiple of 4, is written.
    """
    right = col + tl.arange(0, WIDTH)
    if BLOCKS:
        scale = _block_scale(quad, FLOOR, UE8M0)
        tl.store(scales + col // WIDTH * scale_stride + row // WIDTH, scale)
    else:
        amax = _column_magnitude(quad).to(tl.float32, bitcast=True)
        groups = region_scale(amax, FLOOR, UE8M0)
        to = scales + (row // WIDTH).to(tl.int64) * scale_stride + right
        tl.store(to, groups, mask=right < cols)
        scale = groups[None, :]
    word = encode_words(quad[0], quad[1], quad[2], quad[3], scale)
    four = tl.arange(0, WIDTH // 4)[None, :]
    words = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    origin = (col.to(tl.int64) * code_stride + row) // 4
    down = tl.arange(0, WIDTH)[:, None]
    at = words + origin + (down * (code_stride // 4) + four)
    if FULL:
        tl.store(at, tl.trans(word))
    else:
        inside = (col + down < cols) & (row + 4 * four < rows)
        tl.store(at, tl.trans(word), mask=inside)


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel is spread over the GPU; no bit of its results depends on it.

    Attributes:
        height: Rows of a tile.
        warps: Of a program.
        band: As in `tile_origin`.
    """

    height: int
    warps: int
    band: int

    def tiles(self, rows: int, cols: int) -> int:
        """Return how many tiles a matrix has, partial ones included."""
        return -(-rows // self.height) * -(-cols // TILE)

    def is_full(self, rows: int, cols: int) -> bool:
        """Whether no tile of a matrix is partial."""
        return rows % self.height == 0 and cols % TILE == 0


def region_unsupported(rows: int, cols: int) -> str | None:
    """Return why tiles do not hold regions of this size, or None if they do."""
    if (rows, cols) in ((1, TILE), (TILE, TILE)):
        return None
    return f"regions are {Granularity(rows, cols)}, not 1x128 or 128x128"


def outputs(
    shape: tuple[int, int], rows: int, cols: int, device: torch.device
) -> tuple[Tensor, Tensor, int]:
    """Allocate codes and scales, and return the `scale_stride` of `quantize_quad`."""
    codes, scales = empty_quantized(shape, rows, cols, device)
    return codes, scales, scales.stride(1 if rows == 1 else 0)


def no_output(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of a transpose that is not wanted."""
    return (
        torch.empty((0, 0), dtype=E4M3, device=device),
        torch.empty((0, 0), dtype=torch.float32, device=device),
    )
