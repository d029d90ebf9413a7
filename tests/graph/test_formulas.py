"""What parameters do not say: formulas of operators, and GEMMs of computed weights."""

from collections.abc import Callable

import pytest
import torch
from tiny_models import compiled, make_mlp
from torch import Tensor, nn

from jetrl_compile.containment import check_containment
from jetrl_compile.precision_graph import PrecisionGraph
from jetrl_compile.report_sink import collect_reports


def graph_of(function: Callable[..., Tensor], *inputs: Tensor) -> PrecisionGraph:
    torch._dynamo.reset()
    with collect_reports() as reports, torch.no_grad():
        compiled(function)(*inputs)
    return reports[0].graph


class Block(nn.Module):
    """A linear layer, and something after it."""

    def __init__(self, after: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.proj = nn.Linear(128, 128, bias=False)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.after(self.proj(x))
        return result


class Scaled(nn.Module):
    def __init__(self, a: float, b: float) -> None:
        super().__init__()
        self.a, self.b = a, b

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.a + self.b).tanh()


class Centred(nn.Module):
    def __init__(self, centre: bool) -> None:
        super().__init__()
        self.centre = centre

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.centre else x
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Half(nn.Module):
    def __init__(self, low: int) -> None:
        super().__init__()
        self.low = low

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.low : self.low + 64] * 2


class TopK(nn.Module):
    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1).topk(self.k, dim=-1)[0].sum(-1)


PAIRS: dict[str, tuple[nn.Module, nn.Module]] = {
    "gelu": (nn.GELU(), nn.GELU(approximate="tanh")),
    "constant": (Scaled(2, 1), Scaled(3, 1)),
    "norm": (Centred(False), Centred(True)),
    "half": (Half(0), Half(64)),
    "top-k": (TopK(2), TopK(3)),
    "softmax": (nn.Softmax(dim=-1), nn.Softmax(dim=0)),
}


@pytest.mark.parametrize("name", list(PAIRS))
def test_other_functions_are_not_contained(name: str) -> None:
    x = torch.randn(8, 128).to(torch.bfloat16)
    left, right = (graph_of(Block(a).to(torch.bfloat16), x) for a in PAIRS[name])
    report = check_containment(left, right)
    assert report.contained is False
    assert {d.level for d in report.differences} <= {1, 2}
    assert check_containment(left, left).contained


def test_formulas_are_those_of_training_whatever_the_length() -> None:
    model = make_mlp()
    torch._dynamo.reset()
    with collect_reports() as reports:
        train = compiled(model)
        train(torch.randn(64, 192).to(torch.bfloat16)).sum().backward()
        with torch.no_grad():
            compiled(model)(torch.randn(1, 192).to(torch.bfloat16))
    forward, inference = (r.graph.forward() for r in reports[:2])
    formulas = {op.name: op.formula for op in inference.operators if op.formula}
    assert formulas
    assert formulas.items() <= {o.name: o.formula for o in forward.operators}.items()


class Computed(nn.Module):
    """Linear layers whose weights are made of parameters."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.w = nn.Parameter(torch.randn(128, 128))
        self.g = nn.Parameter(torch.ones(128, 1))
        self.a = nn.Parameter(torch.randn(8, 128))
        self.b = nn.Parameter(torch.randn(128, 8))

    def forward(self, x: Tensor) -> Tensor:
        weights = {
            "scaled": lambda: self.w * self.g,
            "joined": lambda: torch.cat([self.w, self.a]),
            "merged adapter": lambda: self.w + self.b @ self.a,
            "part": lambda: self.w[:64],
        }
        return nn.functional.linear(x, weights[self.kind]())


@pytest.mark.parametrize("kind", ["scaled", "joined", "merged adapter", "part"])
def test_gemms_of_computed_weights_are_listed(kind: str) -> None:
    model = Computed(kind).to(torch.bfloat16)
    x = torch.randn(8, 128).to(torch.bfloat16)
    with torch.no_grad():
        wanted = model(x)
    graph = graph_of(model, x)
    kept = graph.high_precision_gemms()
    assert {op.kind for op in kept} == {"other_gemm"}
    assert len(kept) == (2 if kind == "merged adapter" else 1)
    assert all("no stored codes" in op.reason for op in kept)
    assert not any(map(graph.is_fp8, graph.gemms()))
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(compiled(model)(x), wanted)


def test_embeddings_are_no_computed_weights() -> None:
    """What tokens choose of a table is an activation."""
    model = nn.Sequential(nn.Embedding(64, 128), nn.Linear(128, 96, bias=False))
    model = model.to(torch.bfloat16)
    graph = graph_of(model, torch.randint(64, (2, 8)))
    assert [graph.is_fp8(op) for op in graph.gemms("fprop")] == [True]
