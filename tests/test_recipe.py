"""Recipes: which modules patterns match, the registry, and recipes of one's own."""

from dataclasses import FrozenInstanceError, replace

import pytest
from tiny_models import compiled, loss_of, make_model, step, tokens

from jetrl_compile.errors import RecipeError
from jetrl_compile.formats import blocks, groups
from jetrl_compile.recipe import (
    JETRL,
    JETRL_PAPER,
    Recipe,
    compile_pattern,
    get_recipe,
    recipe_names,
    register_recipe,
)
from jetrl_compile.report_sink import collect_reports

LAYERS = [
    f"model.layers.{i}.{name}"
    for i in range(12)
    for name in ("self_attn.q_proj", "mlp.gate", "mlp.gate_up_proj", "mlp.down_proj")
]


@pytest.mark.parametrize(
    ("pattern", "matched", "not_matched"),
    [
        # A substring is no match: the skip list of case 1.
        ("mlp.gate", ["mlp.gate"], ["mlp.gate_up_proj", "layers.0.mlp.gate"]),
        ("**.mlp.gate", ["model.layers.0.mlp.gate", "mlp.gate"], LAYERS[2:3]),
        ("*.mlp.gate", ["0.mlp.gate"], ["layers.0.mlp.gate", "mlp.gate"]),
        ("model.layers.1.**", LAYERS[4:8], [*LAYERS[40:48], "model.layers.1"]),
        ("model.layers.?.mlp.*", [LAYERS[1], LAYERS[2]], LAYERS[41:43]),
        ("model.**.q_proj", ["model.q_proj", LAYERS[0]], ["model.q_proj.lora"]),
        ("**", LAYERS, [""]),
        ("lm_head", ["lm_head"], ["lm_headx", "xlm_head", "model.lm_head", "lm-head"]),
        ("a.b+(c)[d]", ["a.b+(c)[d]"], ["a.bb(c)d", "axb+(c)[d]"]),
    ],
)
def test_patterns(pattern: str, matched: list[str], not_matched: list[str]) -> None:
    regex = compile_pattern(pattern)
    assert [name for name in matched if not regex.fullmatch(name)] == []
    assert [name for name in not_matched if regex.fullmatch(name)] == []


@pytest.mark.parametrize("pattern", ["", ".", "a..b", "a.", ".a"])
def test_patterns_with_empty_parts(pattern: str) -> None:
    with pytest.raises(RecipeError, match="empty"):
        replace(JETRL, name="bad", exclude=(pattern,))


def test_a_single_string_is_no_list_of_patterns() -> None:
    with pytest.raises(RecipeError, match=r"exclude='lm_head' .* \('lm_head',\)"):
        replace(JETRL, name="bad", exclude="lm_head")  # type: ignore[arg-type]


def test_pattern_that_matches_nothing_lists_near_names() -> None:
    recipe = replace(JETRL, name="typo", exclude=("model.layers.3.mlp.down_porj",))
    with pytest.raises(RecipeError, match=r"near names: model\.layers\.3\.mlp\.down_p"):
        recipe.check_patterns(LAYERS)
    recipe = replace(JETRL, name="typo", include=("zzz",))
    with pytest.raises(RecipeError, match="matches none of the model's 48 linear"):
        recipe.check_patterns(LAYERS)
    assert recipe.unmatched(LAYERS) == ("zzz",)


def test_reasons() -> None:
    recipe = replace(JETRL, name="mine", include=("lm_head",), exclude=("a.**",))
    assert recipe.reason_to_keep("lm_head", "lm_head", "train") is None
    assert recipe.reason_to_keep("b.gate", "router", "train") == (
        "recipe mine keeps the role router in high precision"
    )
    assert recipe.reason_to_keep("a.b", "linear", "train") == (
        "recipe mine excludes 'a.**'"
    )
    both = replace(recipe, include=("a.b",))
    assert both.reason_to_keep("a.b", "linear", "train") is not None, "exclude wins"
    with pytest.raises(RecipeError, match="phase 'eval' is unknown"):
        recipe.quantizes("eval")


def test_recipes_are_frozen_and_hashable() -> None:
    with pytest.raises(FrozenInstanceError):
        JETRL.name = "other"  # type: ignore[misc]
    assert len({JETRL, JETRL_PAPER, replace(JETRL)}) == 2


def test_registry() -> None:
    assert recipe_names()[:5] == (
        "jetrl",
        "jetrl_paper",
        "rollout_only",
        "bf16",
        "jetrl_ue8m0",
    )
    assert get_recipe("jetrl") is JETRL
    assert register_recipe(replace(JETRL)) == JETRL, "the same once more is no clash"
    with pytest.raises(RecipeError, match="a different recipe named 'jetrl'"):
        register_recipe(replace(JETRL, exclude=("a",)))
    with pytest.raises(RecipeError, match="did you mean 'jetrl_paper'"):
        get_recipe("jetrl_papr")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"saved_x": "bf16"}, "saved_x 'bf16' is unknown"),
        ({"fprop_x": groups("M")}, "fprop.x has the flow .* needed is .* along K"),
        ({"wgrad_dy": groups("M", "e8")}, "scale format 'e8'; use one of fp32, ue8m0"),
    ],
)
def test_flows_that_cannot_be(change: dict[str, object], message: str) -> None:
    assert JETRL.flows is not None
    with pytest.raises(RecipeError, match=message):
        replace(JETRL.flows, **change)  # type: ignore[arg-type]


def test_names_and_flows_must_fit() -> None:
    with pytest.raises(RecipeError, match="quantizes but has no flows"):
        Recipe("mine", train=True)
    with pytest.raises(RecipeError, match="choose another name"):
        Recipe("my recipe")


@pytest.mark.usefixtures("fresh_dynamo")
def test_first_and_last_layers_in_bf16_and_the_head_in_fp8() -> None:
    assert JETRL.flows is not None
    mine = register_recipe(
        replace(
            JETRL,
            name="middle_and_head",
            flows=replace(JETRL.flows, dgrad_dy=blocks("N")),
            include=("lm_head",),
            exclude=("model.layers.0.**", "model.layers.2.**"),
        )
    )
    model, ids = make_model("llama", num_hidden_layers=3), tokens(1, 24)
    _, grads, (report,) = step(model, ids, recipe=mine.name)
    fp8 = {op.module for op in report.graph.gemms("fprop") if report.graph.is_fp8(op)}
    names = {name for name in grads if name.startswith("model.layers.1.")}
    middle = {name.removesuffix(".weight") for name in names if "norm" not in name}
    assert fp8 == {"lm_head", *middle}
    assert len(report.kept) == 3 * 14
    dgrad = report.graph.operands["lm_head:dgrad"]
    assert dgrad["dy"].flow == blocks("N")
    with collect_reports() as reports:
        loss_of(compiled(model, recipe=mine, phase="rollout"), ids)
    assert reports[0].lowered["fprop"] == 8
