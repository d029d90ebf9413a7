"""q/k/v and gate/up, separate on one side and fused on the other."""

import pytest
import torch
import transformers as tf
from sample_graphs import names
from tiny_models import compiled, step, tokens
from vllm_description import Engine, describe_engine
from vllm_pairs import AGREES, engine_graph, rollout, trainer

from jetrl_compile.containment import check_containment
from jetrl_compile.graph_builder import build_precision_graph
from jetrl_compile.precision_graph import PrecisionGraph
from jetrl_compile.report import render
from jetrl_compile.report_sink import collect_reports

# SmolLM2-135M: q has 576 rows, k and v have 192, so that blocks cross both seams.
SMOLLM2 = {
    "hidden": 576,
    "heads": 9,
    "kv_heads": 3,
    "head_dim": 64,
    "intermediate": 1536,
    "vocabulary": 256,
}


def smollm2(**variant: object) -> PrecisionGraph:
    return engine_graph("llama", **{**SMOLLM2, **AGREES, **variant})


def smollm2_trainer() -> PrecisionGraph:
    return trainer(Engine("llama", **SMOLLM2))  # type: ignore[arg-type]


@pytest.mark.parametrize("linear", ["stored", "lowered"])
def test_blocks_that_cross_a_seam_are_named(linear: str) -> None:
    report = check_containment(smollm2(linear=linear), smollm2_trainer())

    # v begins at row 768, which is a multiple of 128.
    assert names(report.differences) == [
        (2, f"model.layers.{layer}.self_attn.{part}_proj:fprop", "params.straddles")
        for layer in (0, 1)
        for part in "qk"
    ]
    reason = "128-row blocks of qkv_proj cross its seam at row 576 in rollout"
    for item in report.differences:
        assert reason in item.message
    text = " ".join(render(report, "text").split())
    assert "2 layers (model.layers.0-1), self_attn.q_proj:fprop" in text
    assert "128-row blocks of qkv_proj cross its seam at row 576" in text
    assert "quantize each part of the fused layer by blocks of its own" in text


@pytest.mark.parametrize("linear", ["stored", "lowered"])
def test_parts_with_blocks_of_their_own_are_contained(linear: str) -> None:
    graph = smollm2(linear=linear, blocks="by_part")

    report = check_containment(graph, smollm2_trainer())

    assert report.contained, report.differences


def test_engine_may_say_that_blocks_are_by_part() -> None:
    """Where the number of scales does not tell: 250 + 250 rows have 4 either way."""
    sizes = {**SMOLLM2, **AGREES, "intermediate": 250, "blocks": "by_part"}
    engine = Engine("llama", **sizes)  # type: ignore[arg-type]
    captured = describe_engine(engine)
    silent = build_precision_graph(captured).graph
    for node in captured.nodes:
        if node.target == "jetrl.dequantize":
            node.attributes = {"blocks_by_part": True}
    told = build_precision_graph(captured).graph

    name = "model.layers.0.mlp.up_proj:fprop"
    assert "straddles" in dict(silent.by_name[name].params)
    assert "straddles" not in dict(told.by_name[name].params)


def test_seams_do_not_matter_without_fp8() -> None:
    graph = smollm2(linear="bf16")
    plain = build_precision_graph(
        describe_engine(
            Engine("llama", linear="bf16", **{**SMOLLM2, **AGREES})  # type: ignore[arg-type]
        )
    ).graph
    assert any("straddles" in dict(op.params) for op in graph.gemms())

    train = smollm2_trainer()
    report = check_containment(plain, train)

    attributes = {item.attribute for item in report.differences}
    assert attributes == {"fp8", "params.straddles"}  # FP8 in the trainer
    both = check_containment(plain, plain)
    assert both.contained


def _phi3(hidden: int, heads: int, kv: int) -> torch.nn.Module:
    config = tf.Phi3Config(
        vocab_size=320,
        hidden_size=hidden,
        intermediate_size=320,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    model: torch.nn.Module = tf.Phi3ForCausalLM(config)
    return model.to(torch.bfloat16).train()


@pytest.mark.parametrize("sizes", [(256, 4, 2), (192, 3, 1)], ids=["even", "odd"])
def test_fused_on_both_sides_is_contained(sizes: tuple[int, int, int]) -> None:
    torch._dynamo.reset()
    model = _phi3(*sizes)
    _, _, (train,) = step(model, tokens(2, 16))
    with collect_reports() as (reports), torch.no_grad():
        compiled(model, phase="rollout")(input_ids=tokens(2, 16), use_cache=False)

    report = check_containment(reports[0].graph, train.graph)

    assert report.contained, report.differences
    assert train.lowered == {"fprop": 7, "dgrad": 7, "wgrad": 7}
    straddles = [op for op in train.graph.gemms() if "straddles" in dict(op.params)]
    assert {op.role for op in straddles} <= {"fprop"}
    # 320 + 320 rows of gate_up_proj always cross; 192 + 64 + 64 of qkv_proj as well.
    assert len(straddles) == (2 if sizes[0] == 256 else 4)


def test_backward_of_a_fused_layer_has_its_parts_names() -> None:
    torch._dynamo.reset()
    _, _, (report,) = step(_phi3(256, 4, 2), tokens(2, 16))
    graph = report.graph

    for role in ("fprop", "dgrad", "wgrad"):
        found = {op.module.rpartition(".")[2] for op in graph.gemms(role)}
        wanted = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}
        assert found == wanted | {"down_proj", "lm_head"}
    rows = {
        op.name.removeprefix("model.layers.0.self_attn."): dict(op.params)["N"]
        for op in graph.gemms()
        if ".self_attn." in op.name and "o_proj" not in op.name
    }
    assert rows == {
        f"{part}_proj:{role}": size
        for role in ("fprop", "wgrad", "dgrad")
        for part, size in (("q", 256), ("k", 128), ("v", 128))
    }
    saved = graph.operands["model.layers.0.self_attn.k_proj:fprop"]["x"].flow
    assert saved.saved_dtype == "e4m3"


def test_engine_of_a_model_with_fused_weights() -> None:
    """vLLM runs Phi-3 as a Llama: its act_fn is the trainer's activation_fn."""
    torch._dynamo.reset()
    _, _, (report,) = step(_phi3(256, 4, 2), tokens(2, 16))
    engine = Engine(
        "llama", layers=1, intermediate=320, vocabulary=320, add_norm="vllm_c"
    )
    graph = rollout(describe_engine(engine))
    eps = {op.name: op.params for op in report.graph.operators if op.kind == "norm"}

    found = check_containment(graph, report.graph)

    different = {item.attribute for item in found.differences}
    assert different <= {"params.eps"}, found.differences
    assert all(dict(params)["eps"] == 1e-5 for params in eps.values())
