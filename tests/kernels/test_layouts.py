"""Codes and scales lie where Hopper's GEMM kernels read them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from jetrl_compile.granularity import Granularity
from jetrl_compile.kernels import ops
from jetrl_compile.kernels.layouts import (
    CODE_ALIGNMENT,
    LINE,
    SCALE_ALIGNMENT,
    align,
    code_strides,
    empty_quantized,
    in_order,
    scale_strides,
)

CPU = torch.device("cpu")
SHAPES = ((1, 1), (3, 128), (37, 320), (129, 576), (128, 16), (8, 4608))


@pytest.mark.parametrize("to", [4, 16, 128])
def test_align(to: int) -> None:
    for size in (0, 1, to - 1, to, to + 1, 10 * to):
        aligned = align(size, to)
        assert aligned % to == 0
        assert size <= aligned < size + to


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("region", [(1, 128), (128, 128), (0, 0), (1, 0)])
@pytest.mark.parametrize("transposed", [False, True])
def test_memory_order(
    shape: tuple[int, int], region: tuple[int, int], transposed: bool
) -> None:
    codes, scales = empty_quantized(shape, *region, CPU, transposed)
    assert tuple(codes.shape) == shape
    assert codes.dtype is torch.float8_e4m3fn
    high, wide = Granularity(*region).scale_shape(shape)
    assert scales.shape == (high, wide)
    assert scales.dtype is torch.float32
    row, column = codes.stride()
    assert column == 1
    assert row >= shape[1]
    assert row % CODE_ALIGNMENT == 0, "TMA wants rows at multiples of 16 bytes"
    assert row - shape[1] < CODE_ALIGNMENT or transposed
    if transposed:
        # Never contiguous, whatever the number of tokens; rows begin at lines.
        assert row % LINE == 0
        assert LINE <= row - shape[1] < 2 * LINE
    if region[0] == 1:
        assert scales.stride(0) == 1, "groups: MN-major"
        assert scales.stride(1) * 4 % 16 == 0
        assert 0 <= scales.stride(1) - shape[0] < SCALE_ALIGNMENT
    else:
        assert scales.is_contiguous(), "blocks: row-major"


def test_memory_of_no_rows() -> None:
    for transposed in (False, True):
        codes, scales = empty_quantized((0, 256), 1, 128, CPU, transposed)
        assert codes.shape == (0, 256)
        assert scales.shape == (0, 2)
        codes, scales = empty_quantized((256, 0), 1, 128, CPU, transposed)
        assert codes.shape == (256, 0)
        assert scales.shape == (256, 0)
    assert code_strides(256, 0, True) == (128, 1)
    assert scale_strides((0, 2), 1) == (1, 0)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 128])
def test_in_order_keeps_values_and_copies_once(rows: int, transposed: bool) -> None:
    x = torch.randn(37, 320, generator=torch.Generator().manual_seed(0))
    codes = x.to(torch.float8_e4m3fn)
    scales = torch.rand(Granularity(rows, 128).scale_shape((37, 320)))
    moved, turned = in_order(codes, scales, rows, transposed)
    assert torch.equal(moved.float(), codes.float())
    assert torch.equal(turned, scales)
    assert moved.stride() == code_strides(37, 320, transposed)
    assert turned.stride() == scale_strides((37, 3), rows)
    again, still = in_order(moved, turned, rows, transposed)
    assert again is moved
    assert still is turned


def test_symbolic_sizes_need_no_guard() -> None:
    # One compiled graph for all numbers of tokens: no stride asks for their value.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.empty(37, 320), symbolic_context=context)
    with mode:
        for transposed in (False, True):
            shape = (x.shape[1], x.shape[0]) if transposed else (x.shape[0], x.shape[1])
            for region in ((1, 128), (128, 128)):
                codes, scales = empty_quantized(shape, *region, x.device, transposed)
                assert codes.shape == shape
                assert isinstance(codes.stride(0), torch.SymInt) == transposed
                assert len(scales.shape) == 2
    assert mode.shape_env is not None
    assert not mode.shape_env.guards


def test_padding_is_not_read() -> None:
    def quantized(x: Tensor, fill: int) -> tuple[Tensor, Tensor]:
        codes, scales = ops.quantize(x, 1, 128, False, "fp32", 1e-10, None)
        for t, width in ((codes, 1), (scales, 4)):
            whole = torch.full((t.untyped_storage().nbytes(),), fill, dtype=torch.uint8)
            inside = whole.view(t.dtype).as_strided(t.size(), t.stride())
            assert whole.nbytes >= t.numel() * width
            t.set_(inside.copy_(t))
        return codes, scales

    a, b = torch.randn(37, 200).bfloat16(), torch.randn(24, 200).bfloat16()
    numbers = (1, 128, 1, 128, torch.float32, "reference")
    results = [
        ops.gemm(*quantized(a, fill), *quantized(b, fill), *numbers)
        for fill in (0, 255)
    ]
    assert results[0].isfinite().all()
    assert torch.equal(results[0], results[1])
