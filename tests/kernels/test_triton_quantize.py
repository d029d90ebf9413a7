"""The Triton quantizers against the reference, bit for bit: interpreted, or on a GPU.

The interpreter runs the kernels' logic but not their arithmetic of a quotient, so the
tests of all reachable quotients are for the GPU.
"""

import os
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from jetrl_compile.errors import ProviderError
from jetrl_compile.kernels import (
    layouts,
    quantizers,
    reference,
    reference_fused,
    triton_common,
    triton_quantize,
    triton_requantize,
)

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
WHY_NOT = triton_common.triton_missing()
if WHY_NOT is None and not ON_GPU and not triton_common.interpreted():
    WHY_NOT = "no GPU, and triton was imported before TRITON_INTERPRET=1 was set"
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    # NumPy, in the interpreter, warns of infinities and NaN.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

Region = tuple[int, int]
FLOOR = 1e-10
GROUP, BLOCK = (1, 128), (128, 128)
SHAPES = [(0, 128), (1, 128), (7, 576), (129, 192), (128, 256)]
# What is wanted of the matrix, and of its transpose.
WANTED = [
    (GROUP, None),
    (BLOCK, None),
    (None, GROUP),
    (None, BLOCK),
    (GROUP, GROUP),
    (GROUP, BLOCK),
    (BLOCK, BLOCK),
    (BLOCK, GROUP),
]


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).mul_(std).bfloat16().to(DEVICE)


def bits(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


def same(got: Tensor, wanted: Tensor) -> bool:
    """Whether all bits are equal; NaN are equal whatever their bits."""
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    wanted = wanted.to(got.device)
    kind = torch.uint8 if got.element_size() == 1 else torch.int32
    equal = got.contiguous().view(kind) == wanted.contiguous().view(kind)
    return bool((equal | (got.float().isnan() & wanted.float().isnan())).all())


def check(
    parts: Sequence[Tensor],
    straight: Region | None,
    turned: Region | None,
    dim: int = 0,
    scale_format: str = "fp32",
    floor: float = FLOOR,
    on: str = DEVICE,
) -> None:
    """Quantize, and compare bits and memory order with the reference on a device."""
    source = [part.to(on) for part in parts]
    if straight is None:
        assert turned is not None
        args = (dim, *turned, True, scale_format, floor)
        got = triton_quantize.quantize_parts(parts, *args)
        wanted = reference_fused.quantize_parts(source, *args)
        check_order(*got, turned, True)
    else:
        pair = (dim, *straight, *(turned or (-1, -1)), scale_format, floor)
        twice = triton_quantize.quantize_twice(parts, *pair)
        wanted_twice = reference_fused.quantize_twice(source, *pair)
        check_order(*twice[:2], straight)
        if turned is not None:
            check_order(*twice[2:], turned, True)
        assert same(twice[2], wanted_twice[2])
        assert same(twice[3], wanted_twice[3])
        got, wanted = twice[:2], wanted_twice[:2]
    assert same(got[0], wanted[0])
    assert same(got[1], wanted[1])


def check_order(
    codes: Tensor, scales: Tensor, region: Region, transposed: bool = False
) -> None:
    rows, cols = codes.shape
    high, wide = scales.shape
    assert codes.stride() == layouts.code_strides(rows, cols, transposed)
    assert scales.stride() == layouts.scale_strides((high, wide), region[0])


@pytest.mark.parametrize(("straight", "turned"), WANTED)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(
    shape: tuple[int, int], straight: Region | None, turned: Region | None
) -> None:
    check([normal(*shape)], straight, turned)


@pytest.mark.parametrize(("straight", "turned"), WANTED)
def test_powers_of_two(straight: Region | None, turned: Region | None) -> None:
    check([normal(130, 192)], straight, turned, scale_format="ue8m0")


@pytest.mark.parametrize(("straight", "turned"), WANTED)
def test_special_values(straight: Region | None, turned: Region | None) -> None:
    x = normal(130, 320)
    x[0, 0] = float("nan")
    x[1, 130] = float("inf")
    x[2, 131] = -float("inf")
    x[3], x[4], x[5] = 0.0, -0.0, 1e-40
    x[3, 1], x[4, 1] = -0.0, 1.0
    x[:, 300:] = 0.0
    x[128] = 3e38
    check([x], straight, turned)


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize("floor", [1e-10, 0.3])
def test_floor(floor: float, scale_format: str) -> None:
    x = normal(8, 256, std=floor)
    x[0] = floor
    check([x], GROUP, GROUP, scale_format=scale_format, floor=floor)


def test_infinite_scales_keep_the_signs_of_zeros() -> None:
    x = normal(4, 128)
    x[:, 0] = float("inf")
    check([x], GROUP, BLOCK)


@pytest.mark.parametrize(("straight", "turned"), WANTED)
@pytest.mark.parametrize("dim", [0, 1])
def test_parts(dim: int, straight: Region | None, turned: Region | None) -> None:
    shapes = [(128, 192), (256, 192), (70, 192)]
    parts = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    if dim == 1:
        parts = [part.t().contiguous() for part in parts]
    check(parts, straight, turned, dim)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_seam_that_cuts_a_group(dim: int) -> None:
    check([normal(130, 130), normal(130, 130, seed=1)], GROUP, BLOCK, dim)


def test_more_parts_than_a_launch_takes() -> None:
    parts = [normal(3, 128, seed=seed) for seed in range(5)]
    check(parts, GROUP, GROUP, 1)
    check(parts, None, GROUP, 1)


def test_parts_of_two_dtypes() -> None:
    check([normal(128, 128), normal(2, 128, seed=1).float()], BLOCK, BLOCK)


@pytest.mark.parametrize("cols", [1, 129, 255])
def test_odd_columns(cols: int) -> None:
    check([normal(131, cols)], GROUP, GROUP)
    check([normal(131, cols)], BLOCK, None)


def test_an_empty_part() -> None:
    check([normal(128, 128), normal(128, 0), normal(128, 64)], GROUP, GROUP, 1)
    check([normal(128, 0), normal(128, 256)], GROUP, GROUP, 1)


@pytest.mark.parametrize(("straight", "turned"), [(GROUP, None), (GROUP, BLOCK)])
def test_strides(straight: Region, turned: Region | None) -> None:
    wide = normal(130, 600)
    for x in (wide[:, 64:320], wide[:, 1:258], wide[::2], wide[:, ::3], wide[:1, :1]):
        check([x], straight, turned)
    check([wide.t()], straight, turned)


@pytest.mark.parametrize(("straight", "turned"), [(GROUP, None), (GROUP, BLOCK)])
def test_fp32_is_rounded_first(straight: Region, turned: Region | None) -> None:
    x = torch.randn(33, 256, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x[0, :3] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, float("nan")])
    check([x], straight, turned)


