"""The provider `deep_gemm`: DeepGEMM's FP8 kernels for Hopper.

Two kernels, by the regions of `b` (`a` always has 1x128 groups), and for "1d2d" of up
to 16 rows one of this package with the same bits, which is faster (`gluon_decode.py`):

- "1d2d", `b` in 128x128 blocks, BF16 out: fprop and dgrad, and wgrad of `jetrl`.
- "1d1d", `b` in 1x128 groups, FP32 out: wgrad of `jetrl_paper`. It adds to what the
  result holds, so the result is zeroed first (4 bytes an element written; 0.05 ms for
  4096x12288), and `c` is the result itself, which saves DeepGEMM's own copy. Each
  element is added to once, so bits do not depend on an order. BF16 is one more rounding
  pass (6 bytes an element). Where FP32 of a "1d2d" GEMM is wanted, the block scales are
  repeated for each row (4 bytes for 128 codes) and "1d1d" runs, whose sums are the same
  before the last rounding.

What DeepGEMM's source (csrc/apis/gemm.hpp, csrc/jit_kernels/impls/sm90_fp8_gemm_*.hpp,
impls/sm90_fp8_gemm_*.cuh of version 2.5) needs, and who sees to it:

- Rows of codes at multiples of 16 bytes; "1d1d" takes the row stride to be the number
  of columns, so these must be a multiple of 16: zero columns are appended by a copy.
- The copy engine fills what lies outside a matrix with zeros, so no size needs to be a
  multiple of 128; a last partial group has its own scale, and of block scales only rows
  below ceil(rows of b / 128) are read.
- Scales of groups column-major, columns at multiples of 4; block scales row-major
  without padding (also accepted column-major, which would compile another kernel).
- "1d2d" traps on the device, which ends the process, unless rows of `b` are a multiple
  of 8; "1d1d" cannot be compiled for up to 32 rows of `a`. Both are refused here.

A kernel is compiled at its first use, in 5 to 14 seconds: see `warm_up.py`. Which one
runs depends on the sizes (tiles, stages) and on the compiled dimensions: the rows of
`b` and, since that is faster, the contraction, unless it is over tokens (wgrad), whose
number changes from batch to batch. The operator is not told its role; a transposed `a`,
which only wgrad has, is known by its row stride (`layouts.py`). Bits are the same
either way.
"""

import importlib.util
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetrl_compile.errors import ProviderError
from jetrl_compile.kernels.deep_gemm_cache import token_counts
from jetrl_compile.kernels.launch_recorder import call_library
from jetrl_compile.kernels.layouts import (
    CODE_ALIGNMENT,
    align,
    code_strides,
    empty_quantized,
    in_order,
    scales_in_order,
)
from jetrl_compile.kernels.provider import (
    WGMMA_GROUPS,
    GemmShape,
    Provider,
    no_hopper,
    not_on_cuda,
    not_quantized,
    other_regions,
)
from jetrl_compile.kernels.triton_device import overlaps

MIN_ROWS_1D1D = 33
ROWS_OF_B_1D2D = 8
COLUMNS_1D1D = 16
DECODE_ROWS = 16  # at most, for the kernel of `gluon_decode`
GLUON_OF = "3.6."  # Triton; the kernel ran with no other


@cache
def library() -> Any:
    """Import DeepGEMM, at first use: it needs CUDA, and reads its environment then.

    Its kernels wait by themselves for the kernel before them: see `triton_device.py`.
    """
    import deep_gemm  # type: ignore[import-not-found, unused-ignore]

    if hasattr(deep_gemm, "set_pdl"):  # version 2.5
        deep_gemm.set_pdl(overlaps(torch.device("cuda", torch.cuda.current_device())))
    return deep_gemm


def nvcc() -> str | None:
    """Return the nvcc that DeepGEMM will run, or None; it asks for it as it does."""
    named = os.environ.get("DG_JIT_NVCC_COMPILER")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = shutil.which("nvcc")
    if named:
        path = Path(named)
    elif home:
        path = Path(home) / "bin" / "nvcc"
    elif found:
        path = Path(found)
    else:
        path = Path("/usr/local/cuda/bin/nvcc")
    return str(path) if path.is_file() else None


def _usable() -> str | None:
    if importlib.util.find_spec("deep_gemm") is None:
        return "the package deep_gemm is not installed"
    why = no_hopper()
    if why is not None:
        return why
    # DeepGEMM asks nvcc for its version even where every kernel is in its cache.
    if nvcc() is None and os.environ.get("DG_JIT_USE_NVRTC", "0") in ("", "0"):
        return "nvcc was not found, with which it compiles kernels: set CUDA_HOME"
    return None


def _rejects(shape: GemmShape) -> str | None:
    why = not_quantized(shape) or not_on_cuda(shape) or other_regions(shape, True)
    if why is not None:
        return why
    if shape.out_dtype not in ("bf16", "fp32"):
        return f"it gives bf16 or fp32, not {shape.out_dtype}"
    assert shape.b.granularity is not None
    a_rows, b_rows, _ = shape.sizes
    by_rows = shape.b.granularity.rows == 1 or shape.out_dtype == "fp32"
    if not by_rows:
        return None if b_rows is None or b_rows < 0 else _wrong_1d2d(b_rows)
    if a_rows is None:
        return "the number of its rows is not known, and fp32 needs more than 32"
    return None if a_rows < 0 else _wrong_1d1d(a_rows)


def _wrong_1d2d(b_rows: int) -> str | None:
    if b_rows % ROWS_OF_B_1D2D == 0:
        return None
    return f"{b_rows} rows of b are no multiple of {ROWS_OF_B_1D2D}"


