"""Exact mode of an engine: settings, refusals, attention backends, and equal bits."""

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from vllm_engine_model import EngineModel, make_trainer
from vllm_stubs import Engine, VocabParallelEmbedding, installed

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from jetrl_compile.containment import check_containment
from jetrl_compile.errors import LoweringError, ModelError
from jetrl_compile.exact_attention import use_exact_attention
from jetrl_compile.integrations.vllm import exact
from jetrl_compile.integrations.vllm.compile_pass import HOOK, EnginePass
from jetrl_compile.integrations.vllm.engine import exact_on_device
from jetrl_compile.integrations.vllm.live_graph import trace_live
from jetrl_compile.integrations.vllm.live_model import attention_facts
from jetrl_compile.integrations.vllm.settings import Reports, Settings, read_settings
from jetrl_compile.kernels import exact_ops, reference_exact, triton_common
from jetrl_compile.layers import compile_layers
from jetrl_compile.recipe import JETRL
from jetrl_compile.tracing import trace_model

EXACT = Settings(JETRL, ("reference",), exact=True)
KINDS = ("qwen3", "llama", "qwen2")
pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


def engine(**more: Any) -> Any:
    given = {
        "parallel_config": SimpleNamespace(tensor_parallel_size=1),
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "attention_config": SimpleNamespace(backend=None, flash_attn_version=None),
        "additional_config": {"jetrl": {"exact": True}},
        "model_config": model_config(64),
    }
    return Engine(3, **{**given, **more})


def model_config(size: int, **more: Any) -> Any:
    return SimpleNamespace(
        hf_config=SimpleNamespace(sliding_window=None),
        logprobs_mode="processed_logprobs",
        get_head_size=lambda: size,
        **more,
    )


@pytest.fixture(name="registered")
def _registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Stands for vLLM's registry of attention backends."""
    found: dict[str, str] = {}
    module: Any = ModuleType("vllm.v1.attention.backends.registry")
    module.AttentionBackendEnum = SimpleNamespace(CUSTOM="custom")
    module.register_backend = found.__setitem__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    attention: Any = ModuleType("vllm.v1.attention")
    attention.selector = SimpleNamespace()
    monkeypatch.setitem(sys.modules, attention.__name__, attention)
    return found


def test_setting() -> None:
    assert read_settings({}, engine()).exact
    assert not read_settings({}, engine(additional_config={})).exact
    hook = EnginePass(EXACT, Reports())
    assert hook.uuid() != EnginePass(Settings(JETRL, ("reference",)), Reports()).uuid()


@pytest.mark.parametrize(("size", "kernel"), [(128, "fa3"), (64, "triton")])
def test_attention_by_head_size(
    registered: dict[str, str], size: int, kernel: str
) -> None:
    config = engine(model_config=model_config(size))
    assert exact.set_up_exact(config, True) == kernel
    assert config.attention_config.backend == "custom"
    assert registered == {"custom": exact.BACKENDS[kernel]}
    assert config.attention_config.flash_attn_version == (3 if size == 128 else None)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (
            {"parallel_config": SimpleNamespace(tensor_parallel_size=2)},
            "sums over ranks",
        ),
        ({"cache_config": SimpleNamespace(cache_dtype="fp8")}, "kv_cache_dtype='fp8'"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"lora_config": object()}, "LoRA adds products"),
        (
            {"model_config": SimpleNamespace(hf_config=SimpleNamespace())},
            "logprobs_mode='raw_logprobs'",
        ),
        (
            {
                "model_config": SimpleNamespace(
                    hf_config=SimpleNamespace(
                        sliding_window=4096, attn_logit_softcapping=50.0
                    ),
                    logprobs_mode="processed_logprobs",
                )
            },
            "sliding windows have no exact kernel.*soft caps of scores",
        ),
    ],
)
def test_what_is_refused(more: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=f"exact mode cannot hold here: .*{reason}"):
        exact.set_up_exact(engine(**more), True)


def test_an_eager_engine_is_refused() -> None:
    with pytest.raises(ModelError, match="leave out enforce_eager"):
        exact.set_up_exact(engine(), False)


def test_log_probs_are_those_of_the_engines_runner() -> None:
    assert exact.log_probs_kernel(engine()) == "aten"
    assert exact.log_probs_kernel(engine(use_v2_model_runner=True)) == "blocks"


def test_config_and_head(
    monkeypatch: pytest.MonkeyPatch, registered: dict[str, str]
) -> None:
    with installed(monkeypatch, engine()):
        config = import_module("jetrl_compile.integrations.vllm.config").JetRLConfig()
        head: Any = VocabParallelEmbedding()
        head.weight = torch.randn(256, 64).bfloat16()
        method = config.get_quant_method(head, "lm_head")
        x, bias = torch.randn(3, 64).bfloat16(), torch.randn(256).bfloat16()
        wanted = reference_exact.bf16_gemm(x, head.weight)
        assert torch.equal(method.apply(head, x), wanted)
        assert torch.equal(method.apply(head, x, bias), wanted + bias)
    assert (config.attention, config.log_probs) == ("triton", "aten")
    assert registered


