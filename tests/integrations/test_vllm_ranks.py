"""An engine of two ranks against the unsharded trainer: graphs, pushes, digests."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm_engine_model import EngineModel, make_trainer

from jetrl_compile.errors import ModelError, RefitError
from jetrl_compile.integrations.vllm import engine
from jetrl_compile.integrations.vllm.live_bytes import check_live_bytes
from jetrl_compile.integrations.vllm.live_graph import LiveGraph, trace_live
from jetrl_compile.integrations.vllm.live_model import (
    attention_facts,
    config_of,
    whole_shapes,
)
from jetrl_compile.integrations.vllm.ranks import chunks, push_to_ranks
from jetrl_compile.integrations.vllm.workers import rank_count

SIZES = {"num_key_value_heads": 4, "intermediate_size": 512}


class LLM:
    """vLLM's interface over the ranks' models; functions are sent as to processes."""

    def __init__(self, trainer: nn.Module, ranks: int = 2) -> None:
        self.models = [
            EngineModel(trainer, rank=rank, ranks=ranks) for rank in range(ranks)
        ]
        parallel = SimpleNamespace(tensor_parallel_size=ranks)
        self.llm_engine = SimpleNamespace(
            output_processor=SimpleNamespace(request_states={}),
            has_unfinished_requests=lambda: False,
            vllm_config=SimpleNamespace(parallel_config=parallel),
        )

    def apply_model(self, function: Any) -> list[Any]:
        sent = pickle.dumps(function)
        made = [pickle.loads(sent)(model) for model in self.models]
        found: list[Any] = pickle.loads(pickle.dumps(made))
        return found

    def reset_prefix_cache(self) -> None:
        pass


def live(model: EngineModel) -> LiveGraph:
    config = config_of(model)
    return trace_live(
        model,
        config.settings(),
        fused=config.fused,
        attributes=attention_facts(model),
        head=False,
        whole=whole_shapes(model),
        meta={"engine": "vllm", "tensor_parallel": "2", "device": "cpu"},
    )


def change(trainer: nn.Module, factor: float = 1.5) -> None:
    with torch.no_grad():
        for p in trainer.parameters():
            p.mul_(factor).add_(0.001)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_levels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_live", live)
    trainer = make_trainer(kind, **SIZES)
    llm = LLM(trainer)
    assert rank_count(llm) == 2
    report = engine.check_engine(llm, trainer)
    assert report.exit_status == 0, [d.message for d in report.differences]
    assert "partial_sums" in report.rollout_meta
    change(trainer)
    stale = engine.check_engine(llm, trainer)
    assert {one.level for one in stale.differences} == {3}
    assert engine.refit(llm, trainer.named_parameters()) == len(
        dict(trainer.named_parameters())
    )
    report = engine.check_engine(llm, trainer)
    assert report.exit_status == 0, [d.message for d in report.differences]
    weight: Tensor = llm.models[1].model.layers[1].mlp.down_proj.weight  # type: ignore[union-attr,assignment]
    weight.data[3, 5] = -weight.data[3, 5].float() + 1
    (found,) = engine.check_engine(llm, trainer).differences
    assert found.operator == "model.layers.1.mlp.down_proj:fprop"
    assert "down_proj.weight[0:256,256:512]: bytes differ" in found.message


def test_a_rank_says_what_does_not_fit() -> None:
    trainer = make_trainer("llama", **SIZES)
    llm = LLM(trainer)
    given = {name: p.detach().clone() for name, p in trainer.named_parameters()}
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(RefitError, match="missing"):
        push_to_ranks(llm, {key: w for key, w in given.items() if key != name})
    with pytest.raises(RefitError, match="has shape"):
        push_to_ranks(llm, {**given, name: given[name][:3]})
    for model in llm.models:
        config_of(model).state.check()  # nothing was written
    given[name][500, 3] = float("nan")  # on the second rank
    with pytest.raises(RefitError, match="NaN or infinity"):
        push_to_ranks(llm, given)
    for model in llm.models:  # the first would wait for the second
        with pytest.raises(RefitError, match="refuses"):
            config_of(model).state.check()
    given[name][500, 3] = 0
    push_to_ranks(llm, given)
    for model in llm.models:
        config_of(model).state.check()


def test_a_rank_that_fails_is_told_by_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a result: vLLM would take what other ranks answer for the next answers."""
    trainer = make_trainer("llama", **SIZES)
    llm = LLM(trainer)
    given = {name: p.detach().clone() for name, p in trainer.named_parameters()}

    def fail(_: Any) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(EngineModel, "load_weights", lambda self, _: fail(self))
        with pytest.raises(ModelError, match="failed: OSError: the disk is full"):
            push_to_ranks(llm, given)
    assert "the disk is full" in capsys.readouterr().err
    for model in llm.models:
        with pytest.raises(RefitError, match="interrupted"):
            config_of(model).state.check()
    push_to_ranks(llm, given)
    for model in llm.models:
        config_of(model).state.check()


def test_engine_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank too: functions must be allowed, and weights come in chunks."""
    trainer = make_trainer("llama", **SIZES)
    llm = LLM(trainer, ranks=1)
    change(trainer)
    given = dict(trainer.named_parameters())
    llm.llm_engine.engine_core = object()
    with pytest.raises(ModelError, match="VLLM_ALLOW_INSECURE_SERIALIZATION=1"):
        engine.refit(llm, given)
    with pytest.raises(ModelError, match="VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        engine.engine_graph(llm)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    sent: list[int] = []
    plain = llm.apply_model

    def apply(function: Any) -> list[Any]:
        sent.append(len(pickle.dumps(function)))
        return plain(function)

    llm.apply_model = apply  # type: ignore[method-assign]
    monkeypatch.setattr("jetrl_compile.integrations.vllm.ranks.CHUNK", 1 << 10)
    assert engine.refit(llm, given) == len(given)
    assert len(sent) > 4  # check, begin, chunks, settle, release
    whole = sum(p.numel() * p.element_size() for p in given.values())
    assert max(sent) < 0.6 * whole
    result, found = check_live_bytes(llm.models[0], given)
    assert (result.status, found) == ("passed", [])


def test_push_that_cannot_begin() -> None:
    trainer = make_trainer("llama", **SIZES)
    llm = LLM(trainer, ranks=1)
    given = dict(trainer.named_parameters())
    llm.llm_engine.model_executor = SimpleNamespace(sleeping_tags={"weights"})
    with pytest.raises(RefitError, match=r"asleep; call llm\.wake_up"):
        engine.refit(llm, given)
    llm.llm_engine.model_executor.sleeping_tags = {"kv_cache"}
    llm.reset_prefix_cache = lambda: False  # type: ignore[method-assign,assignment]
    with pytest.raises(RefitError, match="prefix cache is in use"):
        engine.refit(llm, given)
    cache = SimpleNamespace(enable_prefix_caching=False)
    llm.llm_engine.vllm_config.cache_config = cache
    assert engine.refit(llm, given) == len(given)


def test_chunks_hold_whole_layers() -> None:
    trainer = make_trainer("llama")
    given = dict(trainer.named_parameters())
    for most in (1, 1 << 20, 1 << 30):
        made = list(chunks(given, most))
        assert [name for chunk in made for name in chunk] == list(given)
        for index in (0, 1):
            with_layer = [c for c in made if any(f".{index}." in n for n in c)]
            assert len(with_layer) == 1
    assert len(list(chunks(given, 1))) == 5  # embedding, two layers, norm, head
