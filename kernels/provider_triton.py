"""The provider `triton`: a portable block-scaled GEMM, any M, N and K.

`triton_gemm.py` has the kernel. It takes the strides as they are, except that columns
of codes must be contiguous. It promotes to FP32 after each group, as the others do;
whether its sums of a group on the tensor cores equal theirs is not promised, so it is a
class of numerics of its own.
"""

import torch
from torch import Tensor

from jetrl_compile.errors import ProviderError
from jetrl_compile.kernels.provider import (
    GemmShape,
    Provider,
    not_on_cuda,
    not_quantized,
    other_regions,
)

MIN_CAPABILITY = (8, 9)  # FP8 on tensor cores
OUT_DTYPES = (torch.bfloat16, torch.float32)


def _usable() -> str | None:
    from jetrl_compile.kernels import triton_common

    missing = triton_common.triton_missing()
    if missing is not None or triton_common.interpreted():
        return missing
    if not torch.cuda.is_available():
        return "no GPU or driver was found"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < MIN_CAPABILITY:
        return f"the GPU has compute capability {major}.{minor}; FP8 needs 8.9"
    return None


def _rejects(shape: GemmShape) -> str | None:
    from jetrl_compile.kernels.triton_common import interpreted

    why = not_quantized(shape) or other_regions(shape, True)
    if why is None and not interpreted():
        why = not_on_cuda(shape)
    if why is None and shape.out_dtype not in ("bf16", "fp32"):
        why = f"it gives bf16 or fp32, not {shape.out_dtype}"
    return why


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
    """Run `reference.gemm` with a Triton kernel.

    Bytes moved: m k + n k codes read (more where L2 does not hold a panel), scales, and
    2 or 4 bytes for each element of the result written.

    Raises:
        ProviderError: Triton is not installed, or the kernel does not take these
            regions or this dtype.
    """
    from jetrl_compile.kernels import triton_common, triton_gemm

    why = triton_common.triton_missing()
    if a_rows != 1 or b_rows not in (1, 128) or a_cols != 128:
        why = f"regions of {a_rows}x{a_cols} by {b_rows}x{b_cols}"
    elif out_dtype not in OUT_DTYPES:
        why = f"a result in {out_dtype}"
    if why is not None:
        raise ProviderError(
            f"triton has no kernel for this GEMM ({why}); use reference"
        )
    (m, k), n = a.shape, b.shape[0]
    if m == 0 or n == 0 or k == 0:
        return torch.zeros((m, n), dtype=out_dtype, device=a.device)
    a, b = _columns_contiguous(a), _columns_contiguous(b)
    return triton_gemm.gemm(a, a_scales, b, b_scales, b_rows, out_dtype)


def _columns_contiguous(codes: Tensor) -> Tensor:
    return codes if codes.stride(1) == 1 else codes.contiguous()


TRITON = Provider(
    name="triton",
    gemm=gemm,
    batch_invariant=True,
    numerics="fp32_groups_triton",
    usable=_usable,
    rejects=_rejects,
    description="a portable Triton kernel, any shape",
)
