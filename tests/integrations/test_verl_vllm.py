"""verl's weight sync into vLLM with the checks: verl's own transfer, one process.

Nothing here is vLLM's: the model has the shape of its models, and a thread stands for
its worker.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import verl_workers as workers

from jetrl_compile.errors import ContainmentError, ModelError, RecipeError, RefitError
from jetrl_compile.examples.verl_grpo.make_model import make_model
from jetrl_compile.report_json import read_report

pytest.importorskip("verl", reason="verl has an environment of its own: make test-verl")
import verl_vllm_doubles as doubles
from vllm_engine_model import EngineModel

pytestmark = pytest.mark.filterwarnings("ignore")
TENSORS = 14 * 2 + 11


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("tiny", path, layers=None, seed=0)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Any]:
    workers.start()
    model = workers.model_config(folder, jetrl_reports=str(folder / "reports"))
    made = workers.make_engine(model)
    made.initialize()
    workers.train(made, workers.random_rows())
    yield made
    torch.distributed.destroy_process_group()


class Pair:
    """A trainer's engine and a replica that it feeds."""

    def __init__(self, engine: Any, **settings: Any) -> None:
        import transformers

        self.engine = engine
        self.settings = settings
        path = engine.model_config.local_path
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        trainer = load(path, dtype=torch.bfloat16)
        self.model: Any = EngineModel(trainer)
        self.worker = doubles.make_worker(self.model)
        self.worker.monkey_patch_model(260)  # as verl's server does
        self.rpc = doubles.Engine(self.worker)
        self.server = doubles.make_server(self.rpc)
        engine.sync.report = None

    def adapter(self) -> Any:
        config = self.engine.model_config
        return doubles.make_adapter(config, self.server)

    def push(self, step: int = 1, adapter: Any = None) -> Any:
        made = adapter or self.adapter()
        weights, peft = self.engine.get_per_tensor_param(
            layered_summon=False, base_sync_done=True
        )
        asyncio.run(
            made.update_weights(
                weights, peft_config=peft, base_sync_done=True, global_steps=step
            )
        )
        return made

    def refusal(self) -> str:
        """Why the server refuses a request; "" if it does not."""
        try:
            asyncio.run(self.server._park_until_admitted("0"))
        except RefitError as error:
            return str(error)
        return ""

    def logits(self) -> torch.Tensor:
        self.model.config_of_engine.state.check()
        ids = torch.arange(16) * 7 % 256 + 4
        with torch.no_grad():
            made: torch.Tensor = self.model.compute_logits(
                self.model(ids, torch.arange(16))
            )
        return made


