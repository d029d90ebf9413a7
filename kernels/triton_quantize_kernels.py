"""The kernels of `triton_quantize`: tiles of a matrix, quantized in registers.

- `rows_kernel`, 1x128 straight: a tile of some rows by 128 columns, 16 elements a
  thread and row, so that reads and writes have 16 bytes.
- `tile_kernel`, all else: a tile of 128x128 as four tiles of 32x128 that hold every
  fourth row. So a thread has 4 tokens of a column, and the transposed codes cross the
  shared memory as 32-bit words of 4 codes, a quarter of the accesses; a row of them is
  written as 128 adjacent bytes.
"""

from functools import partial

from jetrl_compile.kernels.triton_common import (
    absmax,
    encode,
    encode_words,
    jit,
    largest,
    magnitude,
    region_scale,
    round_bf16,
    tl,
)

# Arguments that change with the number of tokens and help no vectorization: another
# value must not compile another kernel.
ANY_VALUE = ["R", "scales_stride", "scales_t_stride", "scales_stride_c"]
# What a kernel makes of a tile, straight or transposed.
NONE, GROUPS, BLOCKS = 0, 1, 2
_NONE, _GROUPS, _BLOCKS = (tl.constexpr(made) for made in (NONE, GROUPS, BLOCKS))


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


@partial(jit, do_not_specialize=ANY_VALUE)
def tile_kernel(
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
    WIDTH: tl.constexpr,
) -> None:
    """Quantize (R, C) and its transpose; a program takes a tile of 128x128.

    STRAIGHT and TURNED say what is made: NONE, GROUPS or BLOCKS. WIDTH is how many
    adjacent columns a thread has. It computes the scales of its columns, as the other
    threads of these columns do again: few columns and many rows are less work, but for
    the amax of rows, which more threads must share then.
    """
    tiles = tl.cdiv(C, 128)
    tile_c = tl.program_id(0) % tiles
    tile_r = tl.program_id(0) // tiles
    # Rows 4 i + 0 to 4 i + 3 of the tile are row i of four tiles of 32x128.
    row = tile_r * 128 + 4 * tl.arange(0, 32)
    col = tile_c * 128 + tl.arange(0, 128)
    # Told no more than this of the addresses, the compiler reads no more at once. It
    # must be said here: it is lost at the end of a function.
    col = tl.max_contiguous(tl.multiple_of(col, WIDTH), WIDTH)
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
