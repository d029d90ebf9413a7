"""What the plug-in tells vLLM: which layers it runs, and how vLLM compiles."""

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm_stubs import (
    ColumnParallelLinear,
    Engine,
    QKVParallelLinear,
    ReplicatedLinear,
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
    VocabParallelEmbedding,
    installed,
)

from jetrl_compile.errors import ModelError, RecipeError, RefitError
from jetrl_compile.integrations.vllm import storage, whole_graph
from jetrl_compile.kernels import reference_fused
from jetrl_compile.recipe import JETRL, register_recipe

HOOK = "joint_custom_pre_pass"


@pytest.fixture(name="engine")
def _engine() -> Engine:
    return Engine(3)


@pytest.fixture(name="calls")
def _calls(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> Iterator[Any]:
    with installed(monkeypatch, engine) as calls:
        yield calls


def module(leaf: str) -> Any:
    return import_module(f"jetrl_compile.integrations.vllm.{leaf}")


def test_registers_itself_twice(calls: Any) -> None:
    module("plugin").register()
    module("plugin").register()
    config = calls.registered["jetrl"]()
    assert config.get_name() == "jetrl"
    assert config.get_supported_act_dtypes() == [torch.bfloat16]
    assert config.get_min_capability() == 90
    assert config.get_config_filenames() == []
    assert "jetrl" in calls.norms.rms_norm.impls


def test_which_layers(calls: Any, engine: Engine) -> None:
    config = module("config").JetRLConfig()
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    linear = config.get_quant_method(QKVParallelLinear(), "model.layers.0.a.qkv_proj")
    assert type(linear).__name__ == "JetRLLinearMethod"
    gate = config.get_quant_method(ReplicatedLinear(8), "model.layers.0.mlp.router")
    assert isinstance(gate, UnquantizedLinearMethod)
    other = config.get_quant_method(ReplicatedLinear(9), "model.layers.0.mlp.router")
    assert type(other).__name__ == "JetRLLinearMethod"
    head = config.get_quant_method(VocabParallelEmbedding(), "lm_head")
    assert type(head).__name__ == "GuardedEmbeddingMethod"
    assert config.get_quant_method(nn.LayerNorm(2), "model.norm") is None
    assert engine.compilation_config.inductor_compile_config[HOOK].reports == []
    assert config.fused


def test_recipe_that_splits_a_fused_layer(calls: Any, engine: Engine) -> None:
    exclude = ("model.layers.0.a.k_proj",)
    register_recipe(replace(JETRL, name="split", exclude=exclude))
    engine.additional_config = {"jetrl": {"recipe": "split"}}
    config = module("config").JetRLConfig()
    with pytest.raises(RecipeError, match=r"keeps model\.layers\.0\.a\.k_proj in high"):
        config.get_quant_method(QKVParallelLinear(), "model.layers.0.a.qkv_proj")
    register_recipe(replace(JETRL, name="less", exclude=("model.layers.1.**",)))
    engine.additional_config = {"jetrl": {"recipe": "less"}}
    config = module("config").JetRLConfig()
    kept = config.get_quant_method(QKVParallelLinear(), "model.layers.1.a.qkv_proj")
    assert isinstance(kept, UnquantizedLinearMethod)


def test_layer_from_load_to_push(calls: Any) -> None:
    config = module("config").JetRLConfig()
    layer: Any = ColumnParallelLinear(256)
    method = config.get_quant_method(layer, "model.layers.0.up")
    loader = layer.weight_loader
    sizes = (192, [256], 192, 256)
    with pytest.raises(ModelError, match="needs BF16"):
        method.create_weights(layer, *sizes, torch.float16, weight_loader=loader)
    method.create_weights(layer, *sizes, torch.bfloat16, weight_loader=loader)
    assert layer.weight.is_meta
    assert calls.online == [layer]
    torch.manual_seed(0)
    weight = torch.randn(256, 192).to(torch.bfloat16)
    load = layer.weight.weight_loader
    layer.weight = nn.Parameter(torch.empty_like(weight), requires_grad=False)
    load(layer.weight, weight)  # as vLLM does once the layer is materialized
    method.process_weights_after_loading(layer)
    method.process_weights_after_loading(layer)  # vLLM calls it twice
    assert layer.weight.dtype is torch.float8_e4m3fn
    x = torch.randn(3, 192).to(torch.bfloat16)
    bias = torch.randn(256).to(torch.bfloat16)
    y = method.apply(layer, x, bias)
    wanted = x.float() @ weight.float().t() + bias.float()
    assert y.dtype is torch.bfloat16
    assert (y.float() - wanted).norm() < 0.06 * wanted.norm()
    three = method.apply(layer, x[None], bias)
    assert torch.equal(three[0], y)
    assert storage.scales_of(layer).shape == (2, 2)


def test_head_refuses(calls: Any) -> None:
    config = module("config").JetRLConfig()
    head: Any = VocabParallelEmbedding()
    head.weight = torch.randn(4, 2)
    method = config.get_quant_method(head, "lm_head")
    assert method.apply(head, torch.randn(1, 2)).shape == (1, 4)
    config.state.broken = "a reason"
    with pytest.raises(RefitError, match="refuses to generate: a reason"):
        method.apply(head, torch.randn(1, 2))


def test_head_without_the_config_refuses(calls: Any) -> None:
    """vLLM makes the heads of some models without it."""
    config = module("config").JetRLConfig()
    model: Any = nn.Module()
    model.linear = ColumnParallelLinear(256)
    model.linear.quant_config = config
    model.head = VocabParallelEmbedding()
    model.head.weight = torch.randn(4, 2)
    model.head.quant_method = UnquantizedEmbeddingMethod()
    guard_heads = module("live_model").guard_heads
    assert (guard_heads(model), guard_heads(model)) == (1, 0)
    logits = model.head.quant_method.apply
    assert logits(model.head, torch.randn(1, 2)).shape == (1, 4)
    config.state.begin("a push")
    with pytest.raises(RefitError, match="refuses to generate: a push"):
        logits(model.head, torch.randn(1, 2))


def test_latent_attention_is_refused(calls: Any) -> None:
    layer = type("MLAAttention", (nn.Module,), {})()
    config = module("config").JetRLConfig()
    with pytest.raises(ModelError, match=r"layers\.0\.a is multi-head latent"):
        config.get_quant_method(layer, "layers.0.a")


def test_mode_2(calls: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_graph, "_PREPARED", [])
    config = engine.compilation_config
    config.mode, config.backend = type(config.mode)(2), "jetrl"
    chosen = module("config").JetRLConfig()
    chosen.settings()
    assert config.backend == "jetrl_compile.integrations.vllm.whole_graph.backend"
    assert config.custom_ops == ["none"]
    assert calls.wrap == [True]
    assert whole_graph._PREPARED[0].reports is chosen.reports


def test_eager(calls: Any, engine: Engine) -> None:
    module("plugin").register()
    engine.compilation_config.mode = type(engine.compilation_config.mode)(0)
    config = module("config").JetRLConfig()
    config.settings()
    assert not config.fused
    assert calls.norms.fused_add_rms_norm.priority == ["jetrl", "native"]
    norm = calls.norms.fused_add_rms_norm.impls["jetrl"]
    x, residual = (torch.randn(5, 64).to(torch.bfloat16) for _ in range(2))
    weight = torch.rand(64).to(torch.bfloat16)
    assert norm.fits(x, residual, weight, 1e-6)
    assert not norm.fits(x, residual, weight.float(), 1e-6)
    y, total = norm.run(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, reference_fused.rms_norm(total, weight, 1e-6)[0])


def test_foreign_pass_is_refused(calls: Any, engine: Engine) -> None:
    engine.compilation_config.inductor_compile_config[HOOK] = print
    with pytest.raises(ModelError, match="take it out"):
        module("config").JetRLConfig().settings()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"lora_config": object()}, "merge them into the weights"),
        (
            {"parallel_config": SimpleNamespace(pipeline_parallel_size=2)},
            "pipeline_parallel_size=2: .* use tensor_parallel_size",
        ),
    ],
)
def test_what_cannot_be_checked(
    calls: Any, engine: Engine, more: dict[str, Any], why: str
) -> None:
    engine.__dict__.update(more)
    with pytest.raises(ModelError, match=why):
        module("config").JetRLConfig().settings()


def test_mode_2_without_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_graph, "_PREPARED", [])
    traced = torch.fx.symbolic_trace(nn.Linear(2, 2))
    with pytest.raises(Exception, match="give LLM both"):
        whole_graph.backend(traced, [])