@pytest.mark.parametrize("region", [GROUP, BLOCK])
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize("shape", SHAPES)
def test_requantize(shape: tuple[int, int], scale_format: str, region: Region) -> None:
    x = normal(*shape, std=3.0)
    if shape[0] > 100:
        x[3, 4], x[5, 6], x[7], x[8] = float("nan"), float("inf"), 0.0, -0.0
    check_requantize(x, region, scale_format)


def check_requantize(x: Tensor, region: Region, scale_format: str = "fp32") -> None:
    made = reference.quantize(x, *GROUP, False, scale_format, FLOOR)
    args = (*layouts.in_order(*made, 1), *GROUP, *region, True, scale_format, FLOOR)
    codes, scales = triton_requantize.requantize(*args)
    wanted = reference.requantize(*args)
    check_order(codes, scales, region, True)
    assert same(codes, wanted[0])
    assert same(scales, wanted[1])


def test_rejects() -> None:
    x = normal(4, 128)
    assert triton_quantize.rejects([x], GROUP, BLOCK) is None
    assert (
        triton_quantize.rejects([x], (1, 64), None) == "no kernel for regions of 1x64"
    )
    assert triton_quantize.rejects([x.half()], GROUP, None) == (
        "no kernel quantizes fp16"
    )
    assert triton_quantize.rejects([x[0]], GROUP, None) == (
        "no kernel quantizes 1 dimensions"
    )
    with pytest.raises(ProviderError, match="amax floor 1e-30 is below 1e-20"):
        triton_quantize.quantize_parts([x], 0, 1, 128, False, "fp32", 1e-30)
    codes, scales = reference.quantize(x, 1, 128, False, "fp32", FLOOR)
    why = triton_requantize.rejects(codes, scales, 1, 128, 1, 128, False)
    assert why == "no kernel requantizes without a transpose"
    why = triton_requantize.rejects(codes, scales, 128, 128, 1, 128, True)
    assert why == "no kernel requantizes regions of 128x128"


@pytest.mark.parametrize("rows", [[128, 256], [64, 7], [130]])
def test_into_what_exists(rows: list[int]) -> None:
    """Codes and scales may be rows of larger matrices, as of a fused layer."""
    parts = [normal(height, 192, seed=height) for height in rows]
    made = triton_quantize.quantize_parts(parts, 0, *BLOCK, False, "fp32", FLOOR)
    whole = [torch.zeros_like(t) for t in made]
    out = [torch.cat([t, t, t]) for t in whole]
    places = [slice(len(t), 2 * len(t)) for t in whole]
    into = (out[0][places[0]], out[1][places[1]])
    for run in (triton_quantize.quantize_into, into_by_device):
        for t in out:
            t.zero_()
        run(parts, BLOCK, "fp32", FLOOR, into)
        for t, place, wanted in zip(out, places, made, strict=True):
            assert same(t[place], wanted)
            assert not t[: place.start].float().any()
            assert not t[place.stop :].float().any()


def into_by_device(
    parts: list[Tensor], region: Region, fmt: str, floor: float, out: tuple[Tensor, ...]
) -> None:
    quantizers.quantize_into(parts, *region, fmt, floor, *out)


def test_rejects_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_common, "_MISSING", "triton is not installed")
    x = normal(4, 128)
    assert triton_quantize.rejects([x], GROUP, None) == "triton is not installed"


