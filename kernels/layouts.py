"""The memory order of codes and scales: the one that Hopper's GEMM kernels read.

TMA, the copy engine that feeds those kernels, wants each row (codes) or column (scales)
of a matrix to begin at a multiple of 16 bytes.

- Codes are row-major; a row begins every `align(columns, 16)` elements. Where the
  matrix is the transpose of what was quantized, its columns are tokens (in wgrad),
  whose number changes from batch to batch: a row begins every
  `align(columns, 128) + 128` elements, so that no compiled graph depends on whether it
  is contiguous, and rows begin at cache lines.
- Scales of groups (one row a region) are column-major, "mn_major_tma": a column begins
  every `align(rows, 4)` elements.
- Scales of blocks (several rows a region) are row-major.

Padding is never read and never initialized. Sizes may be symbolic.
"""

from typing import Any

import torch
from torch import Tensor

from jetrl_compile.granularity import Granularity

E4M3 = torch.float8_e4m3fn
CODE_ALIGNMENT = 16  # elements of 1 byte
SCALE_ALIGNMENT = 4  # elements of 4 bytes
LINE = 128  # bytes of a line of the cache


def align(size: Any, to: int) -> Any:
    """Return the smallest multiple of `to` that is not below a size."""
    return (size + to - 1) // to * to


def code_strides(rows: Any, cols: Any, transposed: bool = False) -> tuple[Any, Any]:
    """Return the strides of a matrix of codes, in elements.

    Args:
        rows: Of the matrix.
        cols: Of the matrix.
        transposed: Whether it is the transpose of what was quantized.
    """
    if transposed:
        return (align(cols, LINE) + LINE, 1)
    return (align(cols, CODE_ALIGNMENT), 1)


def scale_strides(shape: tuple[Any, Any], rows: int) -> tuple[Any, Any]:
    """Return the strides of scales, in elements.

    Args:
        shape: Of the scales.
        rows: Rows of a region; 0 means all.
    """
    if rows == 1:
        return (1, align(shape[0], SCALE_ALIGNMENT))
    return (shape[1], 1)


def empty_quantized(
    shape: tuple[Any, Any],
    rows: int,
    cols: int,
    device: torch.device,
    transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Allocate codes and scales in their memory order.

    Args:
        shape: Of the quantized matrix.
        rows: Rows of a region; 0 means all.
        cols: Columns of a region; 0 means all.
        device: Where.
        transposed: Whether the matrix is the transpose of what was quantized.

    Returns:
        Codes in E4M3 and scales in FP32, both uninitialized.
    """
    scale_shape = Granularity(rows, cols).scale_shape(shape)
    strides = code_strides(*shape, transposed)
    return (
        torch.empty_strided(shape, strides, dtype=E4M3, device=device),
        torch.empty_strided(
            scale_shape,
            scale_strides(scale_shape, rows),
            dtype=torch.float32,
            device=device,
        ),
    )


def in_order(
    codes: Tensor, scales: Tensor, rows: int, transposed: bool = False
) -> tuple[Tensor, Tensor]:
    """Return codes and scales in their memory order, copied only where they are not."""
    strides = code_strides(codes.shape[0], codes.shape[1], transposed)
    if codes.stride() != strides:
        moved = torch.empty_strided(
            codes.shape, strides, dtype=codes.dtype, device=codes.device
        )
        codes = moved.copy_(codes)
    return codes, scales_in_order(scales, rows)


def scales_in_order(scales: Tensor, rows: int) -> Tensor:
    """Return scales in their memory order, copied only where they are not."""
    strides = scale_strides((scales.shape[0], scales.shape[1]), rows)
    if scales.stride() == strides:
        return scales
    turned = torch.empty_strided(
        scales.shape, strides, dtype=scales.dtype, device=scales.device
    )
    return turned.copy_(scales)
