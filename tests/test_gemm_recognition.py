"""Weight GEMMs that modules do not tell apart: each of the three is found, or none."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tiny_models import activations, backward, compiled
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from jetrl_compile.containment import check_containment
from jetrl_compile.pipeline import CompileReport
from jetrl_compile.recipe import JETRL
from jetrl_compile.report_sink import collect_reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def report_of(model: nn.Module, x: Tensor, **options: object) -> CompileReport:
    torch.manual_seed(0)
    with collect_reports() as reports:
        backward(compiled(model.to(torch.bfloat16), **options)(x))
    (report,) = reports
    return report


def names(report: CompileReport, role: str) -> list[str]:
    return sorted(op.name for op in report.graph.gemms(role) if report.graph.is_fp8(op))


def test_linear_as_the_compiled_module() -> None:
    layer, x = nn.Linear(192, 128, bias=False), activations(8, 192)
    training = report_of(layer, x)
    assert training.lowered == {"fprop": 1, "dgrad": 1, "wgrad": 1}
    with torch.no_grad(), collect_reports() as reports:
        compiled(layer)(x)
    # The same name in training and inference, or nothing could be compared.
    assert names(training, "fprop") == names(reports[0], "fprop") == [":fprop"]
    with_path = report_of(layer, x, module_path="lm_head", recipe="bf16")
    assert "lm_head:wgrad" in with_path.graph.by_name


class RawWeights(nn.Module):
    """SiLU(x a^T) * (x b^T), from bare parameters of one shape."""

    def __init__(self, in_gradient: bool = True) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(128, 192) / 14)
        self.b = nn.Parameter(torch.randn(128, 192) / 14)
        self.c = nn.Parameter(torch.randn(192, 128) / 14)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(
            nn.functional.silu(nn.functional.linear(x, self.a))
            * nn.functional.linear(x, self.b),
            self.c,
        )


def test_bare_parameters_of_one_module() -> None:
    model, x = RawWeights(), activations(64, 192)
    report = report_of(nn.Sequential(model), x)
    for role in ("fprop", "dgrad", "wgrad"):
        assert names(report, role) == [f"0.{name}:{role}" for name in "abc"]
    got = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    backward(model(x))
    for name, parameter in model.named_parameters():
        value, wanted = got[name], parameter.grad
        assert value is not None
        assert wanted is not None
        cosine = nn.functional.cosine_similarity(
            value.flatten().double(), wanted.flatten(), dim=0
        )
        assert cosine > 0.99, name


class Twice(nn.Module):
    """One layer, applied twice, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(192, 192, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(nn.functional.silu(self.layer(x)))
        return result


@pytest.mark.parametrize("recipe", ["jetrl", "jetrl_paper"])
def test_layer_that_runs_twice(recipe: str) -> None:
    report = report_of(Twice(), activations(64, 192), recipe=recipe)
    assert report.lowered == {"fprop": 2, "dgrad": 2, "wgrad": 2}
    assert report.kept == []


def test_attention_module_of_torch() -> None:
    # Its out_proj is a module that never runs: its weight is read by its parent.
    layer = nn.TransformerEncoderLayer(
        192, 4, 320, dropout=0.0, batch_first=True, norm_first=True
    )
    report = report_of(layer, activations(2, 16, 192))
    assert names(report, "fprop") == [
        "linear1:fprop",
        "linear2:fprop",
        "self_attn.in_proj_weight:fprop",
        "self_attn.out_proj:fprop",
    ]
    assert report.lowered == {"fprop": 4, "dgrad": 4, "wgrad": 4}
    assert report.kept == []


@pytest.mark.parametrize("recipe", ["jetrl", "jetrl_paper"])
def test_siblings_share_codes(recipe: str) -> None:
    model = nn.MultiheadAttention(192, 4, batch_first=True, kdim=192, vdim=64)
    q, v = activations(2, 16, 192), activations(2, 16, 64)
    model = model.to(torch.bfloat16)

    def run(q: Tensor, v: Tensor) -> Tensor:
        result: Tensor = model(q, q, v, need_weights=False)[0]
        return result

    with collect_reports() as reports:
        backward(compiled(run, recipe=recipe)(q, v))
    assert reports[0].lowered == {"fprop": 4, "dgrad": 4, "wgrad": 4}
    assert reports[0].kept == []


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(192, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        result: Tensor = nn.functional.silu(gate) * up
        return result


@pytest.mark.parametrize("part", ["gate_proj", "up_proj"])
def test_half_of_a_fused_layer_cannot_be_fp8(part: str) -> None:
    recipe = replace(JETRL, name="half", exclude=(part,))
    with pytest.raises(BackendCompilerFailed, match=r"up_proj:fprop are one GEMM but"):
        report_of(Fused(), activations(64, 192), recipe=recipe)


class Weighted(nn.Module):
    """A function of x and one square weight."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(192, 192) / 14)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.w)


# The sides of these matrices are equal: a mistaken view gives other values, no error.
SAME_MATRIX: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": lambda x, w: torch.einsum("btd,ed->bte", x, w),
    "einsum transposed": lambda x, w: torch.einsum("btd,de->bte", x, w),
    "expanded": lambda x, w: torch.bmm(x, w.expand(2, 192, 192)),
    "expanded, transposed": lambda x, w: torch.bmm(x, w.expand(2, 192, 192).mT),
    "turned in three dimensions": lambda x, w: torch.bmm(
        x[:1], w[:, :, None].permute(2, 0, 1)
    ),
    "transposed twice": lambda x, w: x @ w.t().t(),
}
OTHER_MATRIX: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "heads permuted": lambda x, w: nn.functional.linear(
        x, w.view(4, 48, 192).transpose(1, 2).reshape(192, 192)
    ),
    "rows interleaved": lambda x, w: (
        x @ w.view(2, 96, 192).transpose(0, 1).reshape(192, 192)
    ),
}


@pytest.mark.parametrize("case", [*SAME_MATRIX, *OTHER_MATRIX])
@pytest.mark.parametrize("training", [False, True])
def test_views_of_a_weight_give_its_values(case: str, training: bool) -> None:
    torch.manual_seed(0)
    model = Weighted((SAME_MATRIX | OTHER_MATRIX)[case]).to(torch.bfloat16)
    x = activations(2, 16, 192)
    gradients = []
    with torch.set_grad_enabled(training), collect_reports() as reports:
        results = [model(x), compiled(model)(x)]
        for result in results if training else ():
            model.zero_grad()
            result.float().pow(2).sum().backward()
            assert model.w.grad is not None
            gradients.append(model.w.grad.clone())
    assert len(names(reports[0], "fprop")) == (case in SAME_MATRIX)
    for exact, found in (results, gradients) if training else (results,):
        error = (found.double() - exact.double()).norm() / exact.double().norm()
        assert error < 0.08


def test_the_factor_of_a_sum_is_a_parameter() -> None:
    plain, scaled = (
        report_of(Weighted(function), activations(2, 16, 192)).graph
        for function in (
            lambda x, w: x + nn.functional.linear(x, w),
            lambda x, w: torch.add(x, nn.functional.linear(x, w), alpha=0.5),
        )
    )
    assert any(op.kind == "residual_add" for op in plain.operators)
    assert [op.params for op in scaled.operators if op.role == "add"] == [
        (("alpha", 0.5),)
    ]
    assert check_containment(scaled, plain).contained is False
