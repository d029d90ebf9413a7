"""The fused Triton kernels against their reference: interpreted, and on the GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_checks import (
    BLOCK,
    DEVICE,
    EPS,
    FLOOR,
    GROUP,
    NONE,
    check_backward,
    check_norm,
    check_silu,
    empty,
    halves,
    normal,
    same,
)
from torch import Tensor

from jetrl_compile.kernels import (
    reference,
    triton_common,
    triton_norm,
    triton_silu,
)

ON_GPU = torch.cuda.is_available()
WHY_NOT = triton_common.triton_missing()
if WHY_NOT is None and not ON_GPU and not triton_common.interpreted():
    WHY_NOT = "no GPU, and triton was imported before TRITON_INTERPRET=1 was set"
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    # NumPy, in the interpreter, warns of infinities and NaN.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

SHAPES = [(0, 128), (1, 128), (5, 576), (130, 64)]
ROWS = [0, 1, 2, 3, 7, 8, 16, 100, 128, 129, 1000]
COLS = [576, 1536, 3584, 4096, 4608, 12288, 18944]


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
@pytest.mark.parametrize("turned", [GROUP, BLOCK, NONE])
def test_norm(rows: int, cols: int, turned: tuple[int, int]) -> None:
    x = normal(rows, cols)
    check_norm(x, None, turned)
    check_norm(x, normal(rows, cols, seed=2), turned, "ue8m0")


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
@pytest.mark.parametrize("turned", [GROUP, BLOCK, NONE])
def test_silu(rows: int, cols: int, turned: tuple[int, int]) -> None:
    check_silu(*halves(rows, cols), turned)


def test_silu_in_blocks_and_powers_of_two() -> None:
    check_silu(*halves(130, 192), GROUP, BLOCK, "ue8m0")


@pytest.mark.parametrize(("rows", "cols"), [(0, 128), (1, 128), (130, 256)])
@pytest.mark.parametrize("regions", [(GROUP, GROUP, BLOCK), (BLOCK, BLOCK, GROUP)])
def test_backward(rows: int, cols: int, regions: tuple[tuple[int, int], ...]) -> None:
    dy = normal(rows, cols, seed=2)
    check_backward(dy, *halves(rows, cols), regions=regions)


def kept_codes(rows: int, cols: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of gate and up, column slices of those of a fused GEMM."""
    both = normal(rows, 2 * cols, seed=1, std=3.0)
    codes, scales = reference.quantize(both, *GROUP, False, "fp32", FLOOR)
    scales = scales.t().contiguous().t()
    groups = cols // 128
    return codes[:, :cols], codes[:, cols:], scales[:, :groups], scales[:, groups:]


def test_backward_from_kept_codes() -> None:
    gate, up, *scales = kept_codes(130, 256)
    dy = normal(130, 256, seed=2)
    check_backward(dy, gate, up, (scales[0], scales[1]), scale_format="ue8m0")
    row_major = (scales[0].contiguous(), scales[1].contiguous())
    check_backward(dy, gate, up, row_major)


def test_backward_from_kept_codes_that_are_nan() -> None:
    both = normal(130, 256, seed=1, std=3.0)
    both[1, 5], both[2, 200], both[129, 0] = float("nan"), float("inf"), float("-inf")
    codes, scales = reference.quantize(both, *GROUP, False, "fp32", FLOOR)
    assert codes.float().isnan().any()
    halves_of = (codes[:, :128], codes[:, 128:])
    dy = normal(130, 128, seed=2)
    check_backward(dy, *halves_of, (scales[:, :1], scales[:, 1:]))


def test_three_dimensions() -> None:
    x, residual = normal(2, 3, 256), normal(2, 3, 256, seed=2)
    check_norm(x, residual)
    both = normal(2, 3, 512, seed=1)
    check_silu(both[..., :256], both[..., 256:])
    check_backward(x, both[..., :256], both[..., 256:])


