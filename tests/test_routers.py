"""Routers and output heads stay in high precision by what they do (case 8)."""

from dataclasses import replace

import pytest
import torch
from tiny_models import IGNORE_LRU_CACHE, Mlp, activations, backward, compiled, tokens
from torch import Tensor, nn

from jetrl_compile.recipe import JETRL
from jetrl_compile.report_sink import collect_reports

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), IGNORE_LRU_CACHE]


class Experts(nn.Module):
    """A sparse MLP that weighs every expert's output, zero for those not chosen."""

    def __init__(self, name: str, scoring: str, top: int = 2) -> None:
        super().__init__()
        self.router_name, self.scoring, self.top = name, scoring, top
        owner: nn.Module = self
        *parents, leaf = name.split(".")
        for parent in parents:
            owner.add_module(parent, nn.Module())
            owner = owner.get_submodule(parent)
        owner.add_module(leaf, nn.Linear(128, 4, bias=False))
        self.gate_up_proj = nn.Linear(128, 256, bias=False)
        self.experts = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.get_submodule(self.router_name)(x)
        if self.scoring == "sigmoid":  # DeepSeek-V3: a bias for the choice alone
            scores = logits.float().sigmoid()
            chosen = (scores + 0.1).topk(self.top, -1).indices
        elif self.scoring == "topk_then_softmax":
            values, chosen = logits.topk(self.top, -1)
            scores = torch.zeros_like(logits.float()).scatter(
                -1, chosen, values.float().softmax(-1)
            )
        elif self.scoring == "sort":
            scores = logits.float().softmax(-1)
            chosen = scores.sort(-1, descending=True).indices[..., : self.top]
        else:
            scores = logits.float().softmax(-1)
            chosen = scores.topk(self.top, -1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        weights = (scores * mask).to(x.dtype)
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        x = nn.functional.silu(gate) * up
        parts = torch.stack([expert(x) for expert in self.experts], -1)
        weighted: Tensor = parts * weights.unsqueeze(-2)
        return weighted.sum(-1)


@pytest.mark.parametrize("name", ["gate", "router", "gate.wg", "mlp.gate", "x7"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "topk_then_softmax", "sort"])
def test_router_is_told_by_its_choice(name: str, scoring: str) -> None:
    torch.manual_seed(0)
    model = Experts(name, scoring).to(torch.bfloat16)
    with collect_reports() as reports:
        backward(compiled(model)(activations(8, 128)))
    (report,) = reports
    # Only the router; `mlp.gate` must not drag `gate_up_proj` along.
    assert {op.module for op in report.kept} == {name}
    assert {op.reason for op in report.kept} == {
        "recipe jetrl keeps the role router in high precision"
    }
    # The fused layer counts as the two that it holds.
    assert report.lowered == {"fprop": 6, "dgrad": 6, "wgrad": 6}


def test_recipe_may_name_a_router() -> None:
    model = Experts("gate", "softmax").to(torch.bfloat16)
    recipe = replace(JETRL, name="with_router", include=("gate",))
    with collect_reports() as reports:
        compiled(model, recipe=recipe)(activations(8, 128))
    assert reports[0].lowered["fprop"] == 7


def test_gates_of_an_mlp_are_no_routers() -> None:
    # A gate that multiplies chooses no experts.
    model = nn.Sequential(nn.Linear(128, 128), nn.Sigmoid(), nn.Linear(128, 128)).to(
        torch.bfloat16
    )
    with collect_reports() as reports:
        compiled(model)(activations(8, 128))
    assert reports[0].kept == []


class Reader(nn.Module):
    """A language model whose parts have names of their own."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 192)
        self.body = Mlp(192, rows)  # gate and up make as many numbers as there are rows
        self.last = nn.Linear(192, rows, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.last(self.body(self.table(ids)))
        return logits.float().div(30).tanh() * 30


def test_output_head_is_told_by_the_vocabulary() -> None:
    model = Reader(320).to(torch.bfloat16)
    with collect_reports() as reports:
        backward(compiled(model)(tokens()))
    (report,) = reports
    assert {op.module: op.reason for op in report.kept} == {
        "last": "recipe jetrl keeps the role lm_head in high precision"
    }
    assert report.lowered == {"fprop": 3, "dgrad": 3, "wgrad": 3}
    named = replace(JETRL, name="with_readout", include=("last",))
    with collect_reports() as reports:
        compiled(model, recipe=named)(tokens())
    assert reports[0].kept == []
