"""Levels 1 to 4 on live pairs: each planted fault is named, at its edge."""

from typing import Any

import pytest
import torch
from test_rollout import step, tiny_llama
from torch import nn

from jetrl_compile.audit import audit
from jetrl_compile.errors import LoweringError
from jetrl_compile.layers import compile_layers, decoder_layers
from jetrl_compile.recipe import JETRL, Recipe
from jetrl_compile.report_sink import check_phases, collect_reports
from jetrl_compile.rollout import QuantizedLinear, make_rollout_model, refit

TOKENS = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(0))
STATUS = dict[int, str]
# Dynamo looks at .grad of the activations between layers.
IGNORE_GRAD = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def levels(trainer: nn.Module, rollout: nn.Module, **more: Any) -> STATUS:
    found = audit(trainer, rollout, TOKENS, **more)
    return {level.level: level.status for level in found.report.levels}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("masters", [torch.bfloat16, torch.float32])
def test_a_sound_pair_passes_all_levels_before_and_after_a_step(
    masters: torch.dtype,
) -> None:
    trainer = tiny_llama().to(torch.bfloat16).to(masters).eval()
    rollout: Any = make_rollout_model(trainer)
    passed = dict.fromkeys((1, 2, 3, 4), "passed")
    if masters is torch.float32:
        # FP32 norms and residuals in the trainer, BF16 in the rollout: told apart.
        found = audit(trainer, rollout, TOKENS).report
        assert found.level(1).status == "passed"
        assert found.level(2).status == "failed"
        assert "dtype" in {d.attribute for d in found.differences if d.level == 2}
        assert found.level(3).status == "passed"
        return
    assert levels(trainer, rollout) == passed
    step(trainer, TOKENS)
    stale = audit(trainer, rollout, TOKENS).report
    assert stale.level(2).status == "passed"
    assert stale.level(3).status == "failed"
    assert stale.level(4).status == "failed"
    refit(rollout, trainer.named_parameters())
    assert levels(trainer, rollout) == passed


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_flipped_bit_is_named_at_its_edge() -> None:
    trainer = tiny_llama().to(torch.bfloat16).eval()
    rollout: Any = make_rollout_model(trainer)
    layer = rollout.get_submodule("model.layers.1.mlp.up_proj")
    assert isinstance(layer, QuantizedLinear)
    layer.weight.view(torch.uint8)[3, 5] ^= 64
    report = audit(trainer, rollout, TOKENS).report
    assert report.contained is False
    four = next(d for d in report.differences if d.level == 4)
    assert four.name == "model.layers.1.mlp.up_proj:fprop.w"
    edge = "model.layers.1.mlp.up_proj.weight -> model.layers.1.mlp.up_proj:fprop.w"
    assert edge in four.message


@pytest.mark.usefixtures("fresh_dynamo")
def test_another_eps_is_named_where_values_part() -> None:
    trainer = tiny_llama().to(torch.bfloat16).eval()
    rollout: Any = make_rollout_model(trainer)
    rollout.get_submodule("model.layers.1.input_layernorm").variance_epsilon = 1e-2
    report = audit(trainer, rollout, TOKENS).report
    two = [d for d in report.differences if d.level == 2]
    assert [(d.operator, d.attribute) for d in two] == [
        ("model.layers.1.input_layernorm:norm", "params.eps")
    ]
    four = next(d for d in report.differences if d.level == 4)
    assert "at edge model.layers.1.input_layernorm:norm -> " in four.message


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_fault_outside_the_decoder_layers_is_named() -> None:
    trainer = tiny_llama().to(torch.bfloat16).eval()
    rollout: Any = make_rollout_model(trainer)
    with torch.no_grad():
        rollout.get_submodule("model.norm").weight[0] += 1
    report = audit(trainer, rollout, TOKENS).report
    four = next(d for d in report.differences if d.level == 4)
    assert "model.norm.weight -> model.norm:norm.weight" in four.message


@pytest.mark.usefixtures("fresh_dynamo")
def test_rollout_only_fails_and_a_tolerance_passes_level_4() -> None:
    trainer = tiny_llama().to(torch.bfloat16).eval()
    rollout: Any = make_rollout_model(trainer, "rollout_only")
    assert levels(trainer, rollout, recipe="rollout_only") == {
        1: "failed",
        2: "passed",
        3: "passed",
        4: "failed",
    }
    loose = levels(trainer, rollout, recipe="rollout_only", tolerance=10.0)
    assert loose[4] == "passed"


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_recipe_that_names_the_head_is_audited_whole() -> None:
    recipe = Recipe(
        "with_head", JETRL.flows, train=True, rollout=True, include=("lm_head",)
    )
    trainer = tiny_llama(tie_word_embeddings=True).to(torch.bfloat16).eval()
    rollout: Any = make_rollout_model(trainer, recipe)
    assert isinstance(rollout.get_submodule("lm_head"), QuantizedLinear)
    table = rollout.get_submodule("model.embed_tokens")
    assert table.weight.dtype == torch.bfloat16, "case 7: the embedding reads BF16"
    passed = dict.fromkeys((1, 2, 3, 4), "passed")
    assert levels(trainer, rollout, recipe=recipe) == passed


@IGNORE_GRAD
@pytest.mark.usefixtures("fresh_dynamo")
def test_layers_share_a_graph_unless_the_recipe_tells_them_apart() -> None:
    model = tiny_llama().to(torch.bfloat16)
    with collect_reports() as reports:
        shared = compile_layers(model, lowering="aot")
        model(input_ids=TOKENS, use_cache=False).logits.sum().backward()
    assert set(shared.values()) == {"model.layers.0"}
    assert [r.lowered for r in reports] == [{"fprop": 7, "dgrad": 7, "wgrad": 7}]

    torch._dynamo.reset()
    ends = Recipe(
        "last_in_bf16",
        JETRL.flows,
        train=True,
        rollout=True,
        exclude=("model.layers.1.**",),
    )
    other = tiny_llama().to(torch.bfloat16)
    with collect_reports() as reports:
        apart = compile_layers(other, lowering="aot", recipe=ends)
        other(input_ids=TOKENS, use_cache=False).logits.sum().backward()
    assert set(apart.values()) == {"model.layers.0", "model.layers.1"}
    assert [r.lowered["fprop"] for r in reports] == [7, 0]


@IGNORE_GRAD
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_phase_without_fp8_is_an_error_that_names_the_layers() -> None:
    model = tiny_llama().to(torch.bfloat16)
    with collect_reports() as reports:
        compile_layers(model, lowering="aot")
        with torch.no_grad():
            model(input_ids=TOKENS, use_cache=False)
        compile_layers(model, lowering="aot", recipe="bf16")
        model(input_ids=TOKENS, use_cache=False)
    message = (
        r"7 layers are FP8 in train/inference but not in train/training: model\.lay"
    )
    with pytest.raises(LoweringError, match=message):
        check_phases(reports)
    check_phases(reports[:1])


def test_decoder_layers_are_found() -> None:
    assert list(decoder_layers(tiny_llama())) == ["model.layers.0", "model.layers.1"]