def test_rows_that_lie_apart() -> None:
    wide = normal(5, 520)
    check_norm(wide[:, :256], wide[:, 256:512])
    check_norm(wide[:, 3:259], wide[:, 200:456])
    check_norm(normal(256, 5).t(), None)
    check_silu(wide[:, 3:259], wide[:, 200:456])
    check_backward(wide[:, 4:260], wide[:, 261:517], wide[:, 200:456])
    odd = normal(5, 513)
    check_silu(odd[:, :256], odd[:, 256:512])


def test_weights_that_do_not_lie_together() -> None:
    x = normal(5, 256)
    check_norm(x, None, weight=normal(256, 2)[:, 0])
    check_norm(x, x, weight=normal(1).expand(256))
    check_norm(x, None, NONE, weight=normal(257)[1:])


def test_factors_that_do_not_lie_together() -> None:
    x, weight = normal(130, 256), normal(256, seed=3)
    for rstd in (torch.rand(130, 2)[:, :1] + 0.5, torch.rand(1, 1).expand(130, 1)):
        args = (weight, *BLOCK, True, "fp32", FLOOR)
        made = triton_norm.scale_rows_quantize(x, rstd, *args)
        wanted = triton_norm.scale_rows_quantize(x, rstd.clone().contiguous(), *args)
        assert all(map(same, made, wanted))


def test_runs_are_alike_whether_or_not_the_matrix_is_kept() -> None:
    x, residual = normal(130, 128), normal(130, 128, seed=2)
    norm = (x, residual, x[0], EPS, *GROUP, *BLOCK, "fp32", FLOOR)
    silu = (*halves(130, 128), *GROUP, *GROUP, "fp32", FLOOR)
    regions = (*GROUP, *GROUP, *BLOCK)
    back = (x, *halves(130, 128), None, None, *regions, "fp32", FLOOR)
    runs: tuple[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Tensor]], ...] = (
        (triton_norm.rms_norm_quantize, norm, {"kept": empty(130, 128)}),
        (triton_silu.silu_mul_quantize, silu, {"kept": empty(130, 128)}),
        (triton_silu.silu_mul_backward_quantize, back, {"kept": empty(130, 256)}),
    )
    for run, args, kept in runs:
        made = run(*args)
        assert all(map(same, made, run(*args)))
        assert all(map(same, made, run(*args, **kept)))


def test_nan_and_infinity() -> None:
    x = normal(130, 256)
    x[1, 5], x[2, 200], x[129, 0] = float("nan"), float("inf"), float("-inf")
    x[3] = 0
    for turned in (GROUP, BLOCK):
        check_norm(x, None, turned)
        check_norm(x, normal(130, 256, seed=2), turned)
    gate, up = halves(130, 256)
    check_silu(x, up)
    check_silu(gate, x, GROUP)
    # Not in all three: which NaN an operation returns is the hardware's choice.
    check_backward(x, gate, up)
    check_backward(normal(130, 256, seed=2), gate, x)


def test_extreme_gates() -> None:
    gate, up = halves(4, 128)
    gate[0], gate[1], gate[2] = -80.0, 80.0, 3e38
    gate[3, ::2] = -3e38
    check_silu(gate, up)
    check_backward(normal(4, 128, seed=2), gate, up)


def test_row_sums_split() -> None:
    assert [triton_norm.split_groups(n) for n in (1, 5, 28, 32, 36, 40, 148)] == [
        (1, 0),
        (4, 1),
        (32, 0),
        (32, 0),
        (32, 4),
        (32, 8),
        (128, 32),
    ]


