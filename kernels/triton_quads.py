"""Tiles of a matrix in Triton kernels: how they are read and stored.

A tile is 128 columns and 4 QUARTER rows of a row-major matrix in BF16, as a *quad*: a
tuple of four tensors (QUARTER, 64) of int32, where the i-th row of tensor k is row
4 i + k of the tile and each word is two adjacent columns, the first in its low half.

- Halves of a word are rounded, multiplied and compared together: half the instructions
  and half the traffic between threads for an amax.
- A thread has 4 adjacent rows of a column: codes of the transpose are packed in 32-bit
  words before they move between threads.
- A tile that is transposed or quantized in 128x128 blocks has 128 rows, so that every
  region of it lies inside. In words it takes 32 registers a thread of 8 warps.
"""

from jetrl_compile.kernels.triton_common import decode, jit, tl
from jetrl_compile.kernels.triton_launch import TILE
from jetrl_compile.kernels.triton_words import pack

WIDTH = tl.constexpr(TILE)
HALF = tl.constexpr(TILE // 2)  # words of a row of a tile


@jit
def tile_origin(tile: tl.tensor, cols: tl.tensor, QUARTER: tl.constexpr) -> tl.tensor:
    """Return the first row and column of a tile; tiles are counted along rows.

    Args:
        tile: Its number.
        cols: Of the matrix.
        QUARTER: Rows of a tile, divided by 4.
    """
    wide = tl.cdiv(cols, WIDTH)
    return tile // wide * 4 * QUARTER, tile % wide * WIDTH


@jit
def part_at(
    pointer: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    stride: tl.tensor,
    QUARTER: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Return addresses of a tensor of a quad, and which of them the matrix has.

    A tile is COLUMNS of what the pointer points to; all arguments count these.
    """
    down = 4 * tl.arange(0, QUARTER)[:, None] + PART
    right = tl.arange(0, COLUMNS)[None, :]
    # 64 bits for the origin of the tile, 32 inside.
    at = pointer + (row.to(tl.int64) * stride + col) + (down * stride + right)
    return at, (row + down < rows) & (col + right < cols)


@jit
def _load_part(
    pointer: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    stride: tl.tensor,
    QUARTER: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
    FULL: tl.constexpr,
) -> tl.tensor:
    at, inside = part_at(pointer, row, col, rows, cols, stride, QUARTER, PART, COLUMNS)
    return tl.load(at) if FULL else tl.load(at, mask=inside, other=0)


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
    """Return a tile; 0 outside of the matrix.

    Args:
        pointer: To the matrix, in BF16; 4-byte aligned.
        row: First row of the tile.
        col: First column of the tile.
        rows: Of the matrix.
        cols: Of the matrix; even.
        stride: Between rows, in elements; even.
        QUARTER: Rows of the tile, divided by 4.
        FULL: Whether all tiles lie inside of the matrix.
    """
    words = pointer.to(tl.pointer_type(tl.int32), bitcast=True)
    c, n, s = col // 2, cols // 2, stride // 2
    return (
        _load_part(words, row, c, rows, n, s, QUARTER, 0, HALF, FULL),
        _load_part(words, row, c, rows, n, s, QUARTER, 1, HALF, FULL),
        _load_part(words, row, c, rows, n, s, QUARTER, 2, HALF, FULL),
        _load_part(words, row, c, rows, n, s, QUARTER, 3, HALF, FULL),
    )


@jit
def load_codes(
    codes: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    stride: tl.tensor,
    scale_stride: tl.tensor,
    QUARTER: tl.constexpr,
    FULL: tl.constexpr,
) -> tl.tensor:
    """Return a tile of E4M3 codes times the scales of their 1x128 groups, in BF16.

    Args:
        codes: Pointer to the codes, row-major.
        scales: Pointer to the scales, column-major.
        row: As in `load_quad`.
        col: As in `load_quad`.
        rows: As in `load_quad`.
        cols: As in `load_quad`.
        stride: Between rows of codes.
        scale_stride: Between columns of scales.
        QUARTER: As in `load_quad`.
        FULL: As in `load_quad`.
    """
    column = scales + (col // WIDTH).to(tl.int64) * scale_stride
    scale = load_rows(column, row, rows, QUARTER, FULL)
    return (
        _decoded(codes, scale[0], row, col, rows, cols, stride, QUARTER, 0, FULL),
        _decoded(codes, scale[1], row, col, rows, cols, stride, QUARTER, 1, FULL),
        _decoded(codes, scale[2], row, col, rows, cols, stride, QUARTER, 2, FULL),
        _decoded(codes, scale[3], row, col, rows, cols, stride, QUARTER, 3, FULL),
    )


@jit
def _decoded(
    codes: tl.tensor,
    scale: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    stride: tl.tensor,
    QUARTER: tl.constexpr,
    PART: tl.constexpr,
    FULL: tl.constexpr,
) -> tl.tensor:
    code = _load_part(
        codes.to(tl.pointer_type(tl.uint8), bitcast=True),
        row,
        col,
        rows,
        cols,
        stride,
        QUARTER,
        PART,
        WIDTH,
        FULL,
    ).to(tl.float8e4nv, bitcast=True)
    value = (decode(code) * scale).reshape(QUARTER, HALF, 2)
    first, second = tl.split(value)
    return pack(first, second)


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
    words = pointer.to(tl.pointer_type(tl.int32), bitcast=True)
    c, n, s = col // 2, cols // 2, stride // 2
    for part in tl.static_range(4):
        at, inside = part_at(words, row, c, rows, n, s, QUARTER, part, HALF)
        tl.store(at, quad[part], mask=inside)
