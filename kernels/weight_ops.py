"""A GEMM that quantizes its weights itself, and keeps their codes while they last.

    jetrl::gemm_weights   a, scales, weights -> a w^T, or a w

The codes never leave the operator, so a compiler cannot reuse their memory. They are
kept from call to call (micro-batches, old log-probs, reference) while the weights have
the version that they were made from: every in-place write that autograd sees, another
storage, every optimizer step of the process, and `forget_weights()` end that. While a
CUDA graph is captured nothing kept is read, since its replays would not see a new
version.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from jetrl_compile.errors import PrecisionFlowError
from jetrl_compile.kernels import quantizers
from jetrl_compile.kernels.dispatch import get_provider
from jetrl_compile.kernels.launch_plans import planned
from jetrl_compile.kernels.op_definition import (
    check_codes,
    check_out_dtype,
    check_source,
    check_target,
    define,
)

_weak_storage: Any = StorageWeakRef  # untyped in torch 2.13


@dataclass(frozen=True, slots=True)
class _Kept:
    weights: tuple["weakref.ref[Tensor]", ...]
    storages: tuple[Any, ...]  # weak: while one is held, no other gets its address
    state: tuple[Any, ...]
    codes: Tensor
    scales: Tensor


_KEPT: dict[tuple[Any, ...], _Kept] = {}
_COUNTS = {"made": 0, "read": 0}
_epoch = 0
_watching = False


def forget_weights() -> None:
    """Drop all kept codes: after a write that autograd cannot see, as through .data."""
    _KEPT.clear()


def weight_counts() -> dict[str, int]:
    """Return how often codes were made, and how often kept ones were read."""
    return dict(_COUNTS)


def _stepped(*_: Any) -> None:
    global _epoch
    _epoch += 1
    _KEPT.clear()


def _watch_optimizers() -> None:
    # Fused and sharded optimizers write to storage whose version others do not see.
    global _watching
    if not _watching:
        register_optimizer_step_post_hook(_stepped)
        _watching = True


def _state(weights: Sequence[Tensor]) -> tuple[Any, ...]:
    """What changes when weights change."""
    return (
        _epoch,
        *((w._version, w.data_ptr(), w.untyped_storage()._cdata) for w in weights),
    )


def kept_codes(
    weights: Sequence[Tensor],
    transpose: bool,
    rows: int,
    cols: int,
    scale_format: str,
    amax_floor: float,
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of weights below each other, made anew if they changed.

    Args:
        weights: As the parts of `quantize_parts`, along 0.
        transpose: As in `quantize_parts`.
        rows: As in `quantize_parts`.
        cols: As in `quantize_parts`.
        scale_format: As in `quantize_parts`.
        amax_floor: As in `quantize_parts`.
    """
    args = (rows, cols, transpose, scale_format, amax_floor)
    capturing = weights[0].is_cuda and torch.cuda.is_current_stream_capturing()
    inference = any(w.is_inference() for w in weights)
    if capturing or inference:  # inference tensors have no version
        _COUNTS["made"] += 1
        return quantizers.quantize_parts(weights, 0, *args)
    _watch_optimizers()
    key = (*map(id, weights), *args)
    state = _state(weights)
    kept = _KEPT.get(key)
    if (
        kept is not None
        and kept.state == state
        and all(r() is w for r, w in zip(kept.weights, weights, strict=True))
    ):
        _COUNTS["read"] += 1
        return kept.codes, kept.scales
    _COUNTS["made"] += 1
    with torch.no_grad():
        codes, scales = quantizers.quantize_parts(weights, 0, *args)

    def drop(_: Any) -> None:
        _KEPT.pop(key, None)

    refs = tuple(weakref.ref(w, drop) for w in weights)
    storages = tuple(_weak_storage(w.untyped_storage()) for w in weights)
    _KEPT[key] = _Kept(refs, storages, state, codes, scales)
    return codes, scales


def _check(
    a: Tensor,
    a_scales: Tensor,
    weights: Sequence[Tensor],
    transpose: bool,
    a_rows: int,
    a_cols: int,
    b_rows: int,
    b_cols: int,
    scale_format: str,
    amax_floor: float,
    out_dtype: torch.dtype,
) -> Any:
    """Check the arguments; return the number of columns of the result."""
    check_codes("gemm_weights", "a", a, a_scales, a_rows, a_cols)
    check_target(b_rows, b_cols, scale_format, amax_floor)
    check_out_dtype("gemm_weights", out_dtype)
    for w in weights:
        check_source(w)
    below: Any = sum(w.shape[0] for w in weights)
    beside = weights[0].shape[1]
    cols, contraction = (beside, below) if transpose else (below, beside)
    if any(w.shape[1] != beside for w in weights) or a.shape[1] != contraction:
        shapes = ", ".join(str(tuple(w.shape)) for w in weights)
        raise PrecisionFlowError(
            f"gemm_weights got a {tuple(a.shape)} and weights {shapes}, transposed: "
            f"{transpose}; the contraction needs one size: {contraction}"
        )
    return cols


@planned("gemm_weights")
def _gemm(provider: str, *args: Any) -> Tensor:
    out: Tensor = get_provider(provider).gemm(*args)
    return out


def _gemm_weights(
    a: Tensor,
    a_scales: Tensor,
    weights: Sequence[Tensor],
    transpose: bool,
    a_rows: int,
    a_cols: int,
    b_rows: int,
    b_cols: int,
    scale_format: str,
    amax_floor: float,
    out_dtype: torch.dtype,
    provider: str,
) -> Tensor:
    numbers = (a_rows, a_cols, b_rows, b_cols)
    _check(
        a, a_scales, weights, transpose, *numbers, scale_format, amax_floor, out_dtype
    )
    b, b_scales = kept_codes(
        weights, transpose, b_rows, b_cols, scale_format, amax_floor
    )
    out: Tensor = _gemm(provider, a, a_scales, b, b_scales, *numbers, out_dtype)
    return out


def _fake_gemm_weights(
    a: Tensor,
    a_scales: Tensor,
    weights: Sequence[Tensor],
    transpose: bool,
    a_rows: int,
    a_cols: int,
    b_rows: int,
    b_cols: int,
    scale_format: str,
    amax_floor: float,
    out_dtype: torch.dtype,
    provider: str,
) -> Tensor:
    numbers = (a_rows, a_cols, b_rows, b_cols)
    cols = _check(
        a, a_scales, weights, transpose, *numbers, scale_format, amax_floor, out_dtype
    )
    get_provider(provider)
    return torch.empty((a.shape[0], cols), dtype=out_dtype, device=a.device)


gemm_weights = define(
    "gemm_weights(Tensor a, Tensor a_scales, Tensor[] weights, bool transpose, "
    "int a_rows, int a_cols, int b_rows, int b_cols, str scale_format, "
    "float amax_floor, ScalarType out_dtype, str provider) -> Tensor",
    _gemm_weights,
    _fake_gemm_weights,
    repeats=False,  # it keeps codes
)
