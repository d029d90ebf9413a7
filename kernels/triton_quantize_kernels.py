"""The kernels of `triton_quantize`: tiles of a matrix, quantized in registers.

- `rows_kernel`, 1x128 straight: a tile of some rows by 128 columns, 16 elements a
  thread and row, so that reads and writes have 16 bytes.
- `tile_kernel`, all else: a tile of 128x128 in words of two columns (`triton_tiles`). A
  program for each tile, with a prefetch: programs that loop over tiles, whose loads
  Triton pipelines, took 13-24% longer on an H200.
"""

from functools import partial

from jetrl_compile.kernels.triton_common import (
    absmax,
    encode,
    jit,
    region_scale,
    round_bf16,
    tl,
)
from jetrl_compile.kernels.triton_overlap import after_the_last_kernel, prefetch
from jetrl_compile.kernels.triton_tiles import quantize_quad, quantize_turned
from jetrl_compile.kernels.triton_words import pack

# Arguments that change with the number of tokens or with the GPU and help no
# vectorization: another value must not compile another kernel.
ANY_VALUE = [
    "R",
    "scales_stride",
    "scales_t_stride",
    "scales_stride_c",
    "seam1",
    "seam2",
    "ahead",
]
# What a kernel makes of a tile, straight or transposed.
NONE, GROUPS, BLOCKS = 0, 1, 2
_NONE, _BLOCKS = tl.constexpr(NONE), tl.constexpr(BLOCKS)