@pytest.fixture
def pair(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with doubles.vllm_installed(monkeypatch):
        yield Pair(engine)


def test_first_sync_checks_levels_1_to_3(pair: Pair, folder: Path) -> None:
    assert "no weights came" in pair.refusal()
    adapter = pair.push()
    report = read_report(folder / "reports" / "containment-rank0.json")
    assert [level.status for level in report.levels[:3]] == ["passed"] * 3
    assert report.level(3).counts["tensors"] == TENSORS
    assert pair.refusal() == ""
    assert pair.logits()[0, 260:].isneginf().all()
    assert pair.server._admitting == 1
    assert pair.server.global_steps == 1
    first = list(pair.rpc.calls)
    assert first.index("jetrl_graph") < first.index("update_weights_from_ipc")
    pair.rpc.calls.clear()
    workers.train(pair.engine, workers.random_rows(5))
    pair.push(2, adapter)
    assert pair.rpc.calls == [
        "jetrl_begin",
        "update_weights_from_ipc",
        "reset_prefix_cache",
        "jetrl_digests",
        "jetrl_release",
    ]
    assert pair.engine.sync.metrics()["jetrl/level_3_bytes"] == 1.0


def test_both_wires_give_equal_bytes(
    pair: Pair, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.push()
    bf16 = {n: p.clone() for n, p in pair.model.named_parameters()}
    logits, sent = pair.logits(), engine.sync.sent_bytes
    for parameter in pair.model.parameters():
        parameter.data.zero_()
    settings = replace(engine.sync.settings, wire="fp8")
    monkeypatch.setattr(engine.sync, "settings", settings)
    quantized: list[str] = []
    monkeypatch.setattr(
        "jetrl_compile.integrations.vllm.storage.quantize_part",
        lambda *_: quantized.append("part"),
    )
    pair.push()
    assert not quantized, "the rollout writes what came"
    for name, parameter in pair.model.named_parameters():
        wanted = bf16[name].view(torch.uint8)
        assert torch.equal(parameter.data.view(torch.uint8), wanted), name
    assert torch.equal(pair.logits(), logits)
    plain = sum(
        p.nbytes for n, p in pair.model.named_parameters() if bf16[n].dtype != E4M3
    )
    assert engine.sync.sent_bytes < 0.6 * sent
    assert engine.sync.sent_bytes > plain


def test_small_buckets(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes and scales of a layer come in different buckets."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import (
        BucketedWeightSender,
    )

    from jetrl_compile.integrations.verl_vllm.worker import WorkerExtension

    init, take = BucketedWeightSender.__init__, WorkerExtension._update_weights
    buckets: list[int] = []

    def small(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.bucket_size = 180_000

    def noting(self: Any, weights: Any, **kwargs: Any) -> None:
        buckets.append(len(weights))
        take(self, weights, **kwargs)

    monkeypatch.setattr(BucketedWeightSender, "__init__", small)
    monkeypatch.setattr(WorkerExtension, "_update_weights", noting)
    pair.push()
    assert len(buckets) > 5
    assert pair.refusal() == ""


def test_weights_written_elsewhere(pair: Pair) -> None:
    """A stale weight and a wrong scale, each named."""
    adapter = pair.push()
    layer = pair.model.model.layers[1].mlp.gate_up_proj
    stale = layer.weight.data[320:].clone()
    workers.train(pair.engine, workers.random_rows(6))
    take = pair.worker.jetrl_syncs.finish

    def spoil() -> int:
        layer.weight.data[320:] = stale
        count: int = take()
        return count

    pair.worker.jetrl_syncs.finish = spoil
    with pytest.raises(ContainmentError, match=r"step 2.*1 difference,") as error:
        pair.push(2, adapter)
    assert "model.layers.1.mlp.up_proj.weight" in str(error.value)
    assert "sync of step 2 was not finished" in pair.refusal()
    with pytest.raises(RefitError, match="sync of step 2 was not finished"):
        pair.logits()


def test_warn_lets_it_generate(
    pair: Pair, engine: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    settings = replace(engine.sync.settings, on_violation="warn")
    monkeypatch.setattr(engine.sync, "settings", settings)
    adapter = pair.push()
    norm = pair.model.model.norm.weight.data
    finish = pair.worker.jetrl_syncs.finish
    pair.worker.jetrl_syncs.finish = lambda: (norm.add_(1), finish())[1]
    pair.push(2, adapter)
    assert "WARNING: jetrl: level 3 after the weight sync of step 2" in (
        capsys.readouterr().out
    )
    assert pair.refusal() == ""
    assert engine.sync.metrics()["jetrl/contained"] == 0.0


def test_a_sync_without_a_tensor(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = pair.push()
    stream = pair.engine.get_per_tensor_param

    def short(**kwargs: Any) -> Any:
        weights, peft = stream(**kwargs)
        return (w for w in weights if w[0] != "model.norm.weight"), peft

    monkeypatch.setattr(pair.engine, "get_per_tensor_param", short)
    with pytest.raises(RefitError, match=r"left out 1 of 39 .*model\.norm\.weight"):
        pair.push(2, adapter)
    assert "sync of step 2 was not finished" in pair.refusal()
    with pytest.raises(RefitError, match="sync of step 2 was not finished"):
        pair.logits()


def test_a_sync_that_stops(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer fails in the middle of a sync; some weights are new, others old."""
    pair.push()
    model, worker = pair.model, pair.worker
    worker.jetrl_begin(2)
    weights, _ = pair.engine.get_per_tensor_param()
    worker._update_weights([next(weights) for _ in range(4)], None, True)
    with pytest.raises(RefitError, match=r"left out \d+ of 39 tensors, first"):
        worker.jetrl_release()
    with pytest.raises(RefitError, match="sync of step 2 was not finished"):
        model.config_of_engine.state.check()
    pair.push(3)
    assert pair.logits()[:, :260].isfinite().all()


@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_nan_is_refused_and_nobody_waits(
    pair: Pair, engine: Any, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(engine.sync.settings, wire=wire)
    monkeypatch.setattr(engine.sync, "settings", settings)
    adapter = pair.push()
    master = dict(engine.module.named_parameters())[
        "model.layers.0.mlp.down_proj.weight"
    ].to_local()
    kept = master.detach().clone()
    with torch.no_grad():
        master[0, 0] = float("nan")
    try:
        with pytest.raises(RefitError, match=r"NaN.*layers\.0\.mlp\.down_proj"):
            pair.push(2, adapter)
        assert "sync of step 2 was not finished" in pair.refusal()
    finally:
        with torch.no_grad():
            master.copy_(kept)
    pair.push(3, adapter)
    assert pair.refusal() == ""


def test_sleep_forgets_weights(pair: Pair) -> None:
    pair.push()
    pair.server._resolve_sleep_level = lambda: 2
    pair.server._forget_weights()
    assert "it slept, and no weights came" in pair.refusal()


def test_native_norms_are_found(pair: Pair, engine: Any) -> None:
    pair.model.config_of_engine.fused = False
    with pytest.raises(ContainmentError, match=r"levels 1 and 2 of replica 0"):
        pair.push()
    assert "sync of step 1 was not finished" in pair.refusal()


def test_level_0_checks_nothing_and_sends_whole_syncs(pair: Pair, engine: Any) -> None:
    adapter = pair.adapter()
    adapter.settings = replace(adapter.settings, level=0)
    engine.sync.expect(None, checked=False)
    pair.push(1, adapter)
    assert not {"jetrl_graph", "jetrl_layout", "jetrl_digests"} & set(pair.rpc.calls)
    assert engine.sync.report is None
    assert pair.refusal() == ""


def test_a_worker_that_asks_nobody(pair: Pair, engine: Any) -> None:
    """The second of two workers that feed the ranks of one replica."""
    adapter = pair.adapter()
    asyncio.run(adapter._before(engine.sync, asks=False))
    assert len(dict(engine.get_per_tensor_param()[0])) == 25
    assert engine.sync._wanted == {}
    assert pair.rpc.calls == []


def test_bf16_leaves_vllm_as_it_comes(pair: Pair, engine: Any) -> None:
    from jetrl_compile.recipe import BF16

    config = engine.model_config
    kept = dict(config.override_config)
    config.override_config["jetrl_recipe"] = "bf16"
    try:
        adapter = pair.adapter()
    finally:
        config.override_config.clear()
        config.override_config.update(kept)
    assert adapter.settings.recipe == BF16
    assert not adapter._runs_jetrl
    server = doubles.make_server(pair.rpc, runs_jetrl=False)
    server.config = adapter.config
    assert server._get_worker_extension_cls().startswith("verl.")
    kwargs: dict[str, Any] = {}
    server._preprocess_engine_kwargs(kwargs)
    assert kwargs == {}


def test_verls_registries_give_them(pair: Pair) -> None:
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import get_rollout_replica_class

    from jetrl_compile.integrations.verl_vllm import adapter, server

    assert get_rollout_class("vllm") is adapter.ServerAdapter
    assert get_rollout_replica_class("vllm") is server.Replica
    assert pair.server._get_worker_extension_cls() == server.EXTENSION


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"quantization": "fp8"}, RecipeError, "rollout.quantization is 'fp8'"),
        (
            {"engine_kwargs": {"vllm": {"quantization": "fp8"}}},
            RecipeError,
            "quantization is 'fp8', and recipe 'jetrl' needs 'jetrl'",
        ),
        (
            {"checkpoint_engine": {"backend": "nccl"}},
            ModelError,
            "backend is 'nccl'.*backend=naive, or jetrl_level=0",
        ),
    ],
)
def test_configs_that_are_refused(
    pair: Pair, config: Any, error: type[Exception], words: str
) -> None:
    from verl.workers.config import CheckpointEngineConfig

    if "checkpoint_engine" in config:
        config = {"checkpoint_engine": CheckpointEngineConfig(backend="nccl")}
    with pytest.raises(error, match=words):
        doubles.make_adapter(pair.engine.model_config, pair.server, **config)


def test_arguments_of_vllm(pair: Pair, engine: Any) -> None:
    from jetrl_compile.integrations.verl_vllm.config import set_defaults

    kwargs: dict[str, Any] = {"max_model_len": 64, "additional_config": {"other": 1}}
    set_defaults(kwargs, engine.settings)
    assert kwargs == {
        "max_model_len": 64,
        "quantization": "jetrl",
        "additional_config": {"other": 1, "jetrl": {"recipe": "jetrl"}},
    }
    wrong = {"additional_config": {"jetrl": {"recipe": "jetrl_paper"}}}
    with pytest.raises(RecipeError, match="recipe is 'jetrl_paper', and the trainer's"):
        set_defaults(wrong, engine.settings)


E4M3 = torch.float8_e4m3fn
