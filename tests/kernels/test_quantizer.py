"""Laws of the quantizer, over random matrices and constructed ones."""

import functools
import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from jetrl_compile.granularity import Granularity
from jetrl_compile.kernels import ops, reference
from jetrl_compile.kernels.layouts import code_strides, scale_strides

FLOOR = 1e-10
REGIONS = [(1, 128), (128, 128), (1, 0), (0, 0), (2, 32)]
laws = settings(derandomize=True, deadline=None, max_examples=25, print_blob=True)
seeds = st.integers(0, 2**31)
sizes = st.integers(1, 300)
regions = st.sampled_from(REGIONS)
formats = st.sampled_from(["fp32", "ue8m0"])


def normal(seed: int, rows: int, cols: int, std: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, cols, generator=generator).mul_(std).bfloat16()


def quantize(
    x: Tensor,
    rows: int = 1,
    cols: int = 128,
    transpose: bool = False,
    scale_format: str = "fp32",
    floor: float = FLOOR,
) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = ops.quantize(
        x, rows, cols, transpose, scale_format, floor, None
    )
    return result


def bits(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


def spread(scales: Tensor, shape: torch.Size, rows: int, cols: int) -> Tensor:
    """Give each element the scale of its region."""
    rows, cols = rows or shape[0], cols or shape[1]
    wide = scales.repeat_interleave(rows, 0).repeat_interleave(cols, 1)
    return wide[: shape[0], : shape[1]].double()


@functools.cache
def finite_codes() -> Tensor:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    finite = sorted(set(values[values.isfinite()].tolist()))
    return torch.tensor(finite, dtype=torch.float64)


def nearest(quotients: Tensor) -> Tensor:
    """Round to the nearest E4M3 value by comparing with all, ties to even."""
    table = finite_codes()
    gap = (quotients.double()[..., None] - table).abs()
    close = gap == gap.amin(-1, keepdim=True)
    # Neighbours alternate between even and odd codes; prefer the even one of two.
    even = bits(table.float().to(torch.float8_e4m3fn)) % 2 == 0
    return table[(close.int() * 2 + (close & even).int()).argmax(-1)]


@laws
@given(seeds, sizes, sizes, regions, formats)
def test_error_is_at_most_half_a_step(
    seed: int, m: int, k: int, region: tuple[int, int], scale_format: str
) -> None:
    x = normal(seed, m, k)
    codes, scales = quantize(x, *region, scale_format=scale_format)
    scale = spread(scales, x.shape, *region)
    # E4M3 keeps 4 bits down to 2^-6 and steps of 2^-9 below, so half a step is at
    # most 2^-4 |q| and at least 2^-10; the FP32 division adds 2^-24 |q| before it.
    q = x.double() / scale
    bound = torch.maximum(q.abs() * 2**-4, torch.tensor(2.0**-10)) * (1 + 2**-18)
    assert ((codes.double() - q).abs() <= bound).all()


@laws
@given(seeds, st.integers(1, 9), st.integers(1, 300), formats)
def test_code_is_the_nearest_one(seed: int, m: int, k: int, scale_format: str) -> None:
    x = normal(seed, m, k)
    codes, scales = quantize(x, scale_format=scale_format)
    scale = spread(scales, x.shape, 1, 128)
    quotient = (x.double() / scale).float()  # rounded twice, as if once: 53 > 2*24+2
    assert torch.equal(codes.double(), nearest(quotient))


def test_ties_go_to_even() -> None:
    table = finite_codes()
    middle = (table[1:] + table[:-1]) / 2
    x = torch.cat([torch.tensor([448.0], dtype=torch.float64), middle])[None]
    codes, scales = quantize(x.bfloat16(), 1, 0)
    assert torch.equal(x.bfloat16().double(), x)
    assert scales.item() == 1
    assert (bits(codes) % 2 == 0).all()
    assert torch.equal(codes.double(), nearest(x))


@laws
@given(seeds, sizes, sizes, regions)
def test_largest_element_gets_code_448(
    seed: int, m: int, k: int, region: tuple[int, int]
) -> None:
    x = normal(seed, m, k)
    codes, scales = quantize(x, *region)
    rows, cols = region[0] or m, region[1] or k
    for row, col in itertools.product(*map(range, scales.shape)):
        top, left = row * rows, col * cols
        inside = (slice(top, top + rows), slice(left, left + cols))
        size = x[inside].float().abs()
        assert scales[row, col] == size.max() / 448
        assert (codes[inside].float().abs()[size == size.max()] == 448).all()


@laws
@given(seeds, sizes, sizes, regions, formats, st.integers(-20, 20))
def test_power_of_two_moves_only_the_scale(
    seed: int,
    m: int,
    k: int,
    region: tuple[int, int],
    scale_format: str,
    exponent: int,
) -> None:
    x = normal(seed, m, k)
    x = torch.where(x.abs() < 2**-6, 1, x)  # so that no amax comes near the floor
    codes, scales = quantize(x, *region, scale_format=scale_format)
    moved, moved_scales = quantize(
        x * 2.0**exponent, *region, scale_format=scale_format
    )
    assert torch.equal(bits(moved), bits(codes))
    assert torch.equal(moved_scales, scales * 2.0**exponent)


@laws
@given(seeds, sizes, sizes, regions, formats)
def test_transpose_is_the_quantized_transpose(
    seed: int, m: int, k: int, region: tuple[int, int], scale_format: str
) -> None:
    x = normal(seed, m, k)
    codes, scales = quantize(x, *region, transpose=True, scale_format=scale_format)
    other, other_scales = quantize(
        x.t().contiguous(), *region, scale_format=scale_format
    )
    assert torch.equal(bits(codes), bits(other))
    assert torch.equal(scales, other_scales)
    assert codes.stride() == code_strides(codes.shape[0], codes.shape[1], True)
    assert scales.stride() == scale_strides(
        (scales.shape[0], scales.shape[1]), region[0]
    )


@laws
@given(seeds, sizes, sizes, formats)
def test_blocks_commute_with_transpose(
    seed: int, n: int, k: int, scale_format: str
) -> None:
    w = normal(seed, n, k)
    codes, scales = quantize(w, 128, 128, scale_format=scale_format)
    other, other_scales = quantize(w, 128, 128, True, scale_format)
    assert torch.equal(bits(codes).t(), bits(other))
    assert torch.equal(scales.t(), other_scales)


@laws
@given(seeds, sizes, sizes, st.sampled_from([(1, 128), (128, 128), (2, 32)]))
def test_tail_equals_padding_with_zeros(
    seed: int, m: int, k: int, region: tuple[int, int]
) -> None:
    x = normal(seed, m, k)
    high, wide = Granularity(*region).scale_shape((m, k))
    padded = torch.zeros(high * region[0], wide * region[1], dtype=torch.bfloat16)
    padded[:m, :k] = x
    codes, scales = quantize(x, *region)
    padded_codes, padded_scales = quantize(padded, *region)
    assert torch.equal(bits(codes), bits(padded_codes)[:m, :k])
    assert torch.equal(scales, padded_scales)


@laws
@given(seeds, sizes, sizes, st.integers(1, 3), regions)
def test_strides_do_not_matter(
    seed: int, m: int, k: int, step: int, region: tuple[int, int]
) -> None:
    x = normal(seed, k * step, m).t()[:, ::step]
    for transpose in (False, True):
        codes, scales = quantize(x, *region, transpose)
        other, other_scales = quantize(x.contiguous(), *region, transpose)
        assert torch.equal(bits(codes), bits(other))
        assert torch.equal(scales, other_scales)
        assert codes.stride() == code_strides(codes.shape[0], codes.shape[1], transpose)


@laws
@given(seeds, sizes, sizes, regions)
def test_fp32_is_rounded_to_bf16_first(
    seed: int, m: int, k: int, region: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(m, k, generator=generator)
    codes, scales = quantize(master, *region)
    other, other_scales = quantize(master.bfloat16(), *region)
    assert torch.equal(bits(codes), bits(other))
    assert torch.equal(scales, other_scales)


def test_rounding_to_bf16_first_changes_codes() -> None:
    # Quantizing the FP32 master itself is another quantizer (2.3% of the codes).
    master = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    codes, _ = quantize(master, 128, 128)
    direct, _ = reference._encode(master, 128, 128, "fp32", FLOOR)
    changed = (bits(codes) != bits(direct)).double().mean()
    assert 0.01 < changed < 0.04


def test_division_is_not_a_multiply_by_the_reciprocal() -> None:
    # Every BF16 amax in [1, 2), with every BF16 number of the binade below it.
    amax = torch.arange(0x3F80, 0x4000, dtype=torch.int16).view(torch.bfloat16)
    below = torch.arange(0x3F00, 0x3F80, dtype=torch.int16).view(torch.bfloat16)
    x = torch.cat([amax[:, None], below.expand(128, 128)], 1)
    codes, scales = quantize(x, 1, 0)
    scale = scales.double()
    divided = nearest((x.double() / scale).float())
    multiplied = nearest(x.float() * (1 / scales))
    assert torch.equal(codes.double(), divided)
    assert (divided != multiplied).sum() >= 1


def test_all_zero_block_is_finite() -> None:
    x = normal(0, 256, 256)
    x[128:, :128] = 0
    for scale_format in ("fp32", "ue8m0"):
        codes, scales = quantize(x, 128, 128, scale_format=scale_format)
        assert scales.isfinite().all()
        assert (scales > 0).all()
        assert (codes[128:, :128].float() == 0).all()
        assert codes.float().isfinite().all()
        back = ops.dequantize(codes, scales, 128, 128, torch.float32)
        assert (back[128:, :128] == 0).all()


def test_nan_and_inf_propagate() -> None:
    x = normal(0, 4, 300)
    x[1, 140] = float("nan")
    x[2, 299] = float("-inf")
    for scale_format in ("fp32", "ue8m0"):
        codes, scales = quantize(x, scale_format=scale_format)
        back = ops.dequantize(codes, scales, 1, 128, torch.float32)
        expected = torch.zeros(4, 300, dtype=torch.bool)
        expected[1, 128:256] = True
        expected[2, 256:] = True
        assert torch.equal(back.isnan(), expected)
        assert scales[1].isnan().tolist() == [False, True, False]
        assert scales[2].isinf().tolist() == [False, False, True]


def test_largest_bf16_number_is_finite() -> None:
    x = torch.full((1, 128), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    for scale_format in ("fp32", "ue8m0"):
        codes, scales = quantize(x, scale_format=scale_format)
        assert scales.isfinite().all()
        assert codes.float().isfinite().all()


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize(
    ("std", "region"), [(0.008, (128, 128)), (1e-6, (1, 128)), (1e-6, (128, 128))]
)
def test_small_values_keep_their_relative_error(
    std: float, region: tuple[int, int], scale_format: str
) -> None:
    x = normal(7, 512, 512, std)

    def error(floor: float) -> float:
        codes, scales = quantize(x, *region, scale_format=scale_format, floor=floor)
        back = codes.double() * spread(scales, x.shape, *region)
        return float((back - x.double()).norm() / x.double().norm())

    assert 0.024 < error(FLOOR) < 0.028
    # A floor of 4.5e-2 (a scale of at least 1e-4) pushes 1e-6 below E4M3's 2^-6.
    assert std > 1e-6 or error(4.5e-2) > 2 * error(FLOOR)


@laws
@given(seeds, st.integers(1, 200), st.integers(1, 300), regions)
def test_ue8m0_scale_is_the_next_power_of_two(
    seed: int, m: int, k: int, region: tuple[int, int]
) -> None:
    x = normal(seed, m, k)
    _, fp32_scales = quantize(x, *region)
    _, scales = quantize(x, *region, scale_format="ue8m0")
    mantissa, _ = torch.frexp(scales)
    assert (mantissa == 0.5).all()
    assert ((scales >= fp32_scales) & (scales < 2 * fp32_scales)).all()


def test_power_of_two_above_is_exact() -> None:
    exponents = torch.arange(-126, 127)
    powers = torch.ldexp(torch.ones(253, dtype=torch.float64), exponents).float()
    above = reference.power_of_two_above
    assert torch.equal(above(powers), powers)
    assert torch.equal(above(torch.nextafter(powers, powers * 2)), powers * 2)
    assert torch.equal(above(torch.nextafter(powers * 2, powers)), powers * 2)
    special = above(torch.tensor([float("inf"), float("nan")]))
    assert special[0] == float("inf")
    assert special[1].isnan()


def test_scales_rounded_up_under_the_same_codes_are_not_ue8m0() -> None:
    w = normal(3, 256, 384, 0.02)
    codes, scales = quantize(w, 128, 128)
    wrong_scales = reference.power_of_two_above(scales)
    true_codes, true_scales = quantize(w, 128, 128, scale_format="ue8m0")
    # The scales alone do not show it; the codes and the values do.
    assert torch.equal(wrong_scales, true_scales)
    assert (bits(codes) != bits(true_codes)).double().mean() > 0.8

    def error(c: Tensor, s: Tensor) -> float:
        back = ops.dequantize(c, s, 128, 128, torch.float64)
        return float((back - w.double()).norm() / w.double().norm())

    assert error(true_codes, true_scales) < 0.028
    assert error(codes, wrong_scales) > 0.1