@pytest.mark.gpu
def test_rejects_tensors_of_the_cpu() -> None:
    why = triton_quantize.rejects([normal(4, 128).cpu()], GROUP, None)
    assert why == "Triton runs on CUDA, and a tensor is on cpu"


@pytest.mark.gpu
@pytest.mark.parametrize(("straight", "turned"), WANTED[:7])
@pytest.mark.parametrize("cols", [576, 1536, 3584, 4608, 18944])
def test_many_rows(cols: int, straight: Region | None, turned: Region | None) -> None:
    for seed, rows in enumerate([0, 1, 2, 3, 7, 8, 16, 100, 128, 129, 1000]):
        x = normal(rows, cols, seed=seed, std=10.0 ** (seed - 6))
        check([x], straight, turned)
        if cols < 4000:
            check([x], straight, turned, on="cpu")


def every_quotient(exponent: int) -> Tensor:
    """Groups that hold each BF16 amax of an exponent with each x down to 2^-20 of it.

    Returns:
        (R, 128) in BF16. A quotient below 2^-12 of 448 is 0 whatever its last bits.
    """
    amax = ((exponent + 127) * 128 + torch.arange(128))[:, None]
    x = amax - torch.arange(21 * 127)
    groups = torch.cat(
        [amax[:, None].expand(-1, 21, -1), x.view(128, 21, 127)], 2
    ).clamp_(min=0)
    signs = torch.arange(groups.numel()).view_as(groups) % 2 * -32768
    return (groups + signs).to(torch.int16).view(torch.bfloat16).view(-1, 128)


@pytest.mark.parametrize("rcp_error", [-1, 0, 1])
@pytest.mark.parametrize("exponent", [-33, 0, 126])
def test_two_part_reciprocal(exponent: int, rcp_error: int) -> None:
    """What `encode` computes on a GPU, in FP64: each step is exact before its rounding.

    Its approximate reciprocal may be wrong by one unit in the last place.
    """
    x = every_quotient(exponent).float()
    scale = (x[:, :1].abs().clamp(min=FLOOR) / 448).double()
    nearest = (1 / scale).float().view(torch.int32)
    high = (nearest + rcp_error - 2).view(torch.float32)
    low = (1 - scale * high.double()).float() * high
    assert (low >= 0).all()
    quotient = (x.double() * high.double() + (x * low).double()).float()
    wanted = x / scale.float()
    assert torch.equal(bits(quotient.to(layouts.E4M3)), bits(wanted.to(layouts.E4M3)))


@pytest.mark.gpu
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize("exponent", [-36, -34, -33, -20, 0, 1, 40, 100, 126, 127])
def test_every_quotient(exponent: int, scale_format: str) -> None:
    x = every_quotient(exponent).to(DEVICE)
    check([x], GROUP, None, scale_format=scale_format, on="cpu")
    check([x.t().contiguous()], None, GROUP, scale_format=scale_format, on="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("region", [GROUP, BLOCK])
def test_requantize_many(region: Region) -> None:
    for seed, shape in enumerate([(1000, 576), (128, 4608), (129, 3584), (4096, 1536)]):
        x = normal(*shape, seed=seed, std=10.0 ** (2 * seed - 4))
        spread = torch.logspace(-3, 3, shape[0], device=DEVICE)[:, None]
        check_requantize((x * spread).bfloat16(), region)
        check_requantize(x, region, "ue8m0")


@pytest.mark.gpu
def test_graph_capture() -> None:
    x = normal(200, 512)
    args = (0, *GROUP, *BLOCK, "fp32", FLOOR)
    triton_quantize.quantize_twice([x], *args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = triton_quantize.quantize_twice([x], *args)
    x.copy_(normal(200, 512, seed=1))
    graph.replay()
    for got, wanted in zip(
        captured, reference_fused.quantize_twice([x], *args), strict=True
    ):
        assert same(got, wanted)


class OnGpu(Tensor):
    """A tensor on the CPU that says that it is on a GPU."""

    is_cuda = property(lambda self: True)


def test_floors_that_no_kernel_takes_go_to_the_reference() -> None:
    x = torch.randn(130, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    floor, gpu = 1e-30, x.as_subclass(OnGpu)
    before = sum(quantizers.fallbacks().values())
    codes, scales = quantizers.quantize(x, 1, 128, False, "fp32", floor)
    made = [
        *quantizers.quantize(gpu, 1, 128, False, "fp32", floor),
        *quantizers.quantize_twice([gpu], 0, 1, 128, 1, 128, "fp32", floor)[:2],
    ]
    assert torch.equal(made[0].float(), codes.float())
    assert torch.equal(made[2].float(), codes.float())
    assert torch.equal(made[1], scales)
    assert torch.equal(made[3], scales)
    wanted = quantizers.requantize(codes, scales, 1, 128, 1, 128, True, "fp32", floor)
    again = quantizers.requantize(
        codes.as_subclass(OnGpu), scales, 1, 128, 1, 128, True, "fp32", floor
    )
    assert torch.equal(again[0].float(), wanted[0].float())
    assert torch.equal(again[1], wanted[1])
    assert sum(quantizers.fallbacks().values()) == before + 3
