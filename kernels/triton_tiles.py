"""Tiles of a matrix in Triton kernels: read once, quantized straight and transposed.

A tile is (HEIGHT, 128) of a row-major matrix, HEIGHT a power of two. One that is
quantized in 128x128 blocks, or transposed, is 128x128, so that every region of it lies
inside. A tile is kept in registers: 128x128 in FP32 are 64 registers a thread of 8
warps, so kernels finish with one output before they begin the next.
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
    jit,
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
    rows: tl.tensor, cols: tl.tensor, HEIGHT: tl.constexpr, BAND: tl.constexpr
) -> tl.tensor:
    """Return the first row and column of this program's tile.

    Programs that run together write adjacent parts of memory: they walk down BAND
    tiles, then go to the next 128 columns.

    Args:
        rows: Of the matrix.
        cols: Of the matrix.
        HEIGHT: Rows of a tile.
        BAND: Tiles below each other that are visited one after another.
    """
    program = tl.program_id(0)
    high, wide = tl.cdiv(rows, HEIGHT), tl.cdiv(cols, WIDTH)
    first = program // (BAND * wide) * BAND
    height = tl.minimum(high - first, BAND)
    inside = program % (BAND * wide)
    return (first + inside % height) * HEIGHT, inside // height * WIDTH


@jit
def _offsets(
    row: tl.tensor, col: tl.tensor, stride: tl.tensor, HEIGHT: tl.constexpr
) -> tl.tensor:
    """Offsets of a tile in elements: 64 bits for its origin, 32 inside."""
    down, right = tl.arange(0, HEIGHT)[:, None], tl.arange(0, WIDTH)[None, :]
    return row.to(tl.int64) * stride + col + (down * stride + right)


@jit
def _inside(
    row: tl.tensor,
    col: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    HEIGHT: tl.constexpr,
) -> tl.tensor:
    down, right = tl.arange(0, HEIGHT)[:, None], tl.arange(0, WIDTH)[None, :]
    return (row + down < rows) & (col + right < cols)


@jit
def load_tile(
    pointer: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    stride: tl.tensor,
    HEIGHT: tl.constexpr,
    FULL: tl.constexpr,
) -> tl.tensor:
    """Return a tile, (HEIGHT, 128), in the matrix's dtype; 0 outside of the matrix.

    Args:
        pointer: To the matrix.
        row: First row of the tile.
        col: First column of the tile.
        rows: Of the matrix.
        cols: Of the matrix.
        stride: Between rows, in elements.
        HEIGHT: Rows of the tile.
        FULL: Whether all tiles lie inside of the matrix.
    """
    at = pointer + _offsets(row, col, stride, HEIGHT)
    if FULL:
        return tl.load(at)
    return tl.load(at, mask=_inside(row, col, rows, cols, HEIGHT), other=0.0)


@jit
def store_tile(
    tile: tl.tensor,
    pointer: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    stride: tl.tensor,
    HEIGHT: tl.constexpr,
    FULL: tl.constexpr,
) -> None:
    """Store a tile; the arguments are those of `load_tile`."""
    at = pointer + _offsets(row, col, stride, HEIGHT)
    if FULL:
        tl.store(at, tile)
    else:
        tl.store(at, tile, mask=_inside(row, col, rows, cols, HEIGHT))


@jit
def quantize_tile(
    tile: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    code_stride: tl.tensor,
    scale_stride: tl.tensor,
    HEIGHT: tl.constexpr,
    BLOCKS: tl.constexpr,
    FULL: tl.constexpr,
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
) -> None:
    """Quantize a tile and store its codes and scales.

    For the transpose, call it with the transposed tile and with row and col, rows and
    cols exchanged: only codes, 1 byte an element, are moved between threads.

    Args:
        tile: (HEIGHT, 128) in FP32, that BF16 holds exactly; 0 outside of the matrix.
        codes: Pointer to the codes, row-major.
        scales: Pointer to the scales: column-major for groups, row-major for blocks.
        row: First row of the tile.
        col: First column of the tile.
        rows: Of the matrix.
        cols: Of the matrix.
        code_stride: Between rows of codes.
        scale_stride: Between columns (groups) or rows (blocks) of scales.
        HEIGHT: Rows of the tile; 128 for blocks.
        BLOCKS: Whether regions are 128x128 blocks, not 1x128 groups.
        FULL: Whether all tiles lie inside of the matrix.
        FLOOR: As in `region_scale`.
        UE8M0: As in `region_scale`.
    """
    amax = absmax(tile, 1)
    if BLOCKS:
        scale = region_scale(absmax(amax, 0), FLOOR, UE8M0)
        tl.store(scales + row // WIDTH * scale_stride + col // WIDTH, scale)
        code = encode(tile, scale)
    else:
        scale = region_scale(amax, FLOOR, UE8M0)
        down = row + tl.arange(0, HEIGHT)
        at = scales + (col // WIDTH).to(tl.int64) * scale_stride + down
        if FULL:
            tl.store(at, scale)
        else:
            tl.store(at, scale, mask=down < rows)
        code = encode(tile, scale[:, None])
    store_tile(code, codes, row, col, rows, cols, code_stride, HEIGHT, FULL)


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
    """Allocate codes and scales, and return the `scale_stride` of `quantize_tile`."""
    codes, scales = empty_quantized(shape, rows, cols, device)
    return codes, scales, scales.stride(1 if rows == 1 else 0)


def no_output(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of a transpose that is not wanted."""
    return (
        torch.empty((0, 0), dtype=E4M3, device=device),
        torch.empty((0, 0), dtype=torch.float32, device=device),
    )
