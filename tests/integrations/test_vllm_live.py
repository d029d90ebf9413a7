"""The integration with vLLM on a model of vLLM's shape: graph, bytes, refit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm_engine_model import EngineModel, make_trainer

from jetrl_compile.containment import check_containment
from jetrl_compile.differences import Difference
from jetrl_compile.errors import LoweringError, ModelError, RefitError
from jetrl_compile.integrations.vllm import refit, storage
from jetrl_compile.integrations.vllm.live_bytes import check_live_bytes
from jetrl_compile.integrations.vllm.live_graph import LiveGraph, compare_pieces
from jetrl_compile.integrations.vllm.live_graph import trace_live as trace
from jetrl_compile.integrations.vllm.live_model import (
    attention_facts,
    config_of,
    head_shapes,
)
from jetrl_compile.integrations.vllm.refit import refit_model
from jetrl_compile.precision_graph import PrecisionGraph
from jetrl_compile.tracing import trace_model

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
KINDS = ("qwen3", "llama", "qwen2")
# Parts that are no multiples of 128 rows, and an output head that is the embedding.
UNEVEN = {
    "hidden_size": 192,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 320,
    "tie_word_embeddings": True,
}


engine_model: Any = EngineModel


def trace_live(model: Any) -> LiveGraph:
    config = config_of(model)
    return trace(
        model,
        config.settings(),
        fused=config.fused,
        reports=config.reports,
        attributes=attention_facts(model),
        whole=head_shapes(model) or None,
    )


def differences(model: Any, trainer: nn.Module) -> list[Difference]:
    live = trace_live(model).graph
    return list(check_containment(live, trace_model(trainer)).differences)


@pytest.mark.parametrize("tied", [False, True])
def test_a_padded_vocabulary_is_contained(tied: bool) -> None:
    trainer = make_trainer("qwen3", vocab_size=260, tie_word_embeddings=tied)
    model = engine_model(trainer, pad=64)
    assert model.lm_head.weight.shape[0] == 320
    assert not differences(model, trainer)
    assert not check_live_bytes(model, weights(trainer))[1]
    assert refit_model(model, weights(trainer)) > 0
    assert differences(model, make_trainer("qwen3", vocab_size=264))


def weights(trainer: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.named_parameters()}


def logits(model: Any, tokens: int = 16) -> Tensor:
    ids = torch.arange(tokens) * 7 % 256
    config_of(model).state.check()
    with torch.no_grad():
        made: Tensor = model.compute_logits(model(ids, torch.arange(tokens)))
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [{}, UNEVEN], ids=["even", "uneven"])
def test_levels_1_to_3(kind: str, sizes: dict[str, Any]) -> None:
    trainer = make_trainer(kind, **sizes)
    model = engine_model(trainer)
    live = trace_live(model)
    report = check_containment(live.graph, trace_model(trainer))
    report = report.with_level(*check_live_bytes(model, weights(trainer)))
    assert report.exit_status == 0, [d.message for d in report.differences]
    fp8 = [op for op in live.graph.gemms("fprop") if live.graph.is_fp8(op)]
    assert len(fp8) == 14
    assert live.graph.meta["compared_pieces"] == "0"  # nothing was compiled here
    assert live.changes["fuse_quantize"] == 6  # two norms and an activation a layer
    assert live.changes["spell_norms"] == (9 if kind == "qwen3" else 5)
    assert live.changes["spell_rope"] == 4


def test_native_norms_are_named() -> None:
    """Without the pass the residual is added in FP32: level 2 says where."""
    trainer = make_trainer("llama")
    found = differences(engine_model(trainer, fused=False), trainer)
    dtypes = [d for d in found if d.attribute == "dtype"]
    assert {(d.rollout, d.train) for d in dtypes} == {("fp32", "bf16")}
    assert {d.operator for d in dtypes} == {
        "model.layers.0.post_attention_layernorm:norm",
        "model.layers.1.input_layernorm:norm",
        "model.layers.1.post_attention_layernorm:norm",
        "model.norm:norm",
    }


def test_same_values_as_the_trainer() -> None:
    """Run eagerly, one layer differs from the trainer's in rounding alone."""
    trainer = make_trainer("qwen3", num_hidden_layers=1)
    model = engine_model(trainer)
    compiled = torch.compile(
        trainer.eval(), backend="jetrl", options={"lowering": "aot"}
    )
    with torch.no_grad():
        ids = torch.arange(16)[None] * 7 % 256
        wanted = compiled(ids, use_cache=False).logits[0].float()
        plain = make_trainer("qwen3", num_hidden_layers=1).eval()
        bf16 = plain(ids, use_cache=False).logits[0].float()
    gap = (logits(model).float() - wanted).norm() / wanted.norm()
    assert gap < 0.5 * (bf16 - wanted).norm() / wanted.norm()


