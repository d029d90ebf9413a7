"""verl's FSDP2 engine with FP8 layers, and planted faults; one rank, on a CPU."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import verl_workers as workers

from jetrl_compile.errors import (
    ContainmentError,
    JetRLError,
    LoweringError,
    ModelError,
    RefitError,
)
from jetrl_compile.examples.verl_grpo.make_model import make_model
from jetrl_compile.precision_graph import PrecisionGraph
from jetrl_compile.report_json import read_report

pytest.importorskip("verl", reason="verl has an environment of its own: make test-verl")
# verl and its imports warn of engines that are not installed, and of their own code.
pytestmark = pytest.mark.filterwarnings("ignore")
GEMMS = 14  # seven in each of two layers
SCALES = 14
OTHERS = 11  # embedding, head, norms


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("tiny", path, layers=None, seed=0)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Any]:
    """A trained engine: gradient checkpointing, two micro-batches, no padding."""
    workers.start()
    model = workers.model_config(folder, jetrl_reports=str(folder / "reports"))
    made = workers.make_engine(model)
    made.initialize()
    made.first = workers.train(made, workers.random_rows())
    yield made
    torch.distributed.destroy_process_group()


@pytest.fixture
def server(engine: Any) -> Any:
    """A rollout server that the engine may feed."""
    from jetrl_compile.integrations.verl_cpu.server import CPUServer

    model = engine.model_config
    engine.sync.report = None
    return CPUServer(model.local_path, model.hf_config, engine.settings, 8, seed=0)


def push(engine: Any, server: Any, step: int = 1) -> int:
    """A weight sync, checked, as the adapter does it; how many tensors differ."""

    async def run() -> int:
        await server.begin_sync(step)
        if engine.sync.report is None:
            engine.sync.check_graph(server.graph)
        weights, _ = engine.get_per_tensor_param()
        stored = await server.load_weights(dict(weights))
        found: int = engine.sync.check_bytes([stored], step)
        await server.end_sync(step)
        return found

    return asyncio.run(run())


def fprops(engine: Any) -> set[str]:
    ran = engine.ledger.ran["actor update"]
    return {name for name in ran if name.endswith(":fprop")}


def generate(server: Any, prompt: list[int]) -> Any:
    return asyncio.run(server.generate("0", prompt, {"temperature": 1.0}))


def test_the_registry_gives_the_engine(engine: Any) -> None:
    assert type(engine).__name__ == "JetRLEngine"
    kept = [key for key in vars(engine.model_config.hf_config) if "jetrl_l" in key]
    assert not kept, "settings must not reach a checkpoint's config"


def test_training_runs_every_gemm_in_fp8(engine: Any) -> None:
    assert engine.first["jetrl/fp8_gemms"] == [3 * GEMMS]
    assert engine.first["grad_norm"] > 0
    training = [r for r in engine.ledger.reports if r.training]
    assert {r.module for r in training} == {"model.layers.0"}, "layers share graphs"
    # Of every graph: with dynamic integers q, k, v and o have no FP8 wgrad.
    assert all(set(r.lowered.values()) == {7} for r in training)


def test_old_log_probs_run_the_same_gemms_and_are_fp32(engine: Any) -> None:
    rows = workers.log_probs(engine, workers.random_rows())
    assert [len(row) for row in rows] == [n - 1 for n in workers.LENGTHS]
    assert rows[0].dtype == torch.float32
    assert engine.ledger.ran["old log-prob"] == fprops(engine)
    assert len(fprops(engine)) == GEMMS


def test_reference_model(folder: Path, engine: Any) -> None:
    reference = workers.make_engine(workers.model_config(folder), forward_only=True)
    reference.initialize()
    rows = workers.random_rows()
    own, trained = workers.log_probs(reference, rows), workers.log_probs(engine, rows)
    assert reference.ledger.ran["reference"] == fprops(engine)
    assert reference.sync is None
    # The engine has learned these rows.
    assert torch.cat(trained).mean() > torch.cat(own).mean() + 0.1


@pytest.mark.parametrize("offload", ["", "param_offload", "offload_policy"])
def test_a_reference_model_that_stays_on_the_device(
    folder: Path, engine: Any, monkeypatch: pytest.MonkeyPatch, offload: str
) -> None:
    # verl would ask for pinned memory, which is not to be had here.
    from jetrl_compile.integrations.verl import engine as engine_module
    from jetrl_compile.integrations.verl.sync import set_current

    monkeypatch.setattr(engine_module, "_has_accelerator", lambda: True)
    config = workers.model_config(folder, jetrl_resident_reference=True)
    asked: Any = {offload: True} if offload else {}
    reference = workers.make_engine(config, forward_only=True, **asked)
    reference.initialize()
    assert reference.engine_config.forward_only
    assert not reference.is_param_offload_enabled
    assert {p.dtype for p in reference.module.parameters()} == {torch.bfloat16}
    rows = workers.random_rows()
    masters = workers.make_engine(workers.model_config(folder))  # in FP32
    masters.initialize()
    set_current(engine.sync)
    own = workers.log_probs(reference, rows)
    for one, other in zip(own, workers.log_probs(masters, rows), strict=True):
        assert torch.equal(one, other)
    assert reference.ledger.ran["reference"] == fprops(engine)


def test_padding_offload_and_no_checkpointing(folder: Path, engine: Any) -> None:
    from jetrl_compile.integrations.verl.sync import set_current

    model = workers.model_config(folder, packed=False, checkpointing=False)
    try:
        other = workers.make_engine(model, param_offload=True, optimizer_offload=True)
        other.initialize()
        metrics = workers.train(other, workers.random_rows())
    finally:
        set_current(engine.sync)
    assert metrics["jetrl/fp8_gemms"] == [3 * GEMMS]
    # wgrad groups run along tokens, and padding is tokens: equal but for that.
    assert metrics["grad_norm"] == pytest.approx(engine.first["grad_norm"], rel=0.01)


@pytest.mark.parametrize(
    ("phase", "words"),
    [("actor update", "21 of 42"), ("old log-prob", "7 of 14")],
)
def test_a_layer_left_in_bf16_in_one_phase(engine: Any, phase: str, words: str) -> None:
    layer = engine.module.model.layers[1]
    kept, layer._compiled_call_impl = layer._compiled_call_impl, None
    engine.ledger.ran.pop(phase, None)
    run = workers.train if phase == "actor update" else workers.log_probs
    try:
        with pytest.raises(LoweringError, match=f"{phase}.* {words}") as error:
            run(engine, workers.random_rows())
    finally:
        layer._compiled_call_impl = kept
        engine.ledger.ran.pop(phase, None)
    assert "model.layers.1.mlp.down_proj:" in str(error.value)


def test_a_wgrad_left_in_bf16(engine: Any) -> None:
    report = next(r for r in engine.ledger.reports if r.training)
    name = "model.layers.0.self_attn.o_proj:wgrad"
    graph = report.graph
    bf16 = graph.operands[name]["x"].flow.__class__("bf16")
    edges = tuple(
        replace(edge, flow=bf16) if edge.target == name else edge
        for edge in graph.edges
    )
    index = engine.ledger.reports.index(report)
    plain = PrecisionGraph(graph.operators, edges, graph.meta)
    engine.ledger.reports[index] = replace(report, graph=plain)
    engine.ledger.ran.pop("actor update", None)
    try:
        with pytest.raises(LoweringError, match=r"40 of 42.*layers.0.*o_proj:wgrad"):
            workers.train(engine, workers.random_rows())
    finally:
        engine.ledger.reports[index] = report
        engine.ledger.ran.pop("actor update", None)


def test_weights_travel_in_bf16(engine: Any) -> None:
    weights, adapter = engine.get_per_tensor_param()
    sent = dict(weights)
    assert adapter is None
    assert {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}
    masters = {n: p.full_tensor() for n, p in engine.module.named_parameters()}
    assert {p.dtype for p in masters.values()} == {torch.float32}
    assert all(torch.equal(sent[n], masters[n].bfloat16()) for n in masters)


def test_sync_is_checked_and_rollouts_have_the_trainers_log_probs(
    engine: Any, server: Any, folder: Path
) -> None:
    with pytest.raises(RefitError, match="no weights came"):
        generate(server, [5, 6, 7])
    assert push(engine, server) == 0
    report = read_report(folder / "reports" / "containment-rank0.json")
    assert [level.status for level in report.levels[:3]] == ["passed"] * 3
    assert report.level(3).counts["tensors"] == GEMMS + SCALES + OTHERS
    prompts = [[5, 6, 7, 9], [11, 12, 13, 14, 15]]
    outputs = [generate(server, prompt) for prompt in prompts]
    assert len(server.ledger.ran["rollout"]) == GEMMS
    rows = [p + o.token_ids for p, o in zip(prompts, outputs, strict=True)]
    scored = workers.log_probs(engine, rows)
    for prompt, output, row in zip(prompts, outputs, scored, strict=True):
        sampled = torch.tensor(output.log_probs)
        # The same bits of logits; log_softmax against verl's logsumexp, in FP32.
        assert torch.allclose(row[len(prompt) - 1 :], sampled, rtol=0, atol=4e-6)
    metrics = workers.train(engine, workers.random_rows(1))
    assert metrics["jetrl/contained"] == [1.0]
    assert metrics["jetrl/level_3_bytes"] == [1.0]


def test_stale_weights(engine: Any, server: Any) -> None:
    push(engine, server)
    stale = server.model.model.layers[1].mlp.up_proj
    old = stale.weight.clone()
    workers.train(engine, workers.random_rows(2))
    load = server.load_weights

    async def forget_one(weights: Any) -> dict[str, str]:
        from jetrl_compile.digests import stored_digests

        await load(weights)
        stale.weight.copy_(old)
        return stored_digests(server.model)

    server.load_weights = forget_one
    with pytest.raises(ContainmentError, match=r"step 2.*1 difference,") as error:
        push(engine, server, step=2)
    assert "model.layers.1.mlp.up_proj.weight" in str(error.value)
    with pytest.raises(RefitError, match="sync of step 2 was not finished"):
        generate(server, [5, 6, 7])


def test_fp32_masters_as_source(engine: Any, server: Any) -> None:
    name = "model.layers.0.self_attn.q_proj"
    master = dict(engine.module.named_parameters())[f"{name}.weight"].full_tensor()
    layer = server.model.get_submodule(name)
    quantize = layer.quantize

    def from_master(weight: torch.Tensor) -> Any:
        codes, _ = quantize(weight)
        blocks = master.detach().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scale = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(min=1e-10) / 448
        wrong = (blocks / scale).clamp(-448, 448).flatten(2, 3).flatten(0, 1)
        return wrong.to(codes.dtype), scale.squeeze((1, 3))

    layer.quantize = from_master
    with pytest.raises(ContainmentError, match=rf"{name}.weight"):
        push(engine, server)
    layer.quantize = quantize
    assert push(engine, server) == 0


def test_interrupted_sync(engine: Any, server: Any) -> None:
    push(engine, server)
    asyncio.run(server.begin_sync(2))
    weights, _ = engine.get_per_tensor_param()
    some = dict(next(weights) for _ in range(3))
    with pytest.raises(ModelError, match="incomplete weight sync"):
        engine.sync.check_bytes([{}], 2)
    with pytest.raises(RefitError, match="are missing"):
        asyncio.run(server.load_weights(some))
    with pytest.raises(RefitError, match="sync of step 2 was not finished"):
        generate(server, [5, 6, 7])


def test_codes_on_the_wire(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert push(engine, server) == 0
    kept, sent = server.model.state_dict(), engine.sync.sent_bytes
    kept = {name: tensor.clone() for name, tensor in kept.items()}
    settings = replace(engine.sync.settings, wire="fp8")
    monkeypatch.setattr(engine.sync, "settings", settings)
    for tensor in server.model.state_dict().values():
        tensor.zero_()
    assert push(engine, server) == 0
    assert engine.sync.sent_bytes < 0.6 * sent
    for name, tensor in server.model.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), kept[name].view(torch.uint8))
    sync = dict(engine.get_per_tensor_param()[0])
    del sync["model.layers.0.mlp.up_proj.weight_scale_inv"]
    with pytest.raises(RefitError, match=r"missing, first .*up_proj\.weight_scale_inv"):
        asyncio.run(server.load_weights(sync))


def test_rollout_only_is_not_contained(
    folder: Path, engine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from jetrl_compile.integrations.verl.sync import set_current
    from jetrl_compile.integrations.verl_cpu.server import CPUServer

    def pair(**override: Any) -> tuple[Any, Any]:
        config = workers.model_config(folder, jetrl_recipe="rollout_only", **override)
        made = workers.make_engine(config)
        made.initialize()
        path, hf = config.local_path, config.hf_config
        return made, CPUServer(path, hf, made.settings, 8, seed=0)

    try:
        trainer, server = pair()
        with pytest.raises(ContainmentError, match=r"14 differences.*q_proj"):
            trainer.sync.check_graph(server.graph)
        trainer, server = pair(jetrl_on_violation="warn")
        trainer.sync.check_graph(server.graph)
        assert "WARNING: jetrl: levels 1 and 2" in capsys.readouterr().out
        assert trainer.sync.metrics()["jetrl/contained"] == 0.0
        # The weights are those of the trainer: nothing is said of them.
        assert push(trainer, server) == 0
        assert "WARNING" not in capsys.readouterr().out
    finally:
        set_current(engine.sync)


def test_checkpoint_gives_the_same_report(
    folder: Path, engine: Any, server: Any, tmp_path: Path
) -> None:
    push(engine, server)
    report, wanted = engine.sync.report, engine.sync._wanted
    engine.save_checkpoint(str(tmp_path), global_step=1)
    resumed = workers.make_engine(workers.model_config(folder))
    resumed.initialize()
    resumed.load_checkpoint(str(tmp_path), del_local_after_load=False)
    assert push(resumed, server) == 0
    assert resumed.sync.report == report
    assert resumed.sync._wanted == wanted


@pytest.mark.parametrize(
    ("strategy", "backend", "words"),
    [
        ("fsdp", "fsdp", "'fsdp'.*strategy=fsdp2"),
        ("fsdp2", "megatron", "'megatron'.*cannot compile"),
        ("fsdp2", "veomni", "'veomni'.*cannot compile"),
    ],
)
def test_other_strategies_are_refused(
    folder: Path, engine: Any, strategy: str, backend: str, words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        workers.make_engine(workers.model_config(folder), strategy, backend=backend)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"jetrl_recipee": "jetrl"}, "did you mean jetrl_recipe?"),
        ({"jetrl_recipe": "jetrll"}, "did you mean 'jetrl'?"),
        ({"jetrl_level": 4}, "0, 1, 2 or 3"),
        ({"jetrl_on_violation": "ignore"}, "stop or warn"),
        ({"jetrl_wire": "int8"}, "bf16 or fp8"),
        ({"jetrl_lowering": "eager"}, "inductor or aot"),
    ],
)
def test_settings(
    folder: Path, engine: Any, override: dict[str, Any], words: str
) -> None:
    with pytest.raises(JetRLError, match=words):
        workers.make_engine(workers.model_config(folder, **override))


def test_lora_and_fp32_are_refused(folder: Path, engine: Any) -> None:
    model = workers.model_config(folder)
    object.__setattr__(model, "lora_rank", 8)
    with pytest.raises(ModelError, match="lora_rank is 8"):
        workers.make_engine(model)
    with pytest.raises(ModelError, match="param_dtype is 'fp32'"):
        workers.make_engine(
            workers.model_config(folder), mixed_precision={"param_dtype": "fp32"}
        )
