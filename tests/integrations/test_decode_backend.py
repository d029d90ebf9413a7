"""vLLM's attention backend with the project's kernel for steps that decode.

`decode_rollout.py` says what of vLLM runs here.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from decode_rollout import PAGE, Rollout, attention, stand_ins, step_of
from torch import Tensor
from vllm_stubs import Engine, installed

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from jetrl_compile.integrations.vllm import own_attention
from jetrl_compile.kernels import triton_common

BACKEND = "jetrl_compile.integrations.vllm.decode_backend"
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # vLLM's, where it is installed
    pytest.mark.skipif(triton_common.triton_missing() is not None, reason="no triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="stand-ins run on a CPU"),
]


@pytest.fixture(name="rollout")
def _rollout(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rollout]:
    if importlib.util.find_spec("vllm") is None:
        for name, module in stand_ins().items():
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, BACKEND, raising=False)
    calls: list[str] = []

    def update(
        key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, *_: Any
    ) -> None:
        calls.append("update")
        for row, slot in enumerate(slots.tolist()):
            keys[slot // PAGE, slot % PAGE] = key[row]
            values[slot // PAGE, slot % PAGE] = value[row]

    def varlen(**given: Any) -> None:
        calls.append("attention")
        starts = given["cu_seqlens_q"].tolist()
        for row, length in enumerate(given["seqused_k"].tolist()):
            pages = given["block_table"][row].long()
            keys, values = (given[x][pages].flatten(0, 1) for x in "kv")
            for at in range(starts[row], starts[row + 1]):
                end = length - starts[row + 1] + at + 1
                found = attention(given["q"][at], keys[:end], values[:end])
                given["out"][at] = found.to(torch.bfloat16)

    flash = import_module("vllm.v1.attention.backends.flash_attn")
    monkeypatch.setattr(flash, "reshape_and_cache_flash", update, raising=False)
    monkeypatch.setattr(flash, "flash_attn_varlen_func", varlen, raising=False)
    context = SimpleNamespace(attn_metadata=None)
    backend: Any = import_module(BACKEND)
    monkeypatch.setattr(backend, "get_forward_context", lambda: context)
    yield Rollout(backend, context, calls)
    sys.modules.pop(BACKEND, None)


def test_prompts_and_decoded_steps_of_one_cache(rollout: Rollout) -> None:
    both = ["update", "attention"]
    assert rollout.step(a=5, b=37, c=1) == both
    assert rollout.step(a=1, b=1, c=1) == []
    assert rollout.step(b=1, d=20, a=1) == both
    for _ in range(20):
        assert rollout.step(d=1, c=1, b=1, a=1) == []
    assert rollout.step(e=1) == []  # a prompt of one token
    assert rollout.step(e=3, a=1) == both
    assert rollout.step(e=1, a=1, d=1) == []


def test_with_prefix_caching_vllm_writes_first(rollout: Rollout) -> None:
    """Another sequence may read a page in the step that fills it."""
    rollout.builder = rollout.make_builder(rollout.impl, caching=True)
    assert rollout.step(a=5, b=37) == ["update", "attention"]
    for _ in range(3):
        assert rollout.step(b=1, a=1) == ["update"]


def test_a_page_that_fills_while_another_sequence_reads_it(rollout: Rollout) -> None:
    """`a` decodes the last token of its page, `b` begins with all of that page."""
    rollout.builder = rollout.make_builder(rollout.impl, caching=True)
    rollout.step(a=15)
    shared = rollout.tables.setdefault("a", [])
    rollout.tables["b"] = list(shared)
    keys, values = rollout.seen["a"]
    slot = shared[0] * PAGE
    common = step_of(
        [17, 16],
        [0, 1, 2],
        torch.tensor([[shared[0], 150], [shared[0], 0]], dtype=torch.int32),
        [150 * PAGE, slot + 15],
    )
    made = rollout.builder.build(0, common)
    q, k, v = torch.randn((2, 12, 64)).bfloat16().tensor_split((8, 10), 1)
    out = torch.empty((2, 8, 64), dtype=torch.bfloat16)
    rollout.context.attn_metadata = {rollout.layer.layer_name: made}
    rollout.impl.do_kv_cache_update(
        rollout.layer, k, v, rollout.cache, common.slot_mapping
    )
    rollout.impl.forward(rollout.layer, q, k, v, rollout.cache, made, out)
    wanted = attention(
        q[0],
        torch.stack([*keys, k[1], k[0]]),
        torch.stack([*values, v[1], v[0]]),
    )
    torch.testing.assert_close(out[0].double(), wanted, rtol=2**-7, atol=2**-7)


def test_rows_of_padding(rollout: Rollout) -> None:
    rollout.step(a=5, b=37)
    before = rollout.cache.clone()
    assert rollout.step(padding=3, a=1, b=1) == []
    changed = (rollout.cache != before).any(-1).any(-1).any(1)
    assert changed.sum() == 2, "rows of padding are nowhere in the cache"


def step_that(**more: Any) -> Any:
    """Say that two sequences have one query each, and something else."""
    common = step_of([21, 4], [0, 1, 2], torch.zeros((2, 8), dtype=torch.int32), [0, 1])
    return SimpleNamespace(**{**vars(common), **more})


def test_which_steps_decode(rollout: Rollout) -> None:
    build = rollout.builder.build
    assert build(0, step_that()).arrived is rollout.builder.arrived
    assert build(16, step_that()).arrived is None, "a common prefix"
    assert build(0, step_that(causal=False)).arrived is None
    assert build(0, step_that(num_actual_tokens=3)).arrived is None
    assert build(0, step_that(max_query_len=2)).arrived is None


def test_a_step_that_decodes_has_no_schedule(rollout: Rollout) -> None:
    builder = rollout.builder
    fast: list[bool] = []

    def build(_: Any, prefix: int, common: Any, fast_build: bool) -> Any:
        fast.append(fast_build)
        return common

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(builder).__mro__[1], "build", build)
        builder.build(0, step_that())
        builder.build(0, step_that(max_query_len=2))
        builder.build(0, step_that(max_query_len=2), True)
    assert fast == [True, False, True]


def test_a_list_of_metadata(rollout: Rollout) -> None:
    """vLLM has one for each micro-batch of a step; the first is looked at."""
    rollout.step(a=5)
    context = rollout.context
    made = rollout.builder.build(0, step_that())
    context.attn_metadata = [{rollout.layer.layer_name: made}]
    rollout.calls.clear()
    k = torch.zeros((2, 2, 64), dtype=torch.bfloat16)
    update = rollout.impl.do_kv_cache_update
    update(rollout.layer, k, k, rollout.cache, made.slot_mapping)
    assert not rollout.calls


def test_memory_is_measured_without_metadata(rollout: Rollout) -> None:
    q, k, v = torch.randn((2, 12, 64)).bfloat16().tensor_split((8, 10), 1)
    out = torch.full((2, 8, 64), 7.0).bfloat16()
    rollout.impl.forward(rollout.layer, q, k, v, rollout.cache, None, out)
    assert not out.any()


def test_one_layer_that_needs_vllms_kernel_keeps_all(rollout: Rollout) -> None:
    assert rollout.impl.can_decode
    window = rollout.make_impl(window=8)
    builder = rollout.make_builder(rollout.impl, window)
    made = builder.build(0, step_that())
    assert made.arrived is None
    assert not made.writes
    # Another group's metadata of the same step, copied for this one.
    other = rollout.builder.build(0, step_that())
    table, slots = torch.ones((2, 8), dtype=torch.int32), torch.tensor([4, 5])
    copied = builder.update_block_table(other, table, slots)
    assert copied.arrived is None
    assert not copied.writes
    assert copied.block_table is table
    assert rollout.builder.update_block_table(other, table, slots).writes


@pytest.mark.parametrize(
    "more",
    [
        {"window": 8},
        {"logits_soft_cap": 30.0},
        {"kv_sharing_target_layer_name": "model.layers.1.attn"},
        {"alibi": [0.5] * 8},
        {"heads": 34},
        {"size": 264},
    ],
)
def test_which_layers_decode(rollout: Rollout, more: dict[str, Any]) -> None:
    assert not rollout.make_impl(**more).can_decode


def test_layers_with_sinks_or_other_attention(rollout: Rollout) -> None:
    kind: Any = import_module("vllm.v1.attention.backend")
    encoder = rollout.make_impl(attn_type=kind.AttentionType.ENCODER)
    assert not encoder.can_decode
    flash = import_module("vllm.v1.attention.backends.flash_attn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "flash_attn_supports_sinks", lambda: True, raising=False)
        assert not rollout.make_impl(sinks=torch.zeros(8)).can_decode


def test_counters_for_the_largest_step(rollout: Rollout) -> None:
    assert rollout.builder.arrived.shape == (16 * 2,)  # max_num_seqs
    builder = rollout.make_builder(rollout.impl, captured=40)
    assert builder.arrived.shape == (40 * 2,)
    assert not builder.arrived.any()


def test_no_graph_of_other_steps(rollout: Rollout) -> None:
    """FA3's `ALWAYS` would replay a decoded step's graph for prompts."""
    assert rollout.backend.DecodeBuilder._cudagraph_support.name == "UNIFORM_BATCH"
    assert rollout.backend.DecodeBackend.get_name() == "CUSTOM"
    assert rollout.backend.DecodeBackend.get_impl_cls() is rollout.backend.DecodeImpl
    builder = rollout.backend.DecodeBackend.get_builder_cls()
    assert builder is rollout.backend.DecodeBuilder


def engine(**more: Any) -> Any:
    model = SimpleNamespace(
        get_num_attention_heads=lambda _: 32,
        get_num_kv_heads=lambda _: 8,
        get_head_size=lambda: 128,
        hf_config=SimpleNamespace(),
    )
    given = {
        "parallel_config": SimpleNamespace(),
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "attention_config": SimpleNamespace(backend=None, flash_attn_version=None),
        "model_config": model,
    }
    return Engine(3, **{**given, **more})


def attention_config(version: int | None, **more: Any) -> Any:
    return SimpleNamespace(backend=None, flash_attn_version=version, **more)


def pages(size: int) -> Any:
    return SimpleNamespace(
        cache_dtype="auto", block_size=size, user_specified_block_size=True
    )


def model(**more: Any) -> Any:
    return SimpleNamespace(**{**vars(engine().model_config), **more})


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, None),
        ({"attention_config": None}, "no attention_config"),
        (
            {"attention_config": SimpleNamespace(backend="FLASHINFER")},
            "the backend FLASHINFER is set",
        ),
        ({"attention_config": attention_config(2)}, "FlashAttention 2 is set"),
        ({"attention_config": attention_config(4)}, "FlashAttention 4 is set"),
        (
            {"attention_config": attention_config(None, use_non_causal=True)},
            "attention is not causal",
        ),
        ({"cache_config": pages(24)}, "block_size=24 is no multiple of 16"),
        (
            {"cache_config": SimpleNamespace(cache_dtype="fp8")},
            "keys and values are kept in fp8",
        ),
        ({"speculative_config": object()}, "more than one query"),
        ({"kv_transfer_config": object()}, "connectors of caches"),
        (
            {"parallel_config": SimpleNamespace(decode_context_parallel_size=2)},
            "keys are spread over ranks",
        ),
        ({"model_config": model(use_mla=True)}, "the model has use_mla"),
        ({"model_config": model(is_hybrid=True)}, "the model has is_hybrid"),
        ({"model_config": model(is_encoder_decoder=True)}, "is_encoder_decoder"),
        ({"model_config": model(is_mm_prefix_lm=True)}, "is_mm_prefix_lm"),
        ({"model_config": model(get_head_size=lambda: 100)}, "no multiple of 8"),
        ({"model_config": model(get_head_size=lambda: 512)}, "a head of 512"),
    ],
)
def test_which_engines_have_it(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], reason: str | None
) -> None:
    registered: dict[str, str] = {}
    cleared: list[bool] = []
    registry: Any = ModuleType("vllm.v1.attention.backends.registry")
    registry.AttentionBackendEnum = SimpleNamespace(CUSTOM="custom")
    registry.register_backend = registered.__setitem__
    attention: Any = ModuleType("vllm.v1.attention")
    remembered = SimpleNamespace(cache_clear=lambda: cleared.append(True))
    attention.selector = SimpleNamespace(_cached_get_attn_backend=remembered)
    given = engine(**more)
    monkeypatch.setattr(own_attention, "no_hopper", lambda: None)
    with installed(monkeypatch, given):
        sys.modules["vllm"].envs = SimpleNamespace()  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, registry.__name__, registry)
        monkeypatch.setitem(sys.modules, attention.__name__, attention)
        found = own_attention.set_up_decode(given)
    if reason is not None:
        assert reason in str(found)
        assert not registered
        return
    assert found is None
    assert registered == {"custom": own_attention.DECODE_BACKEND}
    assert given.attention_config.backend == "custom"
    assert cleared, "another engine may have had another class under this name"


def test_without_a_hopper_gpu_attention_is_vllms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = engine()
    with installed(monkeypatch, given):
        sys.modules["vllm"].envs = SimpleNamespace()  # type: ignore[attr-defined]
        monkeypatch.setattr(own_attention, "no_hopper", lambda: "no GPU")
        assert own_attention.set_up_decode(given) == "no GPU"
    assert given.attention_config.backend is None


def test_batch_invariance_keeps_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    given = engine()
    monkeypatch.setattr(own_attention, "no_hopper", lambda: None)
    with installed(monkeypatch, given):
        envs = SimpleNamespace(VLLM_BATCH_INVARIANT=True)
        sys.modules["vllm"].envs = envs  # type: ignore[attr-defined]
        assert "VLLM_BATCH_INVARIANT" in str(own_attention.set_up_decode(given))


@pytest.mark.parametrize(
    ("recipe", "kernel"),
    [
        ("jetrl", "jetrl.decode_attention"),
        ("rollout_only", "jetrl.decode_attention"),
        ("bf16", ""),
    ],
)
def test_the_recipe_bf16_is_vllm_as_it_is(
    monkeypatch: pytest.MonkeyPatch, recipe: str, kernel: str
) -> None:
    given = engine(additional_config={"jetrl": {"recipe": recipe}})
    asked: list[Any] = []
    with installed(monkeypatch, given):
        plugged: Any = import_module("jetrl_compile.integrations.vllm.config")
        monkeypatch.setattr(plugged, "set_up_decode", asked.append)
        config = plugged.JetRLConfig()
        config.settings()
    assert config.decode_attention == kernel
    assert asked == ([given] if kernel else [])