def test_skipped_layer_is_level_1() -> None:
    trainer = make_trainer("llama")
    model = engine_model(trainer)
    layer = model.model.layers[1].mlp.down_proj
    plain = nn.Linear(384, 256, bias=False, dtype=torch.bfloat16)
    plain.requires_grad_(False)
    layer.forward = lambda x: nn.functional.linear(x, plain.weight)
    layer.stand_in = plain
    found = differences(model, trainer)
    first = [d for d in found if d.level == 1]
    assert "model.layers.1.mlp.down_proj:fprop" in {d.operator for d in first}
    assert all(".layers.1.mlp.down_proj" in d.operator for d in first)


def test_powers_of_two_in_the_flow_are_level_2() -> None:
    trainer = make_trainer("llama")
    live = trace_live(engine_model(trainer)).graph
    train = trace_model(trainer, recipe="jetrl_ue8m0")
    found = check_containment(live, train).differences
    formats = [d for d in found if d.attribute == "scale_format"]
    assert {d.level for d in formats} == {2}
    assert len({d.operator for d in formats}) == 14


def test_unrounded_master_is_level_3() -> None:
    """Codes of an FP32 master that was not rounded to BF16 first."""
    trainer = make_trainer("llama").float()
    with torch.no_grad():
        for p in trainer.parameters():
            p.add_(torch.randn_like(p) * 1e-3)
    model = engine_model(make_trainer("llama"))
    refit_model(model, trainer.named_parameters())
    layer = model.model.layers[0].self_attn.o_proj
    master = trainer.get_parameter("model.layers.0.self_attn.o_proj.weight").detach()
    scales = storage.scales_of(layer).repeat_interleave(128, 0)
    scales = scales.repeat_interleave(128, 1)
    layer.weight.data.copy_((master / scales).clamp(-448, 448))
    _, found = check_live_bytes(model, weights(trainer))
    assert [d.operator for d in found] == ["model.layers.0.self_attn.o_proj:fprop"]
    assert "% differ" not in found[0].message
    assert "elements (" in found[0].message


def test_transposed_block_is_level_3() -> None:
    trainer = make_trainer("llama")
    model = engine_model(trainer)
    weight = model.model.layers[0].self_attn.o_proj.weight
    with torch.no_grad():
        block = weight[:128, :128].clone()
        weight[:128, :128] = block.t()
    result, found = check_live_bytes(model, weights(trainer))
    assert result.status == "failed"
    assert [d.operator for d in found] == ["model.layers.0.self_attn.o_proj:fprop"]
    assert "weight: " in found[0].message


def test_powers_of_two_are_level_3() -> None:
    trainer = make_trainer("llama")
    model = engine_model(trainer)
    layer = model.model.layers[1].mlp.gate_up_proj
    scales = storage.scales_of(layer)
    with torch.no_grad():
        scales.copy_(scales.log2().ceil().exp2())
    _, found = check_live_bytes(model, weights(trainer))
    assert [d.operator for d in found] == [
        "model.layers.1.mlp.gate_proj:fprop",
        "model.layers.1.mlp.up_proj:fprop",
    ]
    assert all("weight_scale_inv" in d.message for d in found)


