"""What an engine samples, scored by the trainer: level 4 of a live engine."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm_engine_model import EngineModel, make_trainer

from jetrl_compile.errors import ModelError, RefitError
from jetrl_compile.integrations.vllm import command, engine
from jetrl_compile.integrations.vllm.log_probs import (
    gap_metrics,
    sample,
    trainer_log_probs,
)
from jetrl_compile.integrations.vllm.workers import drop_requests
from jetrl_compile.metrics import mismatch_metrics

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


class LLM:
    """vLLM's interface over a model in this process; it samples greedily."""

    def __init__(self, model: Any, log_probs: bool = True) -> None:
        self.model, self.log_probs, self.dropped = model, log_probs, 0
        self.left: dict[str, int] = {}
        self.queued: list[bool] = []  # steps, and whether they will fail
        self.llm_engine = SimpleNamespace(
            output_processor=SimpleNamespace(request_states=self.left),
            abort_request=self.abort,
            has_unfinished_requests=lambda: bool(self.left),
            step=self.step,
            engine_core=SimpleNamespace(
                engine_core=SimpleNamespace(batch_queue=self.queued)
            ),
        )

    def abort(self, names: list[str], internal: bool = False) -> None:
        assert internal, "vLLM knows what is left by names of its own"
        self.dropped += len(names)
        for name in names:
            del self.left[name]

    def step(self) -> None:
        if self.queued.pop():
            raise RefitError("a step that was queued before")

    def apply_model(self, function: Any) -> list[Any]:
        return [function(self.model)]

    def reset_prefix_cache(self) -> None:
        pass

    def generate(self, prompts: Any, wanted: Any, use_tqdm: bool) -> list[Any]:
        outputs = []
        for prompt in prompts:
            ids, answer, scores = list(prompt["prompt_token_ids"]), [], []
            for _ in range(wanted.max_tokens):
                positions = torch.arange(len(ids))
                with torch.no_grad():
                    hidden = self.model(torch.tensor(ids), positions)
                    logits = self.model.compute_logits(hidden)[-1]
                best = torch.log_softmax(logits.float(), -1).max(-1)
                ids.append(int(best.indices))
                answer.append(ids[-1])
                scores.append({ids[-1]: SimpleNamespace(logprob=float(best.values))})
            made = SimpleNamespace(
                token_ids=answer, logprobs=scores if self.log_probs else None
            )
            given = prompt["prompt_token_ids"]
            outputs.append(SimpleNamespace(prompt_token_ids=given, outputs=[made]))
        return outputs


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module `vllm` with what is asked of it."""
    module = ModuleType("vllm")
    vars(module)["SamplingParams"] = SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", module)


def test_scores_are_of_the_sampled_tokens() -> None:
    trainer = make_trainer("llama", num_hidden_layers=1)
    sampled = sample(LLM(EngineModel(trainer)), [[3, 4, 5], [7] * 6], 4)
    assert sampled.prompts == (3, 6)
    assert [len(tokens) for tokens in sampled.tokens] == [7, 10]
    assert sampled.mask.all()
    train = trainer_log_probs(trainer, sampled)
    assert train.shape == sampled.log_probs.shape
    assert (train - sampled.log_probs).abs().max() < 0.5
    ids = torch.tensor([sampled.tokens[1]])
    with torch.no_grad():
        logits = trainer.eval()(ids).logits[0].float()
    scores = torch.log_softmax(logits, -1)
    wanted = [scores[i - 1, sampled.tokens[1][i]] for i in range(6, 10)]
    assert torch.allclose(train[1], torch.stack(wanted), atol=1e-6)
    found = gap_metrics(sampled, train)
    assert found == mismatch_metrics(train, sampled.log_probs, sampled.mask)


def test_engine_without_log_probs() -> None:
    model = EngineModel(make_trainer("llama", num_hidden_layers=1))
    with pytest.raises(ModelError, match="logprobs=0"):
        sample(LLM(model, log_probs=False), [[3]], 1)


def test_refit_drops_what_a_refusal_left() -> None:
    trainer = make_trainer("llama", num_hidden_layers=1)
    llm = LLM(EngineModel(trainer))
    llm.left |= {"a": 1, "b": 2}
    llm.queued += [False, True]
    assert engine.refit(llm, trainer.named_parameters()) == 12
    assert (llm.dropped, llm.left, llm.queued) == (2, {}, [])
    llm.queued += [True]  # a step that no request waits for any more
    assert drop_requests(llm) == 0
    assert not llm.queued


def test_audit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainer = make_trainer("llama", num_hidden_layers=1)
    trainer.save_pretrained(tmp_path)  # type: ignore[operator]
    llm = LLM(EngineModel(trainer))
    monkeypatch.setattr(command, "load", lambda *_, **__: llm)
    monkeypatch.setattr(engine, "_live", _live)
    found = command.audit(tmp_path, sequences=2, length=3)
    assert found.log_prob_gap.shape == (2, 3)
    levels = {level.level: level.status for level in found.report.levels}
    assert (levels[1], levels[2], levels[3]) == ("passed", "passed", "passed")
    assert levels[4] == "failed"  # greedy choices, BF16 sums in another order
    wide = command.audit(tmp_path, sequences=2, length=3, tolerance=5.0)
    assert wide.report.exit_status == 0
    assert found.metrics["rollout_corr/k3_kl"] < 1e-2


def test_engine_is_as_long_as_the_audit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM ends sequences at its limit without a word."""
    asked: list[dict[str, Any]] = []

    def start(**settings: Any) -> Any:
        asked.append(settings)
        raise ValueError("max_model_len is greater than the derived one")

    vars(sys.modules["vllm"])["LLM"] = start
    with pytest.raises(ModelError, match=r"vLLM refuses .*max_model_len is greater"):
        command.audit(tmp_path, length=8192)
    assert asked[0]["max_model_len"] == 8200
    with pytest.raises(ModelError, match="vLLM refuses"):
        command.graph(tmp_path)
    assert asked[1]["max_model_len"] == 64


def _live(model: nn.Module) -> Any:
    from jetrl_compile.integrations.vllm.live_graph import trace_live
    from jetrl_compile.integrations.vllm.live_model import attention_facts, config_of

    config = config_of(model)
    return trace_live(
        model,
        config.settings(),
        fused=True,
        attributes=attention_facts(model),
        meta={"device": "cpu"},
    )
