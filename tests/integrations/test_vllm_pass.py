"""The pass where it runs in an engine: inside Inductor, and as a backend."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from vllm_engine_model import EngineModel, make_trainer

from jetrl_compile.errors import LoweringError
from jetrl_compile.integrations.vllm import whole_graph
from jetrl_compile.integrations.vllm.compile_pass import HOOK, EnginePass
from jetrl_compile.integrations.vllm.settings import Reports, Settings
from jetrl_compile.kernels import dispatch
from jetrl_compile.pipeline import source_hash
from jetrl_compile.recipe import JETRL, get_recipe

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]
SETTINGS = Settings(JETRL, ("reference",))


@pytest.fixture(autouse=True)
def no_compile_cache() -> Iterator[None]:
    """A graph that an earlier run of these tests left would be taken: no pass runs."""
    with fresh_cache():
        yield


def engine_model(kind: str, **sizes: Any) -> Any:
    return EngineModel(make_trainer(kind, num_hidden_layers=1, **sizes))


def run(model: Any, tokens: int = 16) -> Tensor:
    ids = torch.arange(tokens) * 7 % 256
    with torch.no_grad():
        hidden: Tensor = model(ids, torch.arange(tokens))
    return hidden


def native(model: Any) -> Tensor:
    """The model without the pass, as vLLM would run it."""
    return run(model)


def check_close(model: Any, compiled: Tensor) -> None:
    wanted = native(model).float()
    assert (compiled.float() - wanted).norm() < 0.05 * wanted.norm()


def test_inside_inductor() -> None:
    model = engine_model("qwen3")
    reports = Reports()
    hook = EnginePass(SETTINGS, reports)
    compiled: Any = torch.compile(model.model, fullgraph=True, options={HOOK: hook})
    ids = torch.arange(16) * 7 % 256
    with torch.no_grad():
        check_close(model, compiled(ids, torch.arange(16)))
    (report,) = reports
    assert report.lowered == {"fprop": 7, "dgrad": 0, "wgrad": 0}
    assert report.changes["fuse_quantize"] == 3
    assert report.changes["spell_norms"] == 5
    assert set(report.providers.values()) == {"reference"}
    kinds = {op.name: op.kind for op in report.graph.operators}
    assert kinds["layers.0.self_attn.q_proj:fprop"] == "gemm"
    assert kinds["layers.0.post_attention_layernorm.weight"] == "parameter"
    assert kinds["layers.0.self_attn.o_proj:residual_add"] == "residual_add"


def test_as_the_backend_of_mode_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_graph, "_PREPARED", [])
    model = engine_model("llama", tie_word_embeddings=True)
    reports = Reports()
    whole_graph.prepare(SETTINGS, reports)
    compiled: Any = torch.compile(
        model.model, fullgraph=True, backend=whole_graph.backend
    )
    ids = torch.arange(16) * 7 % 256
    with torch.no_grad():
        check_close(model, compiled(ids, torch.arange(16)))
    (report,) = reports
    assert report.lowered["fprop"] == 7
    assert any(op.kind == "attention" for op in report.graph.operators)


def test_identity_is_of_sources_and_settings() -> None:
    reports = Reports()
    same = EnginePass(SETTINGS, reports).uuid()
    assert EnginePass(Settings(JETRL, ("reference",)), Reports()).uuid() == same
    assert EnginePass(Settings(JETRL, fuse=False), reports).uuid() != same
    assert EnginePass(Settings(get_recipe("bf16")), reports).uuid() != same


def test_identity_covers_the_integration() -> None:
    assert source_hash() in EnginePass(SETTINGS, Reports()).uuid()


def test_identity_has_the_providers_that_can_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cached graph names the provider of a time when another could run."""
    settings = Settings(JETRL, ("deep_gemm", "triton", "reference"))
    before = EnginePass(settings, Reports()).uuid()
    known = dict(dispatch.PROVIDERS)
    other = replace(known["deep_gemm"], usable=lambda: None)
    monkeypatch.setitem(dispatch._REGISTRY, "deep_gemm", other)
    assert EnginePass(settings, Reports()).uuid() != before


def test_layer_in_another_precision_is_an_error() -> None:
    model = engine_model("llama")
    layer = model.model.layers[0].mlp.down_proj
    layer.stand_in = nn.Linear(384, 256, bias=False, dtype=torch.bfloat16)
    layer.stand_in.requires_grad_(False)
    layer.forward = lambda x: layer.stand_in(x)
    hook = EnginePass(SETTINGS, Reports())
    compiled: Any = torch.compile(model.model, fullgraph=True, options={HOOK: hook})
    ids = torch.arange(16)
    with torch.no_grad(), pytest.raises(Exception, match="recipe 'jetrl'") as caught:
        compiled(ids, ids)
    error = caught.value
    assert isinstance(getattr(error, "inner_exception", error), LoweringError)
