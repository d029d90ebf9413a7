"""Quantizers that bring the next weight into the cache: the same results."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl_compile.errors import PrecisionFlowError
from jetrl_compile.kernels import fused_ops, ops
from jetrl_compile.kernels.ahead_ops import AHEAD
from jetrl_compile.kernels.bring_ahead import (
    BYTES,
    LINE,
    MOST_ROWS,
    NOTHING,
    PROGRAM_LINES,
    bringing,
    brought,
)

E4M3 = torch.float8_e4m3fn
QUANTIZER = ("fp32", 1e-10)
Call = tuple[Any, tuple[Any, ...]]


def codes(rows: int, cols: int, device: str = "cpu") -> Tensor:
    return torch.zeros(rows, cols, dtype=E4M3, device=device)


def calls(rows: int, device: str) -> dict[str, Call]:
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=generator)
        return made.to(torch.bfloat16).to(device)

    x, both = random(rows, 576), random(rows, 512)
    group = (1, 128)
    norm = (x, random(rows, 576), random(576), 1e-6, None, *group, -1, 0, *QUANTIZER)
    silu = (both[:, :256], both[:, 256:], *group, -1, 0, *QUANTIZER)
    return {
        "quantize": (ops.quantize, (x, *group, False, *QUANTIZER, None)),
        "norm": (fused_ops.rms_norm_quantize, norm),
        "silu": (fused_ops.silu_mul_quantize, silu),
    }


def equal(first: Any, second: Any) -> bool:
    return all(
        a.shape == b.shape and torch.equal(a.float(), b.float())
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("name", ["quantize", "norm", "silu"])
def test_the_reference_ignores_it(name: str) -> None:
    op, args = calls(3, "cpu")[name]
    assert equal(AHEAD[op](*args, codes(256, 576)), op(*args))


def test_what_is_brought() -> None:
    assert brought(8) == NOTHING
    with bringing(codes(6144, 4096)):
        ahead = brought(8)
        assert (ahead.rows, ahead.stride) == (6144, 4096)
        assert ahead.lines == BYTES // LINE // 6144 == 10
        assert ahead.programs * PROGRAM_LINES >= 6144 * 10
        assert brought(MOST_ROWS + 1) == NOTHING
    with bringing(codes(64, 192)):
        assert brought(8).lines == 1  # the second line of a row would end outside
    with bringing(codes(0, 128)):
        assert brought(8) == NOTHING
    assert brought(8) == NOTHING


def test_nothing_is_left_after_an_error() -> None:
    op, args = calls(3, "cpu")["quantize"]
    with pytest.raises(PrecisionFlowError, match="needs BF16"):
        AHEAD[op](args[0].int(), *args[1:], codes(256, 576))
    assert brought(8) == NOTHING


def test_they_are_traced_like_those_they_stand_for() -> None:
    with torch.device("meta"):
        for op, args in calls(5, "meta").values():
            made, plain = AHEAD[op](*args, codes(8, 576, "meta")), op(*args)
            assert [(t.shape, t.stride(), t.dtype) for t in made] == [
                (t.shape, t.stride(), t.dtype) for t in plain
            ]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 100, 256, 512, 513])
@pytest.mark.parametrize("name", ["quantize", "norm", "silu"])
def test_the_same_bits_on_a_gpu(
    name: str, rows: int, record_property: Callable[[str, object], None]
) -> None:
    op, args = calls(rows, "cuda")[name]
    for weight in (codes(24576, 4096, "cuda"), codes(64, 192, "cuda")):
        for _ in range(2):  # the second time as the first was recorded
            assert equal(AHEAD[op](*args, weight), op(*args))
