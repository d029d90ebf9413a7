"""Forms of norms and gates that no kernel computes stay as they are, and say so."""

from typing import Any

import pytest
import torch
from fused_graphs import FUSED, SAVED, RmsNorm, check_same
from tiny_models import activations, backward, compiled, gradients, sqnr
from torch import Tensor, nn

from jetrl_compile.pipeline import CompileReport
from jetrl_compile.report_sink import collect_reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
BF16 = torch.bfloat16
silu = nn.functional.silu
NOT_FUSED = "not fused with what makes x: "


class Linears(nn.Module):
    """Two layers, and something between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(256, 256, bias=False)
        self.b = nn.Linear(256, 256, bias=False)
        self.last = nn.Linear(256, 256, bias=False)
        self.norm = RmsNorm(256)
        self.heads = RmsNorm(64)
        self.scale = nn.Parameter(torch.rand(256))
        self.to(BF16)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def cut(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], 4, 64)


class NormOfHeads(Linears):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.heads(cut(self.a(x))).flatten(-2))
        return result


class GatedHeads(Linears):
    def forward(self, x: Tensor) -> Tensor:
        gated = silu(cut(self.a(x))) * cut(self.b(x))
        result: Tensor = self.last(gated.flatten(-2))
        return result


class GatedByParameter(Linears):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(silu(self.a(x)) * self.scale)
        return result


class GatedByColumn(Linears):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(silu(self.a(x)) * x[..., :1])
        return result


class GatedByItself(Linears):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.a(x)
        result: Tensor = self.last(silu(gate) * gate)
        return result


class UpBeforeGate(Linears):
    def forward(self, x: Tensor) -> Tensor:
        up = self.b(x)
        result: Tensor = self.last(silu(self.a(x)) * up)
        return result


class NormIsRead(Linears):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        result: Tensor = self.last(h) + h
        return result


class TwoNorms(Linears):
    """Two norms of one sum, written in one module."""

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.scale * x
        wide = total.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        first = self.scale * wide.to(BF16)
        result: Tensor = self.a(self.norm(total)) + self.b(first) + total
        return result


class TwiceTheNorm(Linears):
    """Twice the same norm, of one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.a(self.norm(x)) * self.last(self.norm(x))
        return result


class NormOfOneNumber(Linears):
    def __init__(self) -> None:
        super().__init__()
        self.norm = RmsNorm(1).to(BF16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.norm(x))
        return result


class BiasedGates(Linears):
    """The gradients of gate and up are read by the biases' gradients too."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(256, 256).to(BF16)
        self.b = nn.Linear(256, 256).to(BF16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(silu(self.a(x)) * self.b(x))
        return result


ROWS = f"last:fprop: {NOT_FUSED}it is made in rows of 64 and read in rows of 256"
KEPT = "last:fprop: gate and up are kept "
FORMS: dict[type[Linears], tuple[tuple[str, ...], ...]] = {
    NormOfHeads: (("heads", ROWS),),
    GatedHeads: (("silu", ROWS),),
    GatedByParameter: (),
    GatedByColumn: (),
    GatedByItself: (("saved", KEPT),),
    UpBeforeGate: (("saved", KEPT),),
    NormIsRead: (("read", f"last:fprop: {NOT_FUSED}aten.add.Tensor reads it too"),),
    TwoNorms: (),
    TwiceTheNorm: (),
    NormOfOneNumber: (),
    BiasedGates: (("saved", KEPT),),
}


@pytest.mark.parametrize("form", list(FORMS), ids=lambda form: form.__name__)
def test_other_forms(form: type[Linears]) -> None:
    results = []
    for chosen in ({}, FUSED, SAVED):
        torch._dynamo.reset()
        model, x = form(), activations(2, 24, 256)
        with collect_reports() as reports:
            y = compiled(model, **chosen)(x)
            backward(y)
        results.append((y.detach(), {"x": x.grad, **gradients(model)}))
        if chosen:
            check_form(form, chosen, reports[0], results[0], results[-1])


Result = tuple[Tensor, dict[str, Tensor | None]]


def check_form(
    form: type[Linears],
    options: dict[str, Any],
    report: CompileReport,
    plain: Result,
    fused: Result,
) -> None:
    assert torch.equal(plain[0], fused[0])
    if report.changes["merge_siblings"]:
        for name, gradient in plain[1].items():
            other = fused[1][name]
            assert gradient is not None
            assert other is not None
            assert sqnr(gradient, other) > 20, name
    else:
        check_same(plain[1], fused[1])
    wanted = [note for name, note in FORMS[form] if name != "saved" or options is SAVED]
    notes = report.notes
    assert all(any(n.startswith(w) for n in notes) for w in wanted), notes
    assert bool(wanted) == bool(notes), notes
