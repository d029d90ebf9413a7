"""A GEMM whose weight is several matrices below each other, each with its own blocks.

    jetrl::gemm_parts   a, scales, b, scales, rows of the parts -> a b^T

Engines fuse layers (q, k and v). Where a part's rows are no multiple of 128, blocks of
the whole weight would belong to two layers; here each part has the blocks, and so the
codes, that it has alone. The parts are GEMMs of their own, their results lie beside
each other.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from jetrl_compile.errors import PrecisionFlowError
from jetrl_compile.granularity import Granularity
from jetrl_compile.kernels.dispatch import get_provider
from jetrl_compile.kernels.op_definition import check_codes, check_out_dtype, define


def split_scales(
    scales: Tensor, parts: Sequence[int], b_rows: int, b_cols: int
) -> list[Tensor]:
    """Return the scales of each part of a weight.

    Args:
        scales: Of all parts, below each other.
        parts: Rows of each part.
        b_rows: Rows of a block.
        b_cols: Columns of a block.

    Raises:
        PrecisionFlowError: There are not as many rows of scales as the parts have.
    """
    rows = [Granularity(b_rows, b_cols).scale_shape((n, 1))[0] for n in parts]
    if scales.shape[0] != sum(rows):
        raise PrecisionFlowError(
            f"gemm_parts got {scales.shape[0]} rows of scales for parts of "
            f"{list(parts)} rows; blocks of {b_rows} rows need {sum(rows)}"
        )
    return list(torch.split(scales, rows))


def _check(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    parts: Sequence[int],
    a_rows: int,
    a_cols: int,
    b_rows: int,
    b_cols: int,
    out_dtype: torch.dtype,
) -> list[tuple[Tensor, Tensor]]:
    check_codes("gemm_parts", "a", a, a_scales, a_rows, a_cols)
    check_out_dtype("gemm_parts", out_dtype)
    if b.shape[0] != sum(parts) or a.shape[1] != b.shape[1]:
        raise PrecisionFlowError(
            f"gemm_parts got a {tuple(a.shape)} and b {tuple(b.shape)} in parts of "
            f"{list(parts)} rows; it computes a b^T, so both need one number of "
            "columns, and b as many rows as its parts"
        )
    scales = split_scales(b_scales, parts, b_rows, b_cols)
    pairs = list(zip(torch.split(b, list(parts)), scales, strict=True))
    for codes, part_scales in pairs:
        check_codes("gemm_parts", "a part of b", codes, part_scales, b_rows, b_cols)
    return pairs


def _gemm_parts(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    parts: Sequence[int],
    a_rows: int,
    a_cols: int,
    b_rows: int,
    b_cols: int,
    out_dtype: torch.dtype,
    provider: str,
) -> Tensor:
    numbers = (a_rows, a_cols, b_rows, b_cols)
    pairs = _check(a, a_scales, b, b_scales, parts, *numbers, out_dtype)
    run = get_provider(provider).gemm
    results = [run(a, a_scales, *pair, *numbers, out_dtype) for pair in pairs]
    return torch.cat(results, 1)


def _fake_gemm_parts(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    parts: Sequence[int],
    a_rows: int,
    a_cols: int,
    b_rows: int,
    b_cols: int,
    out_dtype: torch.dtype,
    provider: str,
) -> Tensor:
    numbers = (a_rows, a_cols, b_rows, b_cols)
    _check(a, a_scales, b, b_scales, parts, *numbers, out_dtype)
    get_provider(provider)
    return torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)


gemm_parts = define(
    "gemm_parts(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, int[] parts, "
    "int a_rows, int a_cols, int b_rows, int b_cols, ScalarType out_dtype, "
    "str provider) -> Tensor",
    _gemm_parts,
    _fake_gemm_parts,
    repeats=False,
)