def exact_attention_of_the_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine's attention run the reference, over all of its tokens."""

    def run(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [
            t.view(1, -1, n, self.size).transpose(1, 2)
            for t, n in ((q, self.heads), (k, self.kv_heads), (v, self.kv_heads))
        ]
        out, _ = torch.ops.jetrl.attention(
            *parts, None, None, self.impl.scale, "reference"
        )
        result: Tensor = out.reshape(-1, self.heads * self.size)
        return result

    monkeypatch.setattr("vllm_engine_model.Attention.forward", run)


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_gives_the_bits_of_the_trainer(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact_attention_of_the_double(monkeypatch)
    trainer: Any = make_trainer(kind).eval()
    use_exact_attention(trainer)
    model = EngineModel(trainer)
    exact.align_rope_tables(model, trainer.config)
    reports = Reports()
    hook = EnginePass(EXACT, reports)
    ids = torch.arange(16) * 7 % 256
    with fresh_cache(), torch.no_grad():
        backbone: Any = torch.compile(model.model, fullgraph=True, options={HOOK: hook})
        hidden = backbone(ids, torch.arange(16))
    head: Any = model.lm_head
    logits = exact_ops.bf16_gemm(hidden, head.weight, "reference")
    sampled = exact_ops.log_probs(logits[:-1], ids[1:], 1.0, "aten")
    compile_layers(trainer, lowering="aot", exact=True, fuse=True)
    wanted = trainer(ids[None], use_cache=False).logits[0]
    trained = exact_ops.log_probs(wanted[:-1], ids[1:], 1.0, "aten")
    assert torch.equal(sampled, trained)
    (report,) = reports
    assert report.changes["use_exact"] >= 11
    kernels = {op.provider for op in report.graph.operators}
    assert {"jetrl.rms_norm", "jetrl.rope", "jetrl.silu_mul"} <= kernels


@pytest.mark.parametrize("kind", KINDS)
def test_the_live_graph_is_exact(kind: str) -> None:
    trainer: Any = make_trainer(kind, num_hidden_layers=1)
    use_exact_attention(trainer)
    model: Any = EngineModel(trainer)
    own = SimpleNamespace(attention="triton")
    for layer in model.model.layers:
        layer.self_attn.attn.quant_config = own
    live = trace_live(
        model,
        EXACT,
        fused=True,
        attributes=attention_facts(model),
        head=False,
    ).graph
    train = trace_model(trainer, exact=True)
    cpu = exact_on_device(train, trainer, "cpu")
    report = check_containment(live, cpu, exact=True)
    assert {d.operator for d in report.differences} == {
        "model.layers.0.self_attn:attention"
    }, report.differences
    on_gpu = exact_on_device(train, trainer, "cuda")
    names = {op.name: op.provider for op in on_gpu.operators}
    assert names["model.layers.0.self_attn:attention"] == "jetrl.attention.triton"
    assert names["lm_head:fprop"] == "deep_gemm"


def test_an_operator_without_a_kernel_is_named() -> None:
    model: Any = EngineModel(make_trainer("llama", num_hidden_layers=1))
    norm = model.model.layers[0].input_layernorm
    norm.weight = nn.Parameter(norm.weight.float(), requires_grad=False)
    norm.forward = lambda x: nn.functional.rms_norm(
        x.float(), (256,), norm.weight, 1e-6
    ).bfloat16()
    hook = EnginePass(EXACT, Reports())
    compiled: Any = torch.compile(model.model, fullgraph=True, options={HOOK: hook})
    ids = torch.arange(16)
    with (
        fresh_cache(),
        torch.no_grad(),
        pytest.raises(Exception, match="vLLM's graph") as caught,
    ):
        compiled(ids, ids)
    error = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(error, LoweringError)
    assert "input_layernorm:norm (norm) is run by aten" in str(error)


def test_tables_become_the_trainers() -> None:
    trainer: Any = make_trainer("llama", num_hidden_layers=1)
    assert trainer.model.rotary_emb.inv_freq.dtype is torch.bfloat16, "by model.to()"
    use_exact_attention(trainer)
    model: Any = EngineModel(trainer)
    table = model.model.layers[0].self_attn.rotary_emb.cos_sin_cache
    before, at = table.clone(), table.data_ptr()
    positions = torch.arange(256)[None]
    cos, _ = trainer.model.rotary_emb(torch.zeros(1).bfloat16(), positions)
    assert torch.equal(cos[0, :, :32], table[:, :32])
    table[3, 5] += 1
    assert exact.align_rope_tables(model, trainer.config) >= 1
    assert table.data_ptr() == at
    assert torch.equal(table, before)
    assert exact.align_rope_tables(model, trainer.config) == 0


def test_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer: Any = make_trainer("llama", num_hidden_layers=1)
    model: Any = EngineModel(trainer)
    prepare = partial(exact.prepare_exact, trainer.config)
    with pytest.raises(ModelError, match="the engine is not in exact mode"):
        prepare(model)
    config = model.config_of_engine
    config.attention, config.log_probs = "triton", "blocks"
    assert prepare(model) == "blocks"


class Base:
    """Stands for vLLM's backends and builders."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class Impl(Base):
    alibi_slopes: Any = None
    sliding_window = (-1, -1)
    logits_soft_cap = 0
    sinks: Any = None
    scale = 0.125


class FlashBuilder(Base):
    def build(self, prefix: int, common: Any, fast: bool) -> Any:
        return SimpleNamespace(
            max_num_splits=0, scheduler_metadata=object(), built=(prefix, common, fast)
        )


class Generic(Base, ABC):
    @abstractmethod
    def __init__(self, spec: Any, names: Any, config: Any, device: Any) -> None:
        self.vllm_config = config

    def __class_getitem__(cls, _: Any) -> Any:
        return cls


@pytest.fixture(name="backends")
def _backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    base = "vllm.v1.attention"
    contents: dict[str, dict[str, Any]] = {
        f"{base}.backend": {
            "AttentionCGSupport": SimpleNamespace(UNIFORM_BATCH="uniform"),
            "AttentionMetadataBuilder": Generic,
        },
        f"{base}.backends.triton_attn": {
            "TritonAttentionBackend": Base,
            "TritonAttentionImpl": Impl,
        },
        f"{base}.backends.flash_attn": {
            "FlashAttentionBackend": Base,
            "FlashAttentionMetadataBuilder": FlashBuilder,
        },
    }
    names = ("exact_flash", "exact_triton")
    with monkeypatch.context() as patched:
        for name, values in contents.items():
            module = ModuleType(name)
            vars(module).update(values)
            patched.setitem(sys.modules, name, module)
        made = [import_module(f"jetrl_compile.integrations.vllm.{n}") for n in names]
        yield SimpleNamespace(**dict(zip(names, made, strict=True)))
    for name in names:
        sys.modules.pop(f"jetrl_compile.integrations.vllm.{name}", None)


def test_flash_attention_has_one_split(backends: Any) -> None:
    backend = backends.exact_flash.ExactFlashBackend
    assert backend.get_name() == "CUSTOM"
    builder = backend.get_builder_cls()()
    made = builder.build(7, "common")
    assert (made.max_num_splits, made.scheduler_metadata) == (1, None)
    assert made.built == (0, "common", True), "no common prefix, no schedule ahead"
    assert builder.use_cascade_attention(1, x=2) is False


@pytest.mark.skipif(triton_common.triton_missing() is not None, reason="no triton")
def test_triton_backend_reads_vllms_cache(backends: Any) -> None:
    backend = backends.exact_triton.ExactTritonBackend
    assert backend.get_name() == "CUSTOM"
    assert backend.supports_head_size(64)
    assert not backend.supports_head_size(512)
    implementation = backend.get_impl_cls()()
    lengths = SimpleNamespace(max_model_len=1024)
    config = SimpleNamespace(model_config=lengths)
    builder = backend.get_builder_cls()(None, [], config, "cpu")
    assert builder.use_cascade_attention() is False
    torch.manual_seed(0)
    cache = torch.randn(4, 2, 16, 1, 64).bfloat16()
    q = torch.randn(3, 2, 64).bfloat16()
    common = SimpleNamespace(
        num_actual_tokens=3,
        max_query_len=2,
        query_start_loc=torch.tensor([0, 1, 3], dtype=torch.int32),
        seq_lens=torch.tensor([20, 5], dtype=torch.int32),
        block_table_tensor=torch.tensor([[2, 0], [3, 0]], dtype=torch.int32),
        slot_mapping=torch.zeros(3, dtype=torch.int64),
    )
    metadata = builder.build(16, common)
    out = torch.full((4, 2, 64), 7.0).bfloat16()
    padded = torch.cat((q, q[:1]))
    layer = nn.Module()
    implementation.forward(layer, padded, q, q, cache, metadata, out)
    for row, (start, end, pages, keys) in enumerate(
        [(0, 1, [2, 0], 20), (1, 3, [3], 5)]
    ):
        own = cache[pages].transpose(0, 1).reshape(2, -1, 1, 64)[:, :keys]
        k, v = (t.transpose(0, 1)[None] for t in own)
        wanted, _ = reference_exact.attention(
            q[start:end].transpose(0, 1)[None], k, v, None, None, 0.125
        )
        assert torch.allclose(out[start:end].float(), wanted[0].float(), atol=2e-2), row
    assert bool((out[3] == 7).all()), "padding is not written"
    none = implementation.forward(layer, q, q, q, cache, None, torch.ones(3, 2, 64))
    assert not none.any()


def test_triton_backend_refuses_what_it_does_not_compute(
    backends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Impl, "sliding_window", (4095, 0))
    make = backends.exact_triton.ExactTritonBackend.get_impl_cls()
    with pytest.raises(ModelError, match="no kernel with sliding window"):
        make()
