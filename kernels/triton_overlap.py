"""What Triton kernels do so that one gets ready, or memory works, while another runs.

`triton_device.overlaps` says where kernels are launched before the one before them is
over; `bring_ahead` says what is brought into the L2 cache, and why.
"""

from jetrl_compile.kernels import bring_ahead
from jetrl_compile.kernels.triton_common import INTERPRETED, jit, tl

PROGRAM_LINES = tl.constexpr(bring_ahead.PROGRAM_LINES)
LINE = tl.constexpr(bring_ahead.LINE)


@jit
def after_the_last_kernel() -> None:
    """Wait for what kernels before this one wrote, and let the one behind get ready.

    The first thing that a kernel does which is launched with `overlapped`: nothing may
    be read or written before. Where kernels do not overlap it does nothing.
    """
    if not INTERPRETED and tl.target_info.cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@jit
def let_the_next_get_ready() -> None:
    """What `after_the_last_kernel` does, but for the wait: for programs that read none.

    Of a kernel that is launched with `overlapped`, each program does one or the other.
    """
    if not INTERPRETED and tl.target_info.cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()


@jit
def prefetch(at: tl.tensor) -> None:
    """Bring the lines of 128 bytes at some addresses from memory into the L2 cache.

    A program that does this for the tile of a program that will start when it ends
    shortens the wait of that one, and needs no register for it.

    Args:
        at: Addresses inside of tensors, one for each line.
    """
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [at],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@jit
def bring(
    matrix: tl.tensor,
    program: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    LINES: tl.constexpr,
) -> None:
    """Bring lines of a matrix of codes into the L2 cache: see `bring_ahead`.

    Args:
        matrix: Pointer to E4M3 codes.
        program: Which of the programs that share this work.
        rows: Of the matrix.
        stride: Bytes between rows.
        LINES: How many lines of each row, the first ones.
    """
    line = program * PROGRAM_LINES + tl.arange(0, PROGRAM_LINES)
    row = tl.minimum(line // LINES, rows - 1).to(tl.int64)
    prefetch(matrix + (row * stride + line % LINES * LINE))
