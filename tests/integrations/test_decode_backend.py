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
from decode_rollout import PAGE, Rollout, attention, stand_ins
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


def test_a_common_prefix_is_vllms(rollout: Rollout) -> None:
    rollout.step(a=20, b=3)
    made = rollout.builder.build(
        16,
        SimpleNamespace(
            num_reqs=2,
            num_actual_tokens=2,
            max_query_len=1,
            max_seq_len=21,
            query_start_loc=torch.tensor([0, 1, 2], dtype=torch.int32),
            seq_lens=torch.tensor([21, 4], dtype=torch.int32),
            block_table_tensor=torch.zeros((2, 8), dtype=torch.int32),
            slot_mapping=torch.zeros(2, dtype=torch.int64),
            causal=True,
            mm_req_doc_ranges=None,
        ),
    )
    assert made.arrived is None


def test_one_layer_that_needs_vllms_kernel_keeps_all(rollout: Rollout) -> None:
    window = rollout.make_impl(window=8)
    assert not window.can_decode
    assert rollout.impl.can_decode
    assert not rollout.make_builder(rollout.impl, window).can_decode
    assert not rollout.make_impl(logits_soft_cap=30.0).can_decode
    shared = rollout.make_impl(kv_sharing_target_layer_name="model.layers.1.attn")
    assert not shared.can_decode
    assert rollout.make_builder(rollout.impl, rollout.make_impl()).can_decode


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


def model(**more: Any) -> Any:
    return SimpleNamespace(**{**vars(engine().model_config), **more})


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, None),
        ({"attention_config": None}, "no attention_config"),
        (
            {"attention_config": SimpleNamespace(backend="FLASHINFER")},
            "the backend FLASHINFER was asked for",
        ),
        (
            {
                "attention_config": SimpleNamespace(backend=None, flash_attn_version=2),
            },
            "FlashAttention 2 was asked for",
        ),
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
