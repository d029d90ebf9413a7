"""What the launches of the fused Triton kernels share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetrl_compile.granularity import Granularity
from jetrl_compile.kernels.layouts import E4M3, empty_quantized
from jetrl_compile.kernels.triton_common import cannot_run, jit, rows_of
from jetrl_compile.kernels.triton_device import capability

TILE = 128  # columns of a tile, and rows of one that is transposed or has blocks
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


def kernel(function: Callable[..., Any], unaligned: Sequence[str] = ()) -> Any:
    """Make a kernel that programs are launched of.

    Args:
        function: Its source.
        unaligned: Pointers of which the compiler is not told that they are aligned to
            16 bytes.
    """
    return jit(
        function,
        do_not_specialize=ANY_VALUE,
        do_not_specialize_on_alignment=list(unaligned),
    )


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel is spread over the GPU; no bit of its results depends on it.

    Attributes:
        height: Rows of a tile.
        warps: Of a program.
        registers: The most that a thread may have; None: as many as there are.
    """

    height: int
    warps: int
    registers: int | None = None

    def tiles(self, rows: int, cols: int) -> int:
        """Return how many tiles a matrix has, partial ones included."""
        return -(-rows // self.height) * -(-cols // TILE)

    def is_full(self, rows: int, cols: int) -> bool:
        """Whether no tile of a matrix is partial."""
        return rows % self.height == 0 and cols % TILE == 0


def word_rows(x: Tensor) -> Tensor:
    """Return (..., C) as (R, C) that can be read in words of two BF16 columns.

    A copy is made only where columns are not adjacent or a row begins within a word.
    """
    x = rows_of(x)
    if x.data_ptr() % 4 == 0 and (x.stride(0) % 2 == 0 or x.shape[0] < 2):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def words_cannot_run(tensors: list[Tensor], amax_floor: float) -> str | None:
    """Return why kernels that compute in words cannot run, or None if they can."""
    cols = tensors[0].shape[-1]
    if cols % 2:
        return f"C = {cols} is odd: two columns are read together"
    reason = cannot_run(tensors, amax_floor)
    if reason is None and tensors[0].is_cuda and torch.version.hip is None:
        found = capability(tensors[0].device)
        if found < (9, 0):
            return f"products of BF16 words need compute capability 9.0: {found}"
    return reason


def region_unsupported(rows: int, cols: int) -> str | None:
    """Return why tiles do not hold regions of this size, or None if they do."""
    if (rows, cols) in ((1, TILE), (TILE, TILE)):
        return None
    return f"regions are {Granularity(rows, cols)}, not 1x128 or 128x128"


def outputs(
    shape: tuple[int, int],
    rows: int,
    cols: int,
    device: torch.device,
    transposed: bool = False,
) -> tuple[Tensor, Tensor, int]:
    """Allocate codes and scales, and return the `scale_stride` of `quantize_quad`."""
    codes, scales = empty_quantized(shape, rows, cols, device, transposed)
    return codes, scales, scales.stride(1 if rows == 1 else 0)


def no_output(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of a transpose that is not wanted."""
    return (
        torch.empty((0, 0), dtype=E4M3, device=device),
        torch.empty((0, 0), dtype=torch.float32, device=device),
    )