def test_fp32_master_is_rounded_first() -> None:
    trainer = make_trainer("llama").float()
    with torch.no_grad():
        for p in trainer.parameters():
            p.add_(torch.randn_like(p) * 1e-3)
    model = engine_model(make_trainer("llama"))
    assert refit_model(model, trainer.named_parameters()) == 21
    assert check_live_bytes(model, weights(trainer))[0].status == "passed"


def test_refit_keeps_storage() -> None:
    trainer = make_trainer("qwen2", **UNEVEN)
    model = engine_model(trainer)
    layer = model.model.layers[0].self_attn.qkv_proj
    kept = (layer.weight.data_ptr(), storage.scales_of(layer).data_ptr())
    before = logits(model)
    with torch.no_grad():
        for p in trainer.parameters():
            p.mul_(1.5)
    given = weights(trainer)
    assert refit_model(model, given) == len(given)
    assert (layer.weight.data_ptr(), storage.scales_of(layer).data_ptr()) == kept
    assert check_live_bytes(model, weights(trainer))[0].status == "passed"
    assert not torch.equal(logits(model), before)


def test_stale_layer_is_level_3() -> None:
    trainer = make_trainer("llama")
    model = engine_model(trainer)
    layer = model.model.layers[1].self_attn.qkv_proj
    old = layer.weight.detach().clone()
    with torch.no_grad():
        for p in trainer.parameters():
            p.add_(torch.randn_like(p) * 0.01)
    refit_model(model, weights(trainer))
    layer.weight.data.copy_(old)
    _, found = check_live_bytes(model, weights(trainer))
    assert [d.operator.rpartition(".")[2] for d in found] == [
        "q_proj:fprop",
        "k_proj:fprop",
        "v_proj:fprop",
    ]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("model.layers.0.mlp.up_proj.weight", None, "missing"),
        ("model.norm.weight", None, "missing"),
        ("model.layers.0.mlp.up_proj.weight", torch.zeros(3, 3), "shape"),
        ("model.layers.0.mlp.up_proj.weight", torch.zeros(384, 256).half(), "float16"),
        ("model.layers.0.mlp.bias", torch.zeros(3), "has no parameter"),
    ],
)
def test_refused_push_changes_nothing(name: str, value: Any, why: str) -> None:
    trainer = make_trainer("llama")
    model = engine_model(trainer)
    before = logits(model)
    given = {k: v * 2 for k, v in weights(trainer).items()}
    if value is None:
        del given[name]
    else:
        given[name] = value
    with pytest.raises(RefitError, match=why):
        refit_model(model, given)
    assert torch.equal(logits(model), before)


def test_nan_makes_it_refuse() -> None:
    trainer = make_trainer("llama")
    model = engine_model(trainer)
    given = weights(trainer)
    given["model.layers.1.mlp.up_proj.weight"][5, 7] = float("nan")
    with pytest.raises(RefitError, match=r"layers\.1\.mlp\.up_proj"):
        refit_model(model, given)
    with pytest.raises(RefitError, match="refuses to generate"):
        logits(model)
    refit_model(model, weights(trainer))
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_nan_outside_fp8_layers_makes_it_refuse(name: str) -> None:
    trainer = make_trainer("llama")
    model = engine_model(trainer)
    given = weights(trainer)
    given[name].view(-1)[7] = float("inf")
    with pytest.raises(RefitError, match=rf"1 weights .*first {name}"):
        refit_model(model, given)
    with pytest.raises(RefitError, match="refuses to generate"):
        logits(model)
    refit_model(model, weights(trainer))
    assert logits(model).isfinite().all()


