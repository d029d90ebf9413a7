"""On a GPU: a repeated call gives the bits of a call that decides anew."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl_compile.kernels import fused_ops, ops
from jetrl_compile.kernels.dispatch import get_provider
from jetrl_compile.kernels.launch_plans import forget_plans, plan_counts

pytestmark = pytest.mark.gpu
GROUP, BLOCK, FLOOR = (1, 128), (128, 128), ("fp32", 1e-10)
R, C = 272, 576
Args = tuple[Any, ...]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


def gate_up() -> tuple[Tensor, Tensor]:
    both = normal(R, 2 * 256)
    return both[:, :256], both[:, 256:]


def codes_of(rows: int, region: tuple[int, int], transpose: bool = False) -> Args:
    made: Args = ops.quantize(normal(rows, C), *region, transpose, *FLOOR, None)
    return made


def rstd() -> Tensor:
    return torch.rand(R, 1, device="cuda") + 0.5


CALLS: dict[str, tuple[Any, Callable[[], Args]]] = {
    "rows": (ops.quantize, lambda: (normal(R, C), *GROUP, False, *FLOOR, None)),
    "turned": (ops.quantize, lambda: (normal(R, C), *BLOCK, True, *FLOOR, None)),
    "parts": (
        fused_ops.quantize_parts,
        lambda: ([normal(256, C), normal(R, C)], 0, *BLOCK, False, *FLOOR, None),
    ),
    "many parts": (
        fused_ops.quantize_parts,
        lambda: ([normal(R, 128) for _ in range(5)], 1, *GROUP, False, *FLOOR, None),
    ),
    "twice": (
        fused_ops.quantize_twice,
        lambda: ([normal(R, 128), normal(R, C)], 1, *GROUP, *BLOCK, *FLOOR),
    ),
    "requantize": (
        ops.requantize,
        lambda: (*codes_of(R, GROUP), *GROUP, *GROUP, True, *FLOOR, None),
    ),
    "norm": (
        fused_ops.rms_norm_quantize,
        lambda: (
            *(normal(R, C), normal(R, C), normal(C), 1e-6, None),
            *(*GROUP, *BLOCK, *FLOOR),
        ),
    ),
    "norm alone": (
        fused_ops.rms_norm_quantize,
        lambda: (normal(R, C), None, normal(C), 1e-6, None, *GROUP, -1, 0, *FLOOR),
    ),
    "remade": (
        fused_ops.scale_rows_quantize,
        lambda: (normal(R, C), rstd(), normal(C), *BLOCK, True, *FLOOR, None),
    ),
    "silu": (
        fused_ops.silu_mul_quantize,
        lambda: (*gate_up(), *GROUP, *BLOCK, *FLOOR),
    ),
    "silu backward": (
        fused_ops.silu_mul_backward_quantize,
        lambda: (
            *(normal(R, 256), *gate_up(), None, None),
            *(*GROUP, *GROUP, *BLOCK, *FLOOR),
        ),
    ),
}
GEMMS = [  # deep_gemm zeroes an FP32 result first, which is not recorded
    ("deep_gemm", torch.bfloat16),
    ("triton", torch.bfloat16),
    ("triton", torch.float32),
]


def same(a: Tensor, b: Tensor) -> bool:
    assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    as_bytes = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*as_bytes)


def check_repeats(op: Any, arguments: Callable[[], Args]) -> None:
    forget_plans()
    op(*arguments())
    args, before = arguments(), plan_counts()
    repeated = op(*args)
    assert plan_counts()["repeated"] > before["repeated"]
    assert plan_counts()["recorded"] == before["recorded"]
    forget_plans()
    fresh = op(*args)
    for a, b in zip(
        *([m] if isinstance(m, Tensor) else m for m in (repeated, fresh)), strict=True
    ):
        assert same(a, b)


@pytest.mark.parametrize("name", CALLS)
def test_operators(name: str) -> None:
    check_repeats(*CALLS[name])


@pytest.mark.parametrize("over_tokens", [False, True])
@pytest.mark.parametrize(("provider", "out_dtype"), GEMMS)
def test_gemms(provider: str, over_tokens: bool, out_dtype: torch.dtype) -> None:
    why = get_provider(provider).usable()
    if why is not None:
        pytest.skip(why)

    def arguments() -> Args:
        a = codes_of(R, GROUP, over_tokens)
        b = codes_of(R, BLOCK, over_tokens)
        return (*a, *b, *GROUP, *BLOCK, out_dtype, provider)

    check_repeats(ops.gemm, arguments)
