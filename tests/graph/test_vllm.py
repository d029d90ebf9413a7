"""vLLM's graphs against the trainer's graph of the same Hugging Face config."""

from collections import Counter
from dataclasses import replace

import pytest
from graph_coverage import uncovered
from make_vllm_fixture import ENGINES, FIXTURES, fixture_text
from sample_graphs import names
from vllm_description import Engine, describe_engine
from vllm_pairs import AGREES, MODELS, engine_graph, trainer

from jetrl_compile.capture_json import read_captured
from jetrl_compile.containment import check_containment
from jetrl_compile.graph_builder import build_precision_graph


@pytest.mark.parametrize("name", ENGINES)
def test_fixtures_are_the_described_graphs(name: str) -> None:
    text = (FIXTURES / f"{name}.json").read_text()

    assert text == fixture_text(name), "run tests/make_vllm_fixture.py"
    captured = read_captured(FIXTURES / f"{name}.json")
    assert captured.graph == describe_engine(ENGINES[name])
    assert "no capture" in captured.meta["origin"]


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"add_norm": "vllm_c_in_place"},
        {"add_norm": "own"},
        {"linear": "lowered"},
        {"attention": "functionalized"},
        {"attention": "returning"},
        {"activation": "opaque"},
        {"head": "bf16"},
    ],
    ids=lambda variant: "-".join(variant.values()) or "default",
)
@pytest.mark.parametrize("model", MODELS)
def test_contained_where_numerics_agree(model: str, variant: dict[str, str]) -> None:
    graph = engine_graph(model, **{**AGREES, **variant})

    report = check_containment(graph, trainer(Engine(model)))

    assert report.contained, report.differences
    assert report.counts["GEMMs compared"] == 14 + ("head" in variant)
    assert report.counts["FP8 GEMMs in rollout"] == 14
    assert not graph.unknown()


@pytest.mark.parametrize("model", MODELS)
def test_native_residual_sum_is_named(model: str) -> None:
    report = check_containment(engine_graph(model), trainer(Engine(model)))

    norms = [
        "model.layers.0.post_attention_layernorm",
        "model.layers.1.input_layernorm",
        "model.layers.1.post_attention_layernorm",
        "model.norm",
    ]
    assert names(report.differences) == [(2, f"{n}:norm.x", "dtype") for n in norms]
    values = {(item.rollout, item.train) for item in report.differences}
    assert values == {("fp32", "bf16")}


@pytest.mark.parametrize("rope", ["in_place", "functionalized"])
def test_opaque_rotary_embedding_is_named(rope: str) -> None:
    for model in MODELS:
        graph = engine_graph(model, rope=rope, **AGREES)
        report = check_containment(graph, trainer(Engine(model)))
        wanted = [
            (2, f"model.layers.{layer}.self_attn:rope.{part}", "compute_dtype")
            for layer in (0, 1)
            for part in "qk"
        ]
        assert names(report.differences) == wanted


def test_fp32_rope_table_is_named() -> None:
    graph = engine_graph("llama", table_dtype="fp32", **AGREES)

    report = check_containment(graph, trainer(Engine("llama")))

    found = Counter((item.operand, item.attribute) for item in report.differences)
    assert found == {
        ("", "compute_dtype"): 4,
        ("cos", "dtype"): 4,
        ("sin", "dtype"): 4,
    }
    assert all(":rope." in item.operator for item in report.differences)


def test_unrounded_silu_is_named() -> None:
    graph = engine_graph("qwen2", activation="fp32", **AGREES)

    report = check_containment(graph, trainer(Engine("qwen2")))

    where = [f"model.layers.{i}.mlp.act_fn:activation" for i in (0, 1)]
    assert names(report.differences) == [(2, name, "params.rounded") for name in where]


def test_fp32_norm_weights_are_named() -> None:
    graph = engine_graph("llama", norm_weight_dtype="fp32", **AGREES)

    report = check_containment(graph, trainer(Engine("llama")))

    found = Counter((item.operand, item.attribute) for item in report.differences)
    assert found == {("", "params.rounded"): 5, ("weight", "dtype"): 5}


def test_fp32_logits_are_named() -> None:
    graph = engine_graph("qwen3", head="fp32", **AGREES)

    report = check_containment(graph, trainer(Engine("qwen3")))

    assert names(report.differences) == [(2, "output.out.0", "dtype")]


def test_scale_that_the_engine_does_not_tell_is_a_note() -> None:
    train = trainer(Engine("qwen3"))

    report = check_containment(engine_graph("qwen3", scale=False, **AGREES), train)

    assert report.contained
    noted = [note for note in report.notes if note.attribute == "params.scale"]
    assert [note.operator for note in noted] == [
        f"model.layers.{i}.self_attn:attention" for i in (0, 1)
    ]
    wrong = engine_graph("qwen3", head_dim=64, **AGREES)
    operators = tuple(
        replace(op, params=(("scale", 0.1),)) if op.kind == "attention" else op
        for op in wrong.operators
    )
    report = check_containment(replace(wrong, operators=operators), train)
    assert [item.attribute for item in report.differences] == ["params.scale"] * 2


def test_sum_of_an_unknown_implementation_is_never_taken_as_equal() -> None:
    graph = engine_graph("qwen3", add_norm="silent")

    report = check_containment(graph, trainer(Engine("qwen3")))

    assert {item.rollout for item in report.differences} == {"unknown"}
    assert len(report.differences) == 4


@pytest.mark.parametrize("model", MODELS)
def test_every_training_operator_has_its_counterpart(model: str) -> None:
    """The other direction: what vLLM lacks is what it does not run."""
    train = trainer(Engine(model)).forward()
    graph = engine_graph(model, head="bf16", **AGREES)

    missing = [op for op in train.operators if op.name not in graph.by_name]

    assert {op.kind for op in missing} <= {"index", "parameter"}
    parameters = [op.name for op in missing if op.kind == "parameter"]
    assert parameters == ["model.rotary_emb.inv_freq"]


def test_bf16_rollout_is_a_level_1_difference() -> None:
    graph = build_precision_graph(describe_engine(Engine("llama", linear="bf16"))).graph

    report = check_containment(graph, trainer(Engine("llama")))

    fp8 = [item for item in report.differences if item.attribute == "fp8"]
    assert len(fp8) == 14
    assert {(item.level, item.rollout, item.train) for item in fp8} == {
        (1, "bf16", "e4m3")
    }


def test_stored_codes_tell_how_they_were_made() -> None:
    engine = Engine("llama", linear="lowered", **AGREES)  # type: ignore[arg-type]
    captured = describe_engine(engine)
    for node in captured.nodes:
        if node.module.endswith("gate_up_proj.weight"):
            node.attributes = {"scale_format": "ue8m0", "source_dtype": "fp32"}

    report = check_containment(
        build_precision_graph(captured).graph, trainer(Engine("llama"))
    )

    found = Counter(item.attribute for item in report.differences)
    assert found == {"scale_format": 4, "source_dtype": 4}


@pytest.mark.parametrize("rope", ["native", "in_place", "functionalized"])
@pytest.mark.parametrize("attention", ["in_place", "functionalized", "returning"])
def test_nothing_is_dropped(rope: str, attention: str) -> None:
    for activation in ("native", "opaque", "fp32"):
        for add_norm in ("native", "vllm_c_in_place"):
            engine = Engine(
                rope=rope, attention=attention, activation=activation, add_norm=add_norm
            )
            captured = describe_engine(engine)
            assert not uncovered(captured)
            graph = build_precision_graph(captured).graph
            assert not graph.unknown()
            assert str(graph) == str(build_precision_graph(captured).graph)
