"""Bring a weight into the GPU's L2 cache while what it is multiplied with is quantized.

In decoding a GEMM takes as long as its weight takes to come from memory, and the kernel
that quantizes its input, 2 to 3 us long, leaves memory idle. Programs that are added to
that kernel fetch the first columns of each row of the weight, which is where the tiles
of the GEMM begin. Only time changes: nothing is read but by the GEMM.

`bringing` says which matrix the kernels launched in its body bring; `brought` is what
they ask. The operators of `ahead_ops` enter it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

LINE = 128  # bytes that one access to memory brings
# What memory gives in the time of a quantizer, and a part of the cache of 50 MB.
BYTES = 8 << 20
PROGRAM_LINES = 512
# With more rows GEMMs wait for arithmetic, not for memory.
MOST_ROWS = 512
_thread = threading.local()  # as autograd runs backward in another one


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a kernel brings into the cache.

    Attributes:
        matrix: (N, K) codes in E4M3, K adjacent; None: nothing.
        rows: N.
        stride: Bytes between rows.
        lines: Of each row, the first ones.
        programs: How many are added to the kernel.
    """

    matrix: Tensor | None = None
    rows: int = 0
    stride: int = 0
    lines: int = 1
    programs: int = 0


NOTHING = Ahead()


@contextmanager
def bringing(matrix: Tensor) -> Iterator[None]:
    """Let the kernels that are launched in the body bring a matrix; (N, K) codes."""
    _thread.matrix = matrix
    try:
        yield
    finally:
        _thread.matrix = None


def brought(rows: int) -> Ahead:
    """Return what a kernel brings that quantizes some rows."""
    matrix: Tensor | None = getattr(_thread, "matrix", None)
    if matrix is None or rows > MOST_ROWS or not matrix.numel():
        return NOTHING
    n, k = matrix.shape
    lines = max(1, min(k // LINE, BYTES // LINE // n))
    programs = -(-n * lines // PROGRAM_LINES)
    return Ahead(matrix, n, matrix.stride(0), lines, programs)
