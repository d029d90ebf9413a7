"""The provider `scaled_mm`: cuBLASLt's block scaling, through torch.

`torch.nn.functional.scaled_mm` with 1x128 groups of `a` by 128x128 blocks of `b`. It
has the bits of `deep_gemm` and nothing to compile. What torch (aten ScaledBlas.cpp)
needs:

- CUDA 12.9 or newer, a Hopper GPU, the contraction and rows of `b` in multiples of 16;
- scales of `a` column-major without padding, (rows, groups) with strides (1, rows);
- scales of `b` as (groups padded to a multiple of 4, blocks of rows), strides
  (1, padded groups): block scales in our row-major order, each row padded.

Scales in another order are copied: 4 bytes for 128 codes of `a`, or 16384 of `b`.
"""

import torch
from torch import Tensor

from jetrl_compile.errors import ProviderError
from jetrl_compile.kernels.layouts import align
from jetrl_compile.kernels.provider import (
    WGMMA_GROUPS,
    GemmShape,
    Provider,
    no_hopper,
    not_on_cuda,
    not_quantized,
    other_regions,
)

MULTIPLE = 16  # of the contraction and of rows of b
MIN_ROWS = 128
MIN_CUDA = (12, 9)


def _usable() -> str | None:
    if not hasattr(torch.nn.functional, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm"
    why = no_hopper()
    if why is not None:
        return why
    version = torch.version.cuda or "0.0"
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_CUDA:
        return f"this torch has CUDA {version}; block scaling needs 12.9"
    return None


def _rejects(shape: GemmShape) -> str | None:
    why = not_quantized(shape) or not_on_cuda(shape) or other_regions(shape, False)
    if why is not None:
        return why
    if shape.out_dtype != "bf16":
        return f"it gives bf16, not {shape.out_dtype}"
    if shape.role == "wgrad":
        return f"tokens, which wgrad adds over, may be no multiple of {MULTIPLE}"
    _, b_rows, contraction = shape.sizes
    return _wrong_sizes(b_rows, contraction)


def _wrong_sizes(b_rows: int | None, contraction: int | None) -> str | None:
    for what, size in (("rows of b", b_rows), ("of contraction", contraction)):
        if size is None or size < 0:
            return f"the number {what} is not known; it must be a multiple of 16"
        if size % MULTIPLE:
            return f"{size} {what} are no multiple of {MULTIPLE}"
    return None


def gemm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    a_rows: int,
    a_cols: int,
    b_rows: int,
    b_cols: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Run `reference.gemm` with cuBLASLt.

    Bytes moved: m k + n k codes read (more where L2 does not hold a panel), scales, and
    2 m n written in BF16.

    Raises:
        ProviderError: cuBLASLt has no kernel for these regions, sizes or dtype.
    """
    (m, k), n = a.shape, b.shape[0]
    why = _wrong_sizes(n, k)
    if (a_rows, a_cols, b_rows) != (1, 128, 128):
        why = f"regions of {a_rows}x{a_cols} by {b_rows}x{b_cols}"
    elif out_dtype is not torch.bfloat16:
        why = f"a result in {out_dtype}"
    if why is not None:
        raise ProviderError(
            f"scaled_mm has no kernel for this GEMM ({why}); use triton"
        )
    if m == 0 or n == 0 or k == 0:
        return torch.zeros((m, n), dtype=out_dtype, device=a.device)
    functional = torch.nn.functional
    # cuBLASLt refuses rows that are no multiple of 16; and for fewer than 128 rows and
    # a contraction of 6144 or more it adds in another order (1e-4 of the elements
    # differ in the last bit; H200, 2026-11-30). So rows of zeros are added.
    if m % MULTIPLE or m < MIN_ROWS:
        a, a_scales = _taller(a, a_scales, max(align(m, MULTIPLE), MIN_ROWS))
    out: Tensor = functional.scaled_mm(
        a.contiguous(),
        b.contiguous().t(),
        _scales_of_a(a_scales),
        functional.ScalingType.BlockWise1x128,
        _scales_of_b(b_scales),
        functional.ScalingType.BlockWise128x128,
        output_dtype=out_dtype,
    )
    return out[:m]


def _taller(codes: Tensor, scales: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Copy a matrix of codes, and its scales, into one with more rows."""
    m, k = codes.shape
    tall = torch.zeros((rows, k), dtype=torch.uint8, device=codes.device)
    tall[:m] = codes.view(torch.uint8)
    groups = scales.shape[1]
    turned = torch.empty_strided(
        (rows, groups), (1, rows), dtype=scales.dtype, device=scales.device
    )
    turned[:m] = scales
    turned[m:] = 1.0
    return tall.view(codes.dtype), turned


def _scales_of_a(scales: Tensor) -> Tensor:
    rows, groups = scales.shape
    if scales.stride() == (1, rows):
        return scales
    turned = torch.empty_strided(
        (rows, groups), (1, rows), dtype=scales.dtype, device=scales.device
    )
    return turned.copy_(scales)


def _scales_of_b(scales: Tensor) -> Tensor:
    blocks, groups = scales.shape
    wide = align(groups, 4)
    if wide != groups or scales.stride() != (groups, 1):
        padded = scales.new_zeros((blocks, wide))
        padded[:, :groups] = scales
        scales = padded
    return scales.t()


SCALED_MM = Provider(
    name="scaled_mm",
    gemm=gemm,
    batch_invariant=True,
    numerics=WGMMA_GROUPS,
    usable=_usable,
    rejects=_rejects,
    description="cuBLASLt block scaling on Hopper, fprop and dgrad",
)