def _wrong_1d1d(a_rows: int) -> str | None:
    if a_rows >= MIN_ROWS_1D1D:
        return None
    return f"{a_rows} rows of a are fewer than {MIN_ROWS_1D1D}, for groups by groups"


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
    """Run `reference.gemm` with DeepGEMM, in its memory order or after a copy into it.

    Bytes moved: m k + n k codes read (more where L2 does not hold a panel), scales, and
    2 m n written in BF16.

    Raises:
        ProviderError: DeepGEMM has no kernel for these regions, sizes or dtype.
    """
    if a_rows != 1 or b_rows not in (1, 128) or a_cols != 128:
        raise _no_kernel(f"regions of {a_rows}x{a_cols} by {b_rows}x{b_cols}")
    (m, k), n = a.shape, b.shape[0]
    if m == 0 or n == 0 or k == 0:
        return torch.zeros((m, n), dtype=out_dtype, device=a.device)
    dims = compiled_dims(a)
    a, a_scales = map(_aligned, _readable(a, a_scales, 1))
    b, b_scales = map(_aligned, _readable(b, b_scales, b_rows))
    if b_rows == 128 and out_dtype is torch.bfloat16:
        why = _wrong_1d2d(n)
        if why is not None:
            raise _no_kernel(why)
        if decodes(m, n, k) and max(m * a.stride(0), n * b.stride(0)) < 2**31:
            from jetrl_compile.kernels import gluon_decode

            return gluon_decode.gemm(a, a_scales, b, b_scales)
        out = torch.empty((m, n), dtype=out_dtype, device=a.device)
        tensors = (a, a_scales, b, b_scales, out, None)
        call_library(_fp8_gemm_nt, tensors, (1, 128, 128), dims)
        return out
    why = _wrong_1d1d(m)
    if out_dtype not in (torch.float32, torch.bfloat16):
        why = f"a result in {out_dtype}"
    if why is not None:
        raise _no_kernel(why)
    if b_rows == 128:
        b_scales = _of_rows(b_scales, n)
    a, b = _with_zero_columns(a), _with_zero_columns(b)
    padded = torch.zeros((m, align(n, 4)), dtype=torch.float32, device=a.device)
    out = padded[:, :n]
    call_library(_fp8_gemm_nt, (a, a_scales, b, b_scales, out, out), (1, 1, 128), dims)
    return out.to(out_dtype, memory_format=torch.contiguous_format).contiguous()


def decodes(m: int, n: int, k: int) -> bool:
    """Whether a "1d2d" GEMM of these sizes runs in `gluon_decode`, not in DeepGEMM."""
    few = 0 < m <= DECODE_ROWS and n > 0 and 0 < k <= 2**15 and k % 256 == 0
    return few and _has_gluon()


@cache
def _has_gluon() -> bool:
    """Whether Triton's Gluon is that in which `gluon_decode.py` is written."""
    if importlib.util.find_spec("triton") is None:
        return False
    version: str = importlib.import_module("triton").__version__
    return version.startswith(GLUON_OF)


def compiled_dims(a: Tensor) -> str:
    """Return which sizes are constants of the kernel: "nk", or "n" without k."""
    k = a.shape[1]
    over_tokens = a.stride(0) == code_strides(a.shape[0], k, True)[0]
    return "n" if over_tokens and k not in token_counts() else "nk"


def _readable(codes: Tensor, scales: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales as DeepGEMM reads them, copied only where they are not.

    Rows of codes may begin at any multiple of 16 bytes.
    """
    row, col = codes.stride()
    if col == 1 and row % CODE_ALIGNMENT == 0 and row >= codes.shape[1]:
        return codes, scales_in_order(scales, rows)
    return in_order(codes, scales, rows)


def _fp8_gemm_nt(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    out: Tensor,
    c: Tensor | None,
    recipe: tuple[int, int, int],
    dims: str,
) -> None:
    library().fp8_gemm_nt(
        (a, a_scales),
        (b, b_scales),
        out,
        c=c,
        recipe=recipe,
        compiled_dims=dims,
        disable_ue8m0_cast=True,
    )


def _aligned(matrix: Tensor) -> Tensor:
    """Return a matrix that begins at a multiple of 16 bytes; a slice may not."""
    if matrix.data_ptr() % 16 == 0:
        return matrix
    moved = torch.empty_strided(
        matrix.shape, matrix.stride(), dtype=matrix.dtype, device=matrix.device
    )
    return moved.copy_(matrix)


def _of_rows(scales: Tensor, rows: int) -> Tensor:
    """Give each row the scales of its block, in the order of scales of groups."""
    groups = scales.shape[1]
    spread = torch.empty_strided(
        (rows, groups), (1, align(rows, 4)), dtype=scales.dtype, device=scales.device
    )
    return spread.copy_(scales.repeat_interleave(128, 0)[:rows])


def _with_zero_columns(codes: Tensor) -> Tensor:
    """Return codes whose row stride is their number of columns, a multiple of 16."""
    rows, cols = codes.shape
    wide = align(cols, COLUMNS_1D1D)
    if wide == cols and codes.stride(0) == cols:
        return codes
    padded, _ = empty_quantized((rows, wide), 1, 128, codes.device)
    padded[:, :cols] = codes
    padded.view(torch.uint8)[:, cols:] = 0
    return padded


def _no_kernel(what: str) -> ProviderError:
    return ProviderError(f"deep_gemm has no kernel for this GEMM ({what}); use triton")


DEEP_GEMM = Provider(
    name="deep_gemm",
    gemm=gemm,
    batch_invariant=True,
    numerics=WGMMA_GROUPS,
    usable=_usable,
    rejects=_rejects,
    description="DeepGEMM on Hopper; compiles kernels at first use (jetrl warm-up)",
)
