"""Exact mode in verl: old log-probs are the rollout's, bit for bit; one rank, a CPU."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import verl_workers as workers

from jetrl_compile.errors import (
    ContainmentError,
    LoweringError,
    ModelError,
    RecipeError,
)
from jetrl_compile.examples.verl_grpo.make_model import make_model
from jetrl_compile.kernels import exact_ops

pytest.importorskip("verl", reason="verl has an environment of its own: make test-verl")
import verl_vllm_doubles as doubles
from vllm_engine_model import EngineModel

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPTS = ([5, 6, 7, 9], [11, 12, 13, 14, 15])


def model_config(folder: Path, **override: Any) -> Any:
    override.setdefault("attn_implementation", "jetrl_exact")
    return workers.model_config(folder, jetrl_exact=True, **override)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("tiny", path, layers=None, seed=0)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Any]:
    workers.start()
    made = workers.make_engine(model_config(folder))
    made.initialize()
    config: Any = torch._dynamo.config
    with config.patch(recompile_limit=64):  # rollout and trainer share a process here
        yield made
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def server(engine: Any) -> Any:
    from jetrl_compile.integrations.verl_cpu.server import CPUServer

    config = engine.model_config
    made = CPUServer(
        config.local_path,
        config.hf_config,
        engine.settings,
        8,
        seed=0,
        vocabulary=len(config.tokenizer),
    )
    push(engine, made)
    return made


def push(engine: Any, server: Any) -> None:
    async def run() -> None:
        await server.begin_sync(1)
        if engine.sync.report is None:
            engine.sync.check_graph(server.graph)
        weights, _ = engine.get_per_tensor_param()
        stored = await server.load_weights(dict(weights))
        engine.sync.check_bytes([stored], 1)
        await server.end_sync(1)

    asyncio.run(run())


def sampled(server: Any, temperature: float = 1.0) -> tuple[list[list[int]], list[Any]]:
    """Rows of tokens, and the log-probs of the answers in them."""
    rows, scores = [], []
    for prompt in PROMPTS:
        parameters = {"temperature": temperature}
        output = asyncio.run(server.generate("0", prompt, parameters))
        rows.append(prompt + output.token_ids)
        scores.append(torch.tensor(output.log_probs))
    return rows, scores


def batch(rows: list[list[int]], scores: list[Any], **settings: Any) -> Any:
    """verl's batch of sampled rows, with the rollout's log-probs."""
    from verl.utils import tensordict_utils as tu

    data = workers.batch(rows)
    for name, tensors in (
        ("rollout_log_probs", scores),
        ("response_mask", [torch.ones(len(each)) for each in scores]),
    ):
        data[name] = torch.nested.nested_tensor(list(tensors), layout=torch.jagged)
    tu.assign_non_tensor(data, **settings)
    return data


def infer(engine: Any, data: Any) -> list[torch.Tensor]:
    with engine.eval_mode():
        out = engine.infer_batch(data)["model_output"]
    assert out["entropy"].values().isfinite().all()
    return [row[:-1] for row in out["log_probs"].unbind()]


def answers(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    return [row[len(prompt) - 1 :] for row, prompt in zip(rows, PROMPTS, strict=True)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("packed", [True, False])
def test_old_log_probs_are_the_rollouts(
    engine: Any, server: Any, temperature: float, packed: bool
) -> None:
    push(engine, server)
    rows, scores = sampled(server, temperature)
    settings = {"temperature": temperature, "use_remove_padding": packed}
    trained = infer(engine, batch(rows, scores, **settings))
    for own, theirs in zip(answers(trained), scores, strict=True):
        assert own.dtype == torch.float32
        assert torch.equal(own, theirs)
    assert engine.sync.metrics()["jetrl/equal_log_probs"] == 1.0
    workers.train(engine, workers.random_rows(int(10 * temperature)))


def test_training_has_the_bits_of_the_old_log_probs(engine: Any) -> None:
    rows = workers.random_rows(3)
    old = workers.log_probs(engine, rows)
    found: list[torch.Tensor] = []

    def loss(model_output: Any, data: Any, dp_group: Any) -> Any:
        log_probs = model_output["log_probs"]
        found.extend(row.detach()[:-1] for row in log_probs.unbind())
        return -log_probs.values().mean(), {}

    with engine.train_mode():
        engine.train_batch(workers.batch(rows), loss_function=loss)
    assert all(torch.equal(a, b) for a, b in zip(old, found, strict=True))
    own = "model.norm", "lm_head"
    assert set(own) <= {report.module for report in engine.ledger.reports}


def test_a_temperature_for_each_sequence() -> None:
    from jetrl_compile.integrations.verl.exact import SLICE, packed_log_probs

    generator = torch.Generator().manual_seed(0)
    lengths, temperatures = [SLICE + 3, 5, 2], [1.0, 0.5, 0.5]
    logits = torch.randn(sum(lengths), 24, generator=generator).bfloat16()
    labels = torch.randint(20, (len(logits),), generator=generator)
    leaf = logits.clone().requires_grad_()
    found = packed_log_probs(
        leaf, labels, lengths, temperatures, vocabulary=20, kernel="aten"
    )
    masked = logits.clone()
    masked[:, 20:] = -torch.inf
    rows, own = torch.split(masked, lengths), torch.split(labels, lengths)
    parts = zip(rows, own, temperatures, strict=True)
    wanted = [exact_ops.log_probs(x, y, t, "aten") for x, y, t in parts]
    assert torch.equal(found, torch.cat(wanted))
    torch.autograd.backward(found.sum())
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()
    assert not leaf.grad[:, 20:].any()
    assert leaf.grad[:, :20].all()


def test_another_log_prob_stops_the_run(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    push(engine, server)
    rows, scores = sampled(server)
    scores[1] = scores[1].clone()
    scores[1][2] = scores[1][2].nextafter(torch.tensor(0.0))
    words = rf"1 of {sum(map(len, scores))} sampled tokens .* token 2 of response 1"
    with pytest.raises(ContainmentError, match=words):
        infer(engine, batch(rows, scores))
    assert 0.8 < engine.sync.metrics()["jetrl/equal_log_probs"] < 1.0
    settings = replace(engine.sync.settings, on_violation="warn")
    monkeypatch.setattr(engine.sync, "settings", settings)
    infer(engine, batch(rows, scores))
    assert "WARNING: jetrl: exact mode: 1 of" in capsys.readouterr().out


@pytest.mark.parametrize("path", ["lm_head", "model.norm"])
def test_an_eager_head_or_norm(engine: Any, path: str) -> None:
    module = engine.module.get_submodule(path)
    kept, module._compiled_call_impl = module._compiled_call_impl, None
    engine.ledger.ran.pop("old log-prob", None)
    try:
        with pytest.raises(LoweringError, match=f"ran {path} without exact kernels"):
            workers.log_probs(engine, workers.random_rows())
    finally:
        module._compiled_call_impl = kept
        engine.ledger.ran.pop("old log-prob", None)


def test_sdpa_in_the_place_of_exact_attention(
    folder: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from jetrl_compile.integrations.verl.sync import set_current

    functions = AttentionInterface._global_mapping
    monkeypatch.setitem(functions, "jetrl_exact", sdpa_attention_forward)
    spoiled = workers.make_engine(model_config(folder))
    words = r"layers\.0\.self_attn:attention \(attention\) is run by aten"
    try:
        with pytest.raises(LoweringError, match=words):
            spoiled.initialize()
    finally:
        set_current(engine.sync)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"jetrl_recipe": "bf16"}, "does not go with recipe 'bf16'"),
        ({"jetrl_recipe": "rollout_only"}, "does not go with recipe 'rollout_only'"),
        ({"jetrl_level": 0}, "does not go with jetrl_level=0"),
        ({"attn_implementation": "sdpa"}, "attn_implementation='sdpa'"),
    ],
)
def test_settings_that_contradict_it(override: Any, words: str) -> None:
    from jetrl_compile.integrations.verl.settings import read_settings

    with pytest.raises(RecipeError, match=words):
        read_settings({"jetrl_exact": True, **override})
    with pytest.raises(RecipeError, match="jetrl_exact='yes' is unknown"):
        read_settings({"jetrl_exact": "yes"})


def test_configs_that_contradict_it(folder: Path, engine: Any) -> None:
    model = model_config(folder)
    object.__setattr__(model, "use_fused_kernels", True)
    object.__setattr__(model.hf_config, "vision_config", {})
    words = "ulysses_sequence_parallel_size=2.*use_fused_kernels.*models with images"
    with pytest.raises(ModelError, match=words):
        workers.make_engine(model, ulysses_sequence_parallel_size=2)


def test_rollouts_that_contradict_it() -> None:
    from verl.workers.config import RolloutConfig

    from jetrl_compile.integrations.verl.settings import read_settings
    from jetrl_compile.integrations.verl_vllm.config import runs_jetrl, set_defaults

    settings = read_settings({"jetrl_exact": True})
    given: dict[str, Any] = {"name": "vllm", "tensor_model_parallel_size": 1}
    assert runs_jetrl(RolloutConfig(**given), settings)
    wrong = {
        "tensor_model_parallel_size": 2,
        "enforce_eager": True,
        "logprobs_mode": "raw_logprobs",
        "top_p": 0.9,
    }
    with pytest.raises(RecipeError) as error:
        runs_jetrl(RolloutConfig(**{**given, **wrong}), settings)
    assert all(name in str(error.value) for name in wrong)
    kwargs: dict[str, Any] = {}
    set_defaults(kwargs, settings)
    assert kwargs["additional_config"] == {"jetrl": {"recipe": "jetrl", "exact": True}}
    wrong = {"additional_config": {"jetrl": {"exact": False}}}
    with pytest.raises(RecipeError, match="exact is False, and the trainer's"):
        set_defaults(wrong, settings)


class Pair:
    """A trainer's engine, and a replica of vLLM's in exact mode."""

    def __init__(self, engine: Any, attention: str) -> None:
        import transformers

        from jetrl_compile.integrations.vllm.settings import Settings
        from jetrl_compile.recipe import JETRL

        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        path = engine.model_config.local_path
        model: Any = EngineModel(load(path, dtype=torch.bfloat16))
        config = model.config_of_engine
        config.attention, config.log_probs = attention, "blocks"
        settings = Settings(JETRL, ("reference",), exact=True)
        config.settings = lambda: settings
        for layer in model.model.layers:
            own = SimpleNamespace(attention=attention)
            layer.self_attn.attn.quant_config = own
        self.table = model.model.layers[0].self_attn.rotary_emb.cos_sin_cache
        self.table[3, 5] += 1
        self.rpc = doubles.Engine(doubles.make_worker(model))
        server = doubles.make_server(self.rpc)
        self.adapter = doubles.make_adapter(engine.model_config, server)
        self.engine = engine
        engine.sync.report = None

    def push(self, step: int) -> None:
        weights, _ = self.engine.get_per_tensor_param()
        asyncio.run(self.adapter.update_weights(weights, global_steps=step))


@pytest.fixture
def vllm(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def head(self: Any, layer: Any, x: torch.Tensor) -> Any:
        return exact_ops.bf16_gemm(x, layer.weight, "reference")

    monkeypatch.setattr("vllm_engine_model.LogitsProcessor.forward", head)
    kept, shards = engine.sync.log_probs, engine.sync._shards
    with doubles.vllm_installed(monkeypatch):
        yield
    engine.sync.log_probs, engine.sync._shards = kept, shards


@pytest.mark.usefixtures("vllm")
def test_vllms_tables_and_kernel_are_asked_for_once(engine: Any) -> None:
    pair = Pair(engine, "reference")
    pair.push(1)
    assert engine.sync.report.contained is True, engine.sync.report.differences
    assert engine.sync.log_probs == "blocks"
    assert float(pair.table[3, 5]) <= 1.0, "cosines and sines again"
    pair.push(2)
    assert pair.rpc.calls.count("jetrl_prepare") == 1
    first = pair.rpc.calls.index("jetrl_prepare")
    assert first < pair.rpc.calls.index("update_weights_from_ipc")


@pytest.mark.usefixtures("vllm")
def test_another_attention_in_vllm_stops_the_run(engine: Any) -> None:
    pair = Pair(engine, "triton")
    with pytest.raises(ContainmentError, match=r"layers\.0\.self_attn:attention"):
        pair.push(1)