def test_interrupted_refit_is_healed_by_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a complete push through vLLM's own interface."""
    trainer = make_trainer("llama")
    model = engine_model(trainer)
    with monkeypatch.context() as patched:
        patched.setattr(refit, "write_plain", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            refit.refit_model(model, weights(trainer))
    given = weights(trainer)
    del given["model.layers.0.mlp.up_proj.weight"]
    model.load_weights(given.items())
    with pytest.raises(RefitError, match="interrupted"):
        logits(model)
    model.load_weights(weights(trainer).items())
    assert logits(model).isfinite().all()


def test_head_that_the_trainer_untied() -> None:
    """The engine has one weight where the trainer has two: refused, and level 3."""
    trainer: Any = make_trainer("llama", num_hidden_layers=1, tie_word_embeddings=True)
    model = engine_model(trainer)
    assert refit_model(model, weights(trainer)) == 11
    whole = {**weights(trainer), "lm_head.weight": trainer.lm_head.weight.detach()}
    assert refit_model(model, whole) == 12
    assert check_live_bytes(model, whole)[0].status == "passed"
    trainer.lm_head.weight = nn.Parameter(trainer.lm_head.weight.detach() * 2)
    with pytest.raises(RefitError, match=r"lm_head\.weight and .* are one weight"):
        refit_model(model, weights(trainer))
    assert logits(model).isfinite().all()  # nothing was written
    _, found = check_live_bytes(model, weights(trainer))
    assert [d.operator for d in found] == ["lm_head.weight"]


def test_fused_experts_are_counted_and_not_pushed() -> None:
    trainer = make_trainer("llama", num_hidden_layers=1)
    model = engine_model(trainer)
    experts = nn.Module()
    experts.w13_weight = nn.Parameter(torch.zeros(2, 8, 4), requires_grad=False)
    model.model.layers[0].mlp.experts = experts
    result, _ = check_live_bytes(model, weights(trainer))
    assert result.status == "passed"
    assert result.counts["fused experts, not compared"] == 1
    with pytest.raises(RefitError, match=r"mlp\.experts holds fused experts"):
        refit_model(model, weights(trainer))


def test_layer_without_storage() -> None:
    """As vLLM leaves it where a reload raised."""
    trainer = make_trainer("llama")
    model = engine_model(trainer)
    layer = model.model.layers[0].mlp.down_proj
    del layer.weight_scale_inv
    layer.weight = nn.Parameter(torch.empty(256, 384, device="meta"))
    with pytest.raises(RefitError, match=r"down_proj waits for weights of a reload"):
        refit_model(model, weights(trainer))


def test_failing_write_makes_it_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer("llama")
    model = engine_model(trainer)

    def fail(*_: Any) -> None:
        raise OSError("the network went away")

    with monkeypatch.context() as patched:
        patched.setattr(refit, "write_plain", fail)
        with pytest.raises(OSError, match="network"):
            refit.refit_model(model, weights(trainer))
    with pytest.raises(RefitError, match="interrupted"):
        logits(model)
    refit_model(model, weights(trainer))
    assert logits(model).isfinite().all()


def test_partial_push_through_the_engine_makes_it_refuse() -> None:
    trainer = make_trainer("llama")
    model = engine_model(trainer)
    given = weights(trainer)
    first = {k: v for k, v in given.items() if ".layers.0." in k}
    model.load_weights(first.items())
    with pytest.raises(RefitError, match=r"wrote 7 of 14 FP8 layers.*layers\.1"):
        logits(model)
    rest = {k: v for k, v in given.items() if ".layers.1." in k}
    model.load_weights(rest.items())  # in chunks is fine
    assert logits(model).isfinite().all()


def test_pieces_are_compared() -> None:
    from jetrl_compile.pipeline import CompileReport

    trainer = make_trainer("llama")
    graph = trace_live(engine_model(trainer)).graph
    report = CompileReport("model", "rollout", False, "jetrl", graph, {}, {})
    assert compare_pieces(graph, [report, report]) == 2
    other = trace_model(trainer, recipe="bf16", phase="rollout")
    wrong = PrecisionGraph(other.operators, other.edges, other.meta)
    with pytest.raises(LoweringError, match="was compiled as"):
        compare_pieces(
            graph, [CompileReport("model", "rollout", False, "jetrl", wrong, {}, {})]
        )


def test_model_without_the_config() -> None:
    with pytest.raises(ModelError, match="quantization='jetrl'"):
        config_of(nn.Linear(2, 2))
