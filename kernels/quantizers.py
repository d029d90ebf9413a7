"""Which code quantizes: Triton kernels on a GPU, the reference elsewhere.

Both give the same bits, so this choice is no part of the precision flow. A matrix that
the kernels cannot take (an unusual granularity, say) goes to the reference, and
`fallbacks()` says what and why.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from jetrl_compile.kernels import reference, reference_fused
from jetrl_compile.kernels.launch_plans import planned
from jetrl_compile.kernels.layouts import in_order

_FALLBACKS: dict[tuple[str, str], int] = {}


def fallbacks() -> dict[tuple[str, str], int]:
    """Return how often the reference ran on a GPU, by operator and reason."""
    return dict(_FALLBACKS)


def _on_gpu(operator: str, why: Callable[[], str | None], x: Tensor) -> bool:
    """Whether the Triton kernel runs; where not, on a GPU, the reason is kept."""
    if not x.is_cuda:
        return False
    reason = why()
    if reason is None:
        return True
    _FALLBACKS[operator, reason] = _FALLBACKS.get((operator, reason), 0) + 1
    return False


def quantize(
    x: Tensor,
    rows: int,
    cols: int,
    transpose: bool,
    scale_format: str,
    amax_floor: float,
) -> tuple[Tensor, Tensor]:
    """Run `reference.quantize`, into the memory order of `layouts`."""
    return quantize_parts(
        [x], 0, rows, cols, transpose, scale_format, amax_floor, "quantize"
    )


def quantize_parts(
    parts: Sequence[Tensor],
    dim: int,
    rows: int,
    cols: int,
    transpose: bool,
    scale_format: str,
    amax_floor: float,
    operator: str = "quantize_parts",
) -> tuple[Tensor, Tensor]:
    """Run `reference_fused.quantize_parts`, into the memory order of `layouts`."""
    if parts[0].is_cuda:
        from jetrl_compile.kernels import triton_quantize as kernels

        region = (rows, cols)
        straight, turned = (None, region) if transpose else (region, None)
        why = partial(kernels.rejects, parts, straight, turned, amax_floor)
        if _on_gpu(operator, why, parts[0]):
            return kernels.quantize_parts(
                parts, dim, rows, cols, transpose, scale_format, amax_floor
            )
    made = reference_fused.quantize_parts(
        parts, dim, rows, cols, transpose, scale_format, amax_floor
    )
    return in_order(*made, rows, transpose)


@planned("quantize_into")
def quantize_into(
    parts: Sequence[Tensor],
    rows: int,
    cols: int,
    scale_format: str,
    amax_floor: float,
    codes: Tensor,
    scales: Tensor,
) -> tuple[()]:
    """Quantize matrices below each other into tensors that exist: nothing is copied.

    Args:
        parts: As in `quantize_parts`, along 0.
        rows: As in `quantize_parts`.
        cols: As in `quantize_parts`.
        scale_format: As in `quantize_parts`.
        amax_floor: As in `quantize_parts`.
        codes: (R, C), E4M3, in the memory order of `layouts`.
        scales: FP32, in that order.
    """
    region = (rows, cols)
    if codes.is_cuda:
        from jetrl_compile.kernels import triton_quantize as kernels

        why = partial(kernels.rejects, parts, region, None, amax_floor)
        if _on_gpu("quantize_into", why, parts[0]):
            kernels.quantize_into(
                parts, region, scale_format, amax_floor, (codes, scales)
            )
            return ()
    made = reference_fused.quantize_parts(
        parts, 0, rows, cols, False, scale_format, amax_floor
    )
    codes.copy_(made[0])
    scales.copy_(made[1])
    return ()


def quantize_twice(
    parts: Sequence[Tensor],
    dim: int,
    rows: int,
    cols: int,
    rows_t: int,
    cols_t: int,
    scale_format: str,
    amax_floor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run `reference_fused.quantize_twice`, into the memory order of `layouts`."""
    args = (parts, dim, rows, cols, rows_t, cols_t, scale_format, amax_floor)
    if parts[0].is_cuda:
        from jetrl_compile.kernels import triton_quantize as kernels

        turned = None if rows_t < 0 else (rows_t, cols_t)
        why = partial(kernels.rejects, parts, (rows, cols), turned, amax_floor)
        if _on_gpu("quantize_twice", why, parts[0]):
            return kernels.quantize_twice(*args)
    codes, scales, codes_t, scales_t = reference_fused.quantize_twice(*args)
    return (*in_order(codes, scales, rows), *_turned(codes_t, scales_t, rows_t))


