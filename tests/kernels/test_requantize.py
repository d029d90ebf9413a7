"""Requantize and dequantize: what codes stand for, and other regions of it."""

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from torch import Tensor

from jetrl_compile.kernels import ops

FLOOR = 1e-10
laws = settings(derandomize=True, deadline=None, max_examples=25, print_blob=True)
seeds = st.integers(0, 2**31)
sizes = st.integers(1, 300)
regions = st.sampled_from([(1, 128), (128, 128), (1, 0), (0, 0), (2, 32)])


def quantized(
    seed: int, m: int, k: int, rows: int, cols: int
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator).bfloat16()
    codes, scales = ops.quantize(x, rows, cols, False, "fp32", FLOOR, None)
    return x, codes, scales


def bits(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


@laws
@given(seeds, sizes, sizes, regions)
def test_dequantize_multiplies_once(
    seed: int, m: int, k: int, region: tuple[int, int]
) -> None:
    _, codes, scales = quantized(seed, m, k, *region)
    rows, cols = region[0] or m, region[1] or k
    wide = scales.repeat_interleave(rows, 0).repeat_interleave(cols, 1)[:m, :k]
    fp32 = (codes.double() * wide.double()).float()  # exact, then rounded once
    for dtype in (torch.float32, torch.bfloat16):
        back = ops.dequantize(codes, scales, *region, dtype)
        assert torch.equal(back, fp32.to(dtype))
        assert back.is_contiguous()


@laws
@given(seeds, sizes, sizes, regions, st.booleans())
def test_same_regions_and_scale_give_the_same_codes(
    seed: int, m: int, k: int, region: tuple[int, int], strided: bool
) -> None:
    # The largest code is 448, so amax is 448 * scale up to one rounding, and codes
    # are far from the middle between two codes: only the scale may move, by an ulp.
    _, codes, scales = quantized(seed, m, k, *region)
    source = codes.t().contiguous().t() if strided else codes
    again, scales_again = ops.requantize(
        source, scales, *region, *region, False, "fp32", FLOOR, None
    )
    assert torch.equal(bits(again), bits(codes))
    assert torch.allclose(scales_again, scales, rtol=2**-22, atol=0)


@laws
@given(seeds, sizes, sizes, st.booleans(), st.sampled_from(["fp32", "ue8m0"]))
def test_wgrad_operand_of_the_paper(
    seed: int, m: int, k: int, transpose: bool, scale_format: str
) -> None:
    # Groups along K to groups along tokens, without a rounding to BF16 between.
    _, codes, scales = quantized(seed, m, k, 1, 128)
    got, got_scales = ops.requantize(
        codes, scales, 1, 128, 1, 128, transpose, scale_format, FLOOR, None
    )
    values = ops.dequantize(codes, scales, 1, 128, torch.float32)
    values = values.t() if transpose else values
    scale = got_scales.repeat_interleave(128, 1)[:, : values.shape[1]]
    expected = (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(bits(got), bits(expected.contiguous()))
    groups = torch.nn.functional.pad(values, (0, -values.shape[1] % 128))
    amax = groups.reshape(values.shape[0], -1, 128).abs().amax(2)
    if scale_format == "fp32":
        assert torch.equal(got_scales, amax.clamp(min=FLOOR) / 448)
    else:
        assert (torch.frexp(got_scales)[0] == 0.5).all()


def test_second_rounding_costs_accuracy() -> None:
    # Why the default recipe quantizes wgrad's x from BF16 instead.
    x, codes, scales = quantized(0, 512, 512, 1, 128)
    once = ops.quantize(x, 1, 128, True, "fp32", FLOOR, None)
    twice = ops.requantize(codes, scales, 1, 128, 1, 128, True, "fp32", FLOOR, None)

    def error(pair: tuple[Tensor, Tensor]) -> float:
        back = ops.dequantize(*pair, 1, 128, torch.float64).t()
        return float((back - x.double()).norm() / x.double().norm())

    assert error(once) < 0.028
    assert error(twice) > 1.2 * error(once)


def test_conversion_to_ue8m0_requantizes() -> None:
    x, codes, scales = quantized(0, 256, 256, 128, 128)
    new, new_scales = ops.requantize(
        codes, scales, 128, 128, 128, 128, False, "ue8m0", FLOOR, None
    )
    assert not torch.equal(bits(new), bits(codes))
    back = ops.dequantize(new, new_scales, 128, 128, torch.float64)
    assert (back - x.double()).norm() / x.double().norm() < 0.05
