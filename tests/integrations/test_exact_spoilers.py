"""The benchmark of spoilers, on a model in the shape of vLLM's, on a CPU."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner
from vllm_engine_model import EngineModel, make_trainer

from jetrl_compile.exact_attention import use_exact_attention
from jetrl_compile.graph_json import graph_to_json
from jetrl_compile.integrations.vllm import engine
from jetrl_compile.integrations.vllm.exact import align_rope_tables
from jetrl_compile.integrations.vllm.live_graph import trace_live
from jetrl_compile.integrations.vllm.live_model import (
    attention_facts,
    config_of,
    head_shapes,
)
from jetrl_compile.integrations.vllm.log_probs import Sampled
from jetrl_compile.integrations.vllm.settings import Settings
from jetrl_compile.kernels import exact_ops, reference_exact
from jetrl_compile.recipe import JETRL

EXACT = Settings(JETRL, ("reference",), exact=True)
PROMPT, LENGTH = 24, 24
NONE = (None, None)  # no mask, no positions
SPOILERS = (
    "two splits in decode",
    "SDPA in the trainer",
    "PyTorch's norm",
    "torch.mm as output head",
    "residual sum in FP32",
)
pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


class Impl:
    """Stands for vLLM's implementation of attention: reads keys from the first on."""

    splits = 1

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Any,
        attn_metadata: Any,
        output: Tensor,
    ) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        ends = [0, k.shape[2]]
        if self.splits == 2 and q.shape[2] == 1:
            ends.insert(1, ends[1] // 2)
        parts = [
            reference_exact.attention(q, k[:, :, a:b], v[:, :, a:b], *NONE, self.scale)
            for a, b in pairwise(ends)
        ]
        if len(parts) == 1:
            output[: len(query)] = parts[0][0][0]
            return output
        share = torch.stack([lse for _, lse in parts]).softmax(0)
        whole = sum(
            s.transpose(-1, -2).unsqueeze(-1) * out.float()
            for s, (out, _) in zip(share, parts, strict=True)
        )
        assert isinstance(whole, Tensor)
        output[: len(query)] = whole[0].to(output.dtype)
        return output


class Head:
    """Stands for the integration's method of an output head."""

    state = None

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        product: Tensor = exact_ops.bf16_gemm(x, layer.weight, "reference")
        return product


def live(model: Any) -> str:
    found = trace_live(
        model,
        config_of(model).settings(),
        fused=True,
        attributes=attention_facts(model),
        whole=head_shapes(model) or None,
        meta={"device": "cpu"},
    )
    return graph_to_json(found.graph)


class Pair:
    """An exact engine and its trainer; it samples as vLLM does, given tokens."""

    def __init__(self, module: Any, kind: str = "qwen3", pad: int = 1) -> None:
        self.replay = module("exact_values").replay
        trainer: Any = make_trainer(kind, vocab_size=4096).eval()
        use_exact_attention(trainer)
        model: Any = EngineModel(trainer, pad=pad)
        align_rope_tables(model, trainer.config)
        for layer in model.model.layers:
            attention = layer.self_attn.attn
            attention.quant_config = SimpleNamespace(attention="reference")
            attention.impl = Impl(attention.impl.scale)
        model.lm_head.quant_method = Head()
        self.trainer, self.model = trainer, model
        self.llm_engine = SimpleNamespace()

    def apply_model(self, function: Any) -> list[Any]:
        return [function(self.model)]

    def sample(self, _: Any, prompts: list[list[int]], length: int) -> Sampled:
        generator = torch.Generator().manual_seed(1)
        more = torch.randint(4096, (length,), generator=generator)
        tokens = torch.cat((torch.tensor(prompts[0]), more))

        def attend(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            layer = self.model.get_submodule(name)
            out = torch.empty((len(q) + 1, *q.shape[1:]), dtype=q.dtype)
            start = 0
            for end in range(PROMPT, len(q) + 1):  # the prompt, then a token a step
                own, given = out[start : end + 1], (q[start:end], k[:end], v[:end])
                step = SimpleNamespace(num_actual_tokens=end - start)
                layer.impl.forward(layer, *given, None, step, output=own)
                start = end
            return out[:-1]

        run = self.replay(self.model, tokens[:-1].int(), attend)
        logits = run.logits[PROMPT - 1 :]
        scores = exact_ops.log_probs(logits, more, 1.0, "aten")
        return Sampled((tuple(tokens.tolist()),), (PROMPT,), scores[None])


@contextmanager
def split(_: Any) -> Iterator[None]:
    Impl.splits = 2
    try:
        yield
    finally:
        Impl.splits = 1


def head(self: Any, own: Any, x: Tensor) -> Tensor:
    logits: Tensor = own.quant_method.apply(own, x)[..., : own.org_vocab_size]
    return logits


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import a benchmark, with what it takes of vLLM replaced."""
    load = importlib.import_module
    monkeypatch.setattr("vllm_engine_model.Config.settings", lambda _: EXACT)
    monkeypatch.setattr("vllm_engine_model.LogitsProcessor.forward", head)
    monkeypatch.setattr(engine, "graph_document", live)
    monkeypatch.setattr(
        load("exact_values"), "torch_wrap", lambda fused: nullcontext(fused)
    )
    monkeypatch.setitem(load("exact_plants").SPLITS, "reference", split)
    return load


@pytest.mark.parametrize("name", SPOILERS)
def test_a_spoiler_is_named_in_the_graph_and_in_bits(
    name: str, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilers = module("exact_spoilers")
    assert tuple(spoilers.SPOILERS) == SPOILERS
    pair = Pair(module)
    monkeypatch.setattr(spoilers, "sample", pair.sample)
    prompt = list(range(7, 7 + PROMPT))
    with spoilers.SPOILERS[name].plant(pair.model, pair.trainer):
        found = spoilers.examine(pair, pair.trainer, "aten", prompt, LENGTH)
    text, good = spoilers.judge(name, found)
    assert good, (text, found)
    assert spoilers.judge(spoilers.NOTHING, found)[1] is False
    other = "PyTorch's norm" if "norm" not in name else "SDPA in the trainer"
    assert "NOT FOUND in bits" in spoilers.judge(other, found)[0]


@pytest.mark.parametrize(("kind", "pad"), [("qwen3", 1), ("qwen2", 96)])
def test_an_exact_pair_is_equal_after_all_spoilers(
    kind: str, pad: int, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilers = module("exact_spoilers")
    pair = Pair(module, kind, pad)
    for one in spoilers.SPOILERS.values():
        with one.plant(pair.model, pair.trainer):
            pass
    monkeypatch.setattr(spoilers, "sample", pair.sample)
    found = spoilers.examine(pair, pair.trainer, "aten", [9] * PROMPT, LENGTH)
    assert spoilers.judge(spoilers.NOTHING, found) == (
        "24 of 24 log-probs equal, 24 when run again",
        True,
    )
    text, good = spoilers.judge("PyTorch's norm", found)
    assert not good
    assert text.count("NOT FOUND") == 3


class Answers:
    """Stands for the process with the engine."""

    found: Any = None

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def send(self, *_: Any) -> None:
        pass

    wait = stop = send

    def receive(self) -> Any:
        return self.found


@pytest.mark.parametrize(("good", "status"), [(True, 0), (False, 1)])
def test_command(
    good: bool,
    status: int,
    module: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    spoilers = module("exact_spoilers")
    monkeypatch.setattr(spoilers, "Worker", Answers)
    monkeypatch.setattr(Answers, "found", {"a": ("x", True), "b": ("y", good)})
    app = typer.Typer()
    app.command()(spoilers.main)
    result = CliRunner().invoke(app, ["--output", str(tmp_path / "out.json")])
    assert result.exit_code == status
    assert result.stdout.splitlines()[-1] == ("b: y" if good else "FAILED b: y")
