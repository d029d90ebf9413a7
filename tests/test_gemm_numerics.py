"""The three GEMMs of one layer, through the backend, against an FP64 oracle."""

import pytest
import torch
from tiny_models import activations, compiled
from torch import Tensor, nn

from jetrl_compile.formats import Flow
from jetrl_compile.kernels import reference
from jetrl_compile.recipe import get_recipe

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
RECIPES = ("jetrl", "jetrl_paper", "jetrl_ue8m0")
UNIT = 2.0**-8  # of BF16: half of the distance from 1 to the next number


def values(x: Tensor, flow: Flow) -> Tensor:
    """What the codes of a matrix stand for, in FP64."""
    assert flow.granularity is not None
    assert flow.scale_format is not None
    assert flow.amax_floor is not None
    rows, cols = flow.granularity.rows, flow.granularity.cols
    if flow.source_dtype == "e4m3":
        codes, scales = reference.quantize(x.t(), 1, 128, False, "fp32", 1e-10)
        codes, scales = reference.requantize(
            codes, scales, 1, 128, rows, cols, True, flow.scale_format, flow.amax_floor
        )
    else:
        codes, scales = reference.quantize(
            x, rows, cols, False, flow.scale_format, flow.amax_floor
        )
    high, wide = scales.shape
    spread = scales.double().repeat_interleave(rows, 0).repeat_interleave(cols, 1)
    assert (high, wide) == flow.granularity.scale_shape((x.shape[0], x.shape[1]))
    return codes.double() * spread[: x.shape[0], : x.shape[1]]


def check(got: Tensor, a: Tensor, b: Tensor) -> None:
    """The result is a b^T, rounded to BF16 once (through FP32)."""
    exact = a @ b.t()
    # The FP64 sums of both sides differ by less than K units of 2^-53 of the terms.
    slack = (a.abs() @ b.abs().t()) * a.shape[1] * 2.0**-52
    bound = UNIT * (1 + 2.0**-14) * exact.abs() + slack
    assert got.dtype is torch.bfloat16
    assert ((got.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("m", "n", "k"), [(129, 320, 192), (7, 128, 256), (1, 64, 72)])
def test_gemms_are_exact_up_to_one_rounding(
    recipe: str, m: int, n: int, k: int
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
    source, dy = activations(m, k), activations(m, n, grad=False, seed=9)
    y = compiled(layer, recipe=recipe, module_path="layer")(source)
    y.backward(dy)

    flows = get_recipe(recipe).flows
    assert flows is not None
    dx, dw = source.grad, layer.weight.grad
    assert dx is not None
    assert dw is not None
    x, w = source.detach(), layer.weight.detach()
    check(y.detach(), values(x, flows.fprop_x), values(w, flows.fprop_w))
    check(dx, values(dy, flows.dgrad_dy), values(w.t(), flows.dgrad_w))
    check(dw, values(dy.t(), flows.wgrad_dy), values(x.t(), flows.wgrad_x))
