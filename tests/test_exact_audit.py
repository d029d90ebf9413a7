"""`jetrl audit --exact`, and spoilers: each is named in the graph and in bits."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_models import make_pair, make_trainer
from torch import Tensor, nn
from typer.testing import CliRunner

from jetrl_compile import exact_attention
from jetrl_compile.audit import Audit, audit
from jetrl_compile.cli import app
from jetrl_compile.decode_audit import Call, Decoded, parting
from jetrl_compile.kernels import attention_kernels, reference_exact
from jetrl_compile.precision_graph import Operator, make_graph
from jetrl_compile.rollout import make_rollout_model

PLANTS: Any = importlib.import_module("exact_plants")  # of benchmarks
TOKENS = torch.randint(256, (2, 14), generator=torch.Generator().manual_seed(0))
MANY = torch.randint(256, (16, 40), generator=torch.Generator().manual_seed(0))
pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


def test_an_exact_pair_has_equal_bits_with_padding_too() -> None:
    trainer, rollout = make_pair("qwen3")
    mask = torch.ones_like(TOKENS)
    mask[0, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found = audit(
        trainer,
        rollout,
        TOKENS,
        attention_mask=mask,
        position_ids=positions,
        exact=True,
    )
    assert found.report.contained, found.report.differences
    assert {level.status for level in found.report.levels} == {"passed"}
    assert found.equal == 1.0
    assert found.report.strict


class WideHead(nn.Module):
    """A head by another kernel than the exact one."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.weight = head.weight

    def forward(self, x: Tensor) -> Tensor:
        wide = nn.functional.linear(x.float(), self.weight.float())
        result: Tensor = wide.to(x.dtype)
        return result


def another_norm(_: Any, rollout: Any) -> None:
    layer = rollout.get_submodule("model.layers.1")
    layer.input_layernorm = PLANTS.OtherNorm(layer.input_layernorm)


def another_head(trainer: Any, _: Any) -> None:
    trainer.lm_head = WideHead(trainer.lm_head)


def a_wide_residual(_: Any, rollout: Any) -> None:
    layers = rollout.get_submodule("model").layers
    layers[1] = PLANTS.WideLayer(layers[1])


def sdpa_in_the_trainer(trainer: Any, _: Any) -> None:
    trainer.set_attn_implementation("sdpa")


SPOILERS: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "norm": (another_norm, "model.layers.1.input_layernorm:norm"),
    "head": (another_head, "lm_head:fprop"),
    "residual": (a_wide_residual, "model.layers.1.self_attn.o_proj:residual_add"),
    "sdpa": (sdpa_in_the_trainer, "model.layers.0.self_attn:attention"),
}


def named(found: Audit, level: int) -> list[str]:
    return [d.operator for d in found.report.differences if d.level == level]


@pytest.mark.parametrize("name", SPOILERS)
def test_a_spoiler_fails_in_the_graph_and_in_bits(name: str) -> None:
    plant, operator = SPOILERS[name]
    trainer = make_trainer("qwen3")
    rollout = make_rollout_model(trainer)
    plant(trainer, rollout)
    # Of an output head's results, one BF16 number in 10,000 is another one.
    tokens = MANY if name == "head" else TOKENS
    found = audit(trainer, rollout, tokens, exact=True)
    assert found.report.contained is False
    assert operator in named(found, 2), "the graph names it"
    assert named(found, 4) == [operator], found.report.differences[-1].message
    assert found.equal < 1.0
    message = found.report.differences[-1].message
    assert "log-probs are equal in bits; those of token" in message


@pytest.fixture(name="two_splits")
def _two_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps of a rollout model run an attention that splits its keys."""
    name = "reference_two_splits"
    plain = attention_kernels.attention

    def split(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        positions: Any,
        scale: float,
        how: Any,
    ) -> tuple[Tensor, Tensor]:
        if how != name:
            return plain(q, k, v, mask, positions, scale, how)
        if q.shape[2] > 1 or k.shape[2] < 2:
            return plain(q, k, v, mask, positions, scale, "reference")
        half = k.shape[2] // 2
        parts = [
            reference_exact.attention(q, k[:, :, at], v[:, :, at], None, None, scale)
            for at in (slice(half), slice(half, None))
        ]
        lse = torch.stack([part[1] for part in parts])
        share = lse.softmax(0).transpose(-1, -2).unsqueeze(-1)
        out = sum(s * p[0].float() for s, p in zip(share, parts, strict=True))
        assert isinstance(out, Tensor)
        return out.to(q.dtype), lse.logsumexp(0)

    monkeypatch.setattr(
        attention_kernels, "KERNELS", (*attention_kernels.KERNELS, name)
    )
    monkeypatch.setattr(attention_kernels, "attention", split)
    monkeypatch.setattr(
        exact_attention,
        "attention_kernel",
        lambda *_: "reference" if torch.is_grad_enabled() else name,
    )


@pytest.mark.usefixtures("two_splits")
def test_two_splits_in_decode_fail_in_the_graph_and_in_bits() -> None:
    trainer, rollout = make_pair("qwen3")
    found = audit(trainer, rollout, TOKENS, exact=True)
    operator = "model.layers.0.self_attn:attention"
    assert operator in named(found, 2)
    assert named(found, 4) == [operator]
    kernels = [d.rollout for d in found.report.differences if d.operator == operator]
    assert kernels[0] == "jetrl.attention.reference_two_splits"
    assert 0.4 < found.equal < 1.0, "the prompt's half is as it should be"


def test_where_bits_part() -> None:
    graph = make_graph([Operator("a:norm", "norm"), Operator("b:rope", "rope")], [])
    train = {"a:norm": torch.zeros(2, 3, 4), "b:rope": torch.zeros(2, 5, 3, 4)}
    logits = torch.zeros(2, 3, 8)
    values = {"a:norm": torch.zeros(2, 4), "b:rope": torch.zeros(2, 5, 1, 4)}
    differs = torch.zeros(2, 2, dtype=torch.bool)
    decoded = Decoded(logits, (Call(0, 1, {}), Call(1, 2, values), Call(2, 3, {})))
    assert parting(decoded, graph, train, differs) is None
    differs[1, 1] = True
    found = parting(decoded, graph, train, differs)
    assert found is not None
    assert (found.row, found.token, found.operator) == (1, 1, None)
    values["b:rope"][1, 2] = 1.0
    found = parting(decoded, graph, train, differs)
    assert found is not None
    assert found.operator == "b:rope"
    values["a:norm"][1] = 1.0
    found = parting(decoded, graph, train, differs)
    assert found is not None
    assert found.operator == "a:norm"


def test_command(tmp_path: Path) -> None:
    make_trainer(attention=False).save_pretrained(tmp_path)
    command = ["audit", str(tmp_path), "--exact", "--length", "9", "--sequences", "1"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "100.00% of log-probs are equal in bits" in result.output