@partial(jit, do_not_specialize=ANY_VALUE)
def rows_kernel(
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
    after_the_last_kernel()
    groups = tl.cdiv(C, 128)
    group = tl.program_id(0) % groups
    row = tl.program_id(0) // groups * HEIGHT + tl.arange(0, HEIGHT)
    col = group * 128 + tl.arange(0, 128)
    at = row[:, None].to(tl.int64)
    inside = row[:, None] < R
    if not EVEN:
        inside = inside & (col[None, :] < C)
    value = tl.load(x + at * x_stride + col[None, :], mask=inside, other=0.0)
    if value.dtype == tl.float32:
        value = round_bf16(value).to(tl.bfloat16)
    scale = region_scale(absmax(value, 1), FLOOR, UE8M0)
    code = encode(value, scale[:, None])
    tl.store(codes + at * codes_stride + col[None, :], code, mask=inside)
    tl.store(scales + group * scales_stride + row, scale, mask=row < R)


@partial(jit, do_not_specialize=ANY_VALUE)
def tile_kernel(
    x0: tl.tensor,
    x1: tl.tensor,
    x2: tl.tensor,
    stride0: tl.tensor,
    stride1: tl.tensor,
    stride2: tl.tensor,
    seam1: tl.tensor,
    seam2: tl.tensor,
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
    ahead: tl.tensor,
    PARTS: tl.constexpr,
    BELOW: tl.constexpr,
    WORDS: tl.constexpr,
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
    EVEN: tl.constexpr,
    STRAIGHT: tl.constexpr,
    TURNED: tl.constexpr,
) -> None:
    """Quantize (R, C) and its transpose; a program takes a tile of 128x128.

    The matrix is PARTS matrices, x0 to x2, beside each other or, where BELOW, below
    each other. The second begins at column (row) seam1, the third at seam2; seams lie
    between tiles. WORDS says that two columns can be read as one word: BF16, rows begin
    at multiples of 4 bytes, and C is even; then the tile of the program that is `ahead`
    programs later is brought into the L2 cache. STRAIGHT and TURNED say what is made:
    NONE, GROUPS or BLOCKS.
    """
    after_the_last_kernel()
    wide = tl.cdiv(C, 128)
    row = tl.program_id(0) // wide * 128
    col = tl.program_id(0) % wide * 128
    x, stride, above, before = _part(
        x0, x1, x2, stride0, stride1, stride2, seam1, seam2, row, col, PARTS, BELOW
    )
    at = x + ((row - above).to(tl.int64) * stride + (col - before))
    quad = (
        _words(at, stride, row, col, R, C, 0, WORDS, EVEN),
        _words(at, stride, row, col, R, C, 1, WORDS, EVEN),
        _words(at, stride, row, col, R, C, 2, WORDS, EVEN),
        _words(at, stride, row, col, R, C, 3, WORDS, EVEN),
    )
    if WORDS:
        later = tl.program_id(0) + ahead
        later = tl.minimum(later, tl.num_programs(0) - 1)
        row_l, col_l = later // wide * 128, later % wide * 128
        x, stride, above, before = _part(
            x0,
            x1,
            x2,
            stride0,
            stride1,
            stride2,
            seam1,
            seam2,
            row_l,
            col_l,
            PARTS,
            BELOW,
        )
        # 256 lines: two for each row.
        line = tl.arange(0, 256)
        down = tl.minimum(row_l + line // 2, R - 1) - above
        right = tl.minimum(col_l + line % 2 * 64, C - 1) - before
        prefetch(x + (down.to(tl.int64) * stride + right))
    full = (row + 128 <= R) & (col + 128 <= C)
    if EVEN or full:
        _tile(
            quad,
            row,
            col,
            codes,
            codes_stride,
            scales,
            scales_stride,
            codes_t,
            codes_t_stride,
            scales_t,
            scales_t_stride,
            R,
            C,
            WORDS,
            FLOOR,
            UE8M0,
            STRAIGHT,
            TURNED,
            True,
        )
    else:
        _tile(
            quad,
            row,
            col,
            codes,
            codes_stride,
            scales,
            scales_stride,
            codes_t,
            codes_t_stride,
            scales_t,
            scales_t_stride,
            R,
            C,
            WORDS,
            FLOOR,
            UE8M0,
            STRAIGHT,
            TURNED,
            False,
        )


@jit
def _tile(
    quad: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
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
    WORDS: tl.constexpr,
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
    STRAIGHT: tl.constexpr,
    TURNED: tl.constexpr,
    FULL: tl.constexpr,
) -> None:
    """Quantize the tile from `row` and `col` on."""
    # The column after an odd last one is padding.
    pairs = C if WORDS else C + C % 2
    if STRAIGHT != _NONE:
        quantize_quad(
            quad,
            codes,
            scales,
            row,
            col,
            R,
            pairs,
            codes_stride,
            scales_stride,
            32,
            STRAIGHT == _BLOCKS,
            FULL,
            FLOOR,
            UE8M0,
        )
    if TURNED != _NONE:
        quantize_turned(
            quad,
            codes_t,
            scales_t,
            row,
            col,
            R,
            C,
            codes_t_stride,
            scales_t_stride,
            TURNED == _BLOCKS,
            FULL,
            FLOOR,
            UE8M0,
        )


@jit
def _part(
    x0: tl.tensor,
    x1: tl.tensor,
    x2: tl.tensor,
    stride0: tl.tensor,
    stride1: tl.tensor,
    stride2: tl.tensor,
    seam1: tl.tensor,
    seam2: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    PARTS: tl.constexpr,
    BELOW: tl.constexpr,
) -> tl.tensor:
    """Return the part that has a row and column, its stride, first row and column."""
    x, stride, start = x0, stride0, 0
    place = row if BELOW else col
    if PARTS > 1:
        x = tl.where(place >= seam1, x1, x)
        stride = tl.where(place >= seam1, stride1, stride)
        start = tl.where(place >= seam1, seam1, start)
    if PARTS > 2:
        x = tl.where(place >= seam2, x2, x)
        stride = tl.where(place >= seam2, stride2, stride)
        start = tl.where(place >= seam2, seam2, start)
    # Told so, the compiler reads 16 bytes at once.
    start = tl.multiple_of(start, 128) if PARTS > 1 else start
    above = start if BELOW else 0
    before = 0 if BELOW else start
    return x, stride, above, before


@jit
def _words(
    at: tl.tensor,
    stride: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    R: tl.tensor,
    C: tl.tensor,
    PART: tl.constexpr,
    WORDS: tl.constexpr,
    FULL: tl.constexpr,
) -> tl.tensor:
    """Return every fourth row of a tile from PART on: (32, 64) words, 0 outside."""
    down = 4 * tl.arange(0, 32)[:, None] + PART
    if WORDS:
        right = tl.arange(0, 64)[None, :]
        words = at.to(tl.pointer_type(tl.int32), bitcast=True)
        words += down * (stride // 2) + right
        inside = (row + down < R) & (col // 2 + right < C // 2)
        return tl.load(words) if FULL else tl.load(words, mask=inside, other=0)
    right = tl.arange(0, 128)[None, :]
    inside = (row + down < R) & (col + right < C)
    value = tl.load(at + (down * stride + right), mask=inside, other=0.0)
    first, second = tl.split(value.to(tl.float32).reshape(32, 64, 2))
    return pack(first, second)
