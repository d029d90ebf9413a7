"""What exact mode replaces, and what it leaves alone."""

from typing import Any

import pytest
import torch
from fused_graphs import RmsNorm
from tiny_models import (
    IGNORE_LRU_CACHE,
    IGNORE_SCRIPT_METHOD,
    make_model,
    tokens,
)
from torch import Tensor, nn
from traced_graphs import capture_context

from jetrl_compile.errors import LoweringError
from jetrl_compile.kernels import exact_ops
from jetrl_compile.passes.context import Context
from jetrl_compile.passes.exact_forms import is_backward, match_rotation
from jetrl_compile.passes.use_exact import use_exact, use_exact_gemms

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    IGNORE_LRU_CACHE,
    IGNORE_SCRIPT_METHOD,
]
X = torch.randn(2, 3, 64).bfloat16()


def context_of(module: nn.Module, *inputs: Tensor) -> Context:
    context = capture_context(lambda run: run(*inputs), module)
    context.exact = True
    return context


def targets(context: Context, *, backward: bool = False) -> list[Any]:
    return [
        node.target
        for node in context.graph.nodes
        if node.op == "call_function" and is_backward(node) == backward
    ]


class Rope(nn.Module):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        low, high = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return x * cos + torch.cat((-high, low), -1) * sin


class OtherRope(Rope):
    """The halves the other way round."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        low, high = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return x * cos + torch.cat((-low, high), -1) * sin


def test_a_norm_becomes_one_operator_and_backward_reads_its_factor() -> None:
    context = context_of(RmsNorm(64).bfloat16(), X)
    assert use_exact(context) == 1
    context.graph.lint()
    forward = targets(context)
    assert exact_ops.rms_norm in forward
    assert torch.ops.aten.rsqrt.default not in forward
    assert torch.ops.aten.mean.dim not in forward
    assert use_exact(context) == 0, "nothing is left to replace"


def test_without_the_option_nothing_changes() -> None:
    context = context_of(RmsNorm(64).bfloat16(), X)
    context.exact = False
    before = [node.target for node in context.graph.nodes]
    assert use_exact(context) == use_exact_gemms(context) == 0
    assert [node.target for node in context.graph.nodes] == before


def test_a_rotation() -> None:
    table = torch.randn(3, 64).bfloat16()
    context = context_of(Rope(), X, table, table)
    assert use_exact(context) == 1
    assert targets(context).count(exact_ops.rope) == 1


@pytest.mark.parametrize("wide", [False, True])
def test_other_rotations_stay(wide: bool) -> None:
    dtype = torch.float32 if wide else torch.bfloat16
    table = torch.randn(3, 64).to(dtype)
    context = context_of(Rope() if wide else OtherRope(), X.to(dtype), table, table)
    assert use_exact(context) == 0
    assert not any(match_rotation(node) for node in context.graph.nodes)


def test_a_gemm_with_a_bias_is_rounded_before_it() -> None:
    context = context_of(nn.Linear(64, 32).bfloat16(), X[0])
    assert use_exact(context) == 1, "the bias is split off"
    assert use_exact_gemms(context) == 1
    forward = targets(context)
    assert exact_ops.bf16_gemm in forward
    assert torch.ops.aten.addmm.default not in forward
    assert torch.ops.aten.mm.default not in forward
    assert torch.ops.aten.mm.default in targets(context, backward=True)


def test_gemms_in_fp32_stay() -> None:
    context = context_of(nn.Linear(64, 32, bias=False), X[0].float())
    assert use_exact_gemms(context) == 0


def test_a_model_of_other_forms_is_an_error() -> None:
    model = make_model("gemma3")
    run: Any = torch.compile(
        model, backend="jetrl", options={"lowering": "aot", "exact": True}
    )
    with pytest.raises(Exception, match="exact mode: ") as caught:
        run(input_ids=tokens(), use_cache=False)
    error = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(error, LoweringError)
    assert "docs/exact.md lists what has a kernel" in str(error)