def requantize(
    codes: Tensor,
    scales: Tensor,
    rows_in: int,
    cols_in: int,
    rows: int,
    cols: int,
    transpose: bool,
    scale_format: str,
    amax_floor: float,
) -> tuple[Tensor, Tensor]:
    """Run `reference.requantize`, into the memory order of `layouts`."""
    args = (codes, scales, rows_in, cols_in, rows, cols, transpose)
    if codes.is_cuda:
        from jetrl_compile.kernels import triton_requantize as kernels

        why = partial(kernels.rejects, *args, amax_floor)
        if _on_gpu("requantize", why, codes):
            return kernels.requantize(*args, scale_format, amax_floor)
    made = reference.requantize(*args, scale_format, amax_floor)
    return in_order(*made, rows, transpose)


def rms_norm_quantize(*args: Any) -> tuple[Tensor, ...]:
    """Run `reference_fused.rms_norm_quantize`, into the memory order of `layouts`."""
    if args[0].is_cuda:
        from jetrl_compile.kernels import triton_norm as kernels

        if _on_gpu(
            "rms_norm_quantize",
            lambda: kernels.rms_norm_quantize_rejects(*args),
            args[0],
        ):
            return kernels.rms_norm_quantize(*args)
    rows, rows_t = args[4], args[6]
    codes, scales, codes_t, scales_t, *rest = reference_fused.rms_norm_quantize(*args)
    return (
        *in_order(codes, scales, rows),
        *_turned(codes_t, scales_t, rows_t),
        *rest,
    )


def scale_rows_quantize(*args: Any) -> tuple[Tensor, Tensor]:
    """Run `reference_fused.scale_rows_quantize`, into the memory order of `layouts`."""
    if args[0].is_cuda:
        from jetrl_compile.kernels import triton_norm as kernels

        if _on_gpu(
            "scale_rows_quantize",
            lambda: kernels.scale_rows_quantize_rejects(*args),
            args[0],
        ):
            return kernels.scale_rows_quantize(*args)
    return in_order(*reference_fused.scale_rows_quantize(*args), args[3], args[5])


def silu_mul_quantize(*args: Any) -> tuple[Tensor, ...]:
    """Run `reference_fused.silu_mul_quantize`, into the memory order of `layouts`."""
    if args[0].is_cuda:
        from jetrl_compile.kernels import triton_silu as kernels

        if _on_gpu(
            "silu_mul_quantize",
            lambda: kernels.silu_mul_quantize_rejects(*args),
            args[0],
        ):
            return kernels.silu_mul_quantize(*args)
    codes, scales, codes_t, scales_t = reference_fused.silu_mul_quantize(*args)
    return (*in_order(codes, scales, args[2]), *_turned(codes_t, scales_t, args[4]))


def silu_mul_backward_quantize(*args: Any) -> tuple[Tensor, ...]:
    """Run `reference_fused.silu_mul_backward_quantize`, in the order of `layouts`."""
    if args[0].is_cuda:
        from jetrl_compile.kernels import triton_silu as kernels

        if _on_gpu(
            "silu_mul_backward_quantize",
            lambda: kernels.silu_mul_backward_quantize_rejects(*args),
            args[0],
        ):
            return kernels.silu_mul_backward_quantize(*args)
    made = reference_fused.silu_mul_backward_quantize(*args)
    rows, rows_dy, rows_x = args[5], args[7], args[9]
    return (
        *in_order(made[0], made[1], rows),
        *in_order(made[2], made[3], rows_dy, True),
        *in_order(made[4], made[5], rows_x, True),
    )


def _turned(codes: Tensor, scales: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    return (codes, scales) if rows < 0 else in_order(codes, scales, rows, True)