def test_rejected_with_the_reason() -> None:
    x = normal(4, 256)
    weight = x[0]

    def norm(x: Tensor, rows: int = 1, cols: int = 128) -> str:
        why = triton_norm.rms_norm_quantize_rejects(
            x, None, weight, EPS, rows, cols, -1, 0, "fp32", FLOOR
        )
        return str(why)

    assert "not BF16" in norm(x.float())
    assert "1x128" in norm(x, 128)
    assert "columns" in norm(normal(1, triton_norm.MAX_COLS + 1))

    def silu(rows_t: int, floor: float = FLOOR) -> str:
        why = triton_silu.silu_mul_quantize_rejects(
            x, x, *GROUP, rows_t, 128, "fp32", floor
        )
        return str(why)

    assert "2x128" in silu(2)
    assert "odd" in str(
        triton_norm.scale_rows_quantize_rejects(
            x[:, :255], x[:, :1].float(), x[0, :255], *BLOCK, True, "fp32", FLOOR
        )
    )
    assert "floor" in silu(1, 1e-30)

    def backward(dy: Tensor, scales: Tensor | None) -> str:
        why = triton_silu.silu_mul_backward_quantize_rejects(
            dy, dy, dy, scales, None, *GROUP, *GROUP, *GROUP, "fp32", FLOOR
        )
        return str(why)

    assert "multiple of 128" in backward(x[:, :200], None)
    assert "e4m3" in backward(x, x)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", COLS)
def test_any_rows_on_the_gpu(cols: int) -> None:
    x, residual = normal(1000, cols), normal(1000, cols, seed=2)
    gate, up = halves(1000, cols)
    weight = normal(cols, seed=3)
    norm = (weight, EPS, *GROUP, -1, 0, "fp32", FLOOR)
    silu = (*GROUP, -1, 0, "fp32", FLOOR)
    whole = triton_norm.rms_norm_quantize(x, residual, *norm)
    whole_silu = triton_silu.silu_mul_quantize(gate, up, *silu)
    for rows in ROWS:
        part = triton_norm.rms_norm_quantize(x[-rows:], residual[-rows:], *norm)
        for i in (0, 1, 4, 5):
            assert rows == 0 or same(part[i], whole[i][-rows:])
        part_silu = triton_silu.silu_mul_quantize(gate[-rows:], up[-rows:], *silu)
        for i in (0, 1):
            assert rows == 0 or same(part_silu[i], whole_silu[i][-rows:])
        for turned in (GROUP, BLOCK):
            check_norm(x[:rows], residual[:rows], turned)
            check_silu(gate[:rows], up[:rows], turned)
            if cols % 128 == 0:
                regions = (GROUP, turned, BLOCK)
                check_backward(x[:rows], gate[:rows], up[:rows], regions=regions)
    check_norm(x, None)


@pytest.mark.gpu
@pytest.mark.parametrize("std", [1e-6, 1e-2, 1e4])
def test_magnitudes_on_the_gpu(std: float) -> None:
    x, residual = normal(256, 4096, std=std), normal(256, 4096, seed=2, std=std)
    check_norm(x, residual)
    gate, up = halves(256, 4096)
    for scale_format in ("fp32", "ue8m0"):
        check_silu(gate, x, scale_format=scale_format)
        check_backward(x, gate, up, scale_format=scale_format)
    codes = kept_codes(256, 4096)
    check_backward(x, codes[0], codes[1], (codes[2], codes[3]))


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    rows, cols = 57344, 18944
    both = torch.empty(rows, 2 * cols, dtype=torch.bfloat16, device=DEVICE)
    both[:-128] = 1.0
    both[-128:] = normal(128, 2 * cols)
    gate, up = both[:, :cols], both[:, cols:]
    args = (*GROUP, *GROUP, *BLOCK, "fp32", FLOOR)
    dy = both.view(2 * rows, cols)[rows:]
    made = triton_silu.silu_mul_backward_quantize(dy, gate, up, None, None, *args)
    last = triton_silu.silu_mul_backward_quantize(
        dy[-128:], gate[-128:], up[-128:], None, None, *args
    )
    assert same(made[0][-128:], last[0])
    assert same(made[1][-128:], last[1])
    assert same(made[2][:, -128:], last[2])
    assert same(made[3][:, -1:], last[3])
    assert same(made[4][:, -128:], last[4])
    assert same(made[5][:, -1:], last[5])
