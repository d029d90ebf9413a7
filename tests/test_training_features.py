"""What trainers do: autocast, frozen layers, accumulation, ties, biases, recipes."""

from dataclasses import replace

import pytest
import torch
from tiny_models import (
    Recorder,
    activations,
    backward,
    compiled,
    gradients,
    loss_of,
    make_mlp,
    make_model,
    results_of,
    step,
    tokens,
)
from torch import Tensor, nn

from jetrl_compile.recipe import JETRL
from jetrl_compile.report_sink import collect_reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
BF16, FP32 = torch.bfloat16, torch.float32
GEMM = torch.ops.jetrl.gemm.default


def run_mlp(model: nn.Module, x: Tensor, **options: object) -> Tensor:
    y: Tensor = compiled(model, **options)(x)
    backward(y)
    return y.detach()


def test_autocast_with_fp32_masters() -> None:
    masters, rounded = make_mlp(FP32), make_mlp(FP32).to(BF16)
    before = {name: p.clone() for name, p in masters.named_parameters()}
    x, recorder = activations(129, 192, dtype=FP32), Recorder()
    with torch.autocast("cpu", BF16):
        y = run_mlp(masters, x, recorder=recorder)
    # The codes are those of the BF16-rounded weights: GEMMs have the same bits.
    layer = compiled(masters.gate_proj, module_path="gate_proj")
    with torch.autocast("cpu", BF16), torch.no_grad():
        mine = layer(x)
    with torch.no_grad():
        theirs = compiled(rounded.gate_proj, module_path="gate_proj")(x.to(BF16))
    assert mine.dtype is BF16
    assert torch.equal(mine, theirs)
    assert y.shape == x.shape
    for name, parameter in masters.named_parameters():
        assert torch.equal(parameter, before[name]), "master weights are untouched"
        assert parameter.grad is not None
        assert parameter.grad.dtype is FP32
    # wgrad comes out in FP32, without a rounding to BF16 on its way.
    wgrads = [n for n in recorder.graphs[1].graph.nodes if n.target is GEMM]
    assert sorted(str(n.args[8]) for n in wgrads) == sorted(
        ["torch.bfloat16", "torch.float32"] * 3
    )
    weight = masters.down_proj.weight
    assert weight.grad is not None
    assert not torch.equal(weight.grad, weight.grad.to(BF16).to(FP32))


def test_fp32_model_without_autocast() -> None:
    model, x = make_mlp(FP32), activations(129, 192, dtype=FP32)
    with collect_reports() as reports:
        y = run_mlp(model, x)
    assert reports[0].lowered == {"fprop": 3, "dgrad": 3, "wgrad": 3}
    flows = [edge.flow for edge in reports[0].graph.edges if edge.flow.is_quantized]
    assert {flow.source_dtype for flow in flows} == {"bf16"}
    assert y.dtype is FP32
    weight = model.down_proj.weight
    assert weight.grad is not None
    assert not torch.equal(weight.grad, weight.grad.to(BF16).to(FP32))


def test_gradients_accumulate_over_micro_batches() -> None:
    parts = [activations(40, 192, seed=seed) for seed in (5, 6, 7)]
    model, alone = make_mlp(), []
    run = compiled(model)
    for part in parts:
        backward(run(part))
        alone.append(gradients(model))
    for part in parts:
        backward(run(part))
    for name, total in gradients(model).items():
        assert torch.equal(total, alone[0][name] + alone[1][name] + alone[2][name])


def test_biases_are_added_to_the_rounded_product() -> None:
    model = make_mlp(bias=True)
    x = activations(129, 192)
    with torch.no_grad():
        model.gate_proj.bias.fill_(0.3)
    compiled_layer = compiled(model.gate_proj, module_path="gate_proj")
    y = compiled_layer(x)
    backward(y)
    with torch.no_grad():
        model.gate_proj.bias.zero_()
        product = compiled_layer(x)
    assert torch.equal(y, product + torch.full((320,), 0.3, dtype=BF16))
    assert model.gate_proj.bias.grad is not None
    assert model.gate_proj.bias.grad.dtype is BF16


def test_frozen_layers_have_no_wgrad() -> None:
    model = make_mlp()
    model.gate_proj.requires_grad_(False)
    x, recorder = activations(64, 192, grad=False), Recorder()
    with collect_reports() as reports:
        run_mlp(model, x, recorder=recorder)
    (report,) = reports
    assert report.lowered == {"fprop": 3, "dgrad": 3, "wgrad": 2}
    assert "gate_proj:wgrad" not in report.graph.by_name
    assert model.gate_proj.weight.grad is None
    # Nothing upstream of a frozen norm needs a gradient: no dgrad of gate and up.
    model.norm.requires_grad_(False)
    with collect_reports() as reports:
        run_mlp(model, x)
    assert reports[0].lowered == {"fprop": 3, "dgrad": 1, "wgrad": 2}


def test_frozen_model_saves_no_codes() -> None:
    model, recorder = make_mlp().requires_grad_(False), Recorder()
    with collect_reports() as reports:
        run_mlp(model, activations(64, 192), recorder=recorder)
    assert reports[0].lowered == {"fprop": 3, "dgrad": 3, "wgrad": 0}
    kept = results_of(recorder.graphs[0])
    assert torch.float8_e4m3fn not in {node.meta["val"].dtype for node in kept}


@pytest.mark.parametrize("named", [False, True])
def test_tied_embeddings(named: bool) -> None:
    ids = tokens()
    recipe = replace(JETRL, name="with_head", include=("lm_head",)) if named else JETRL
    model = make_model("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    before = model.lm_head.weight.detach().clone()
    loss, grads, (report,) = step(model, ids, recipe=recipe)
    graph = report.graph
    assert graph.is_fp8(graph.by_name["lm_head:fprop"]) is named
    assert report.lowered["fprop"] == (8 if named else 7)
    read = graph.operands["model.embed_tokens:embedding"]
    assert read["weight"].flow.dtype == "bf16"
    assert torch.equal(model.lm_head.weight, before)
    model.zero_grad()
    expected = loss_of(model, ids)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=0.02)
    assert "model.embed_tokens.weight" in grads


def test_models_with_different_recipes_live_together() -> None:
    x = activations(129, 192)
    results: dict[str, Tensor] = {}
    names = ("jetrl", "bf16", "jetrl_ue8m0", "jetrl_paper")
    models = {name: make_mlp() for name in names}
    runs = {name: compiled(models[name], recipe=name) for name in names}
    for _ in range(2):
        for name in names:
            y = runs[name](x)
            backward(y)
            assert torch.equal(results.setdefault(name, y.detach()), y)
    assert torch.equal(results["jetrl"], results["jetrl_paper"]), "one fprop"
    for other in ("bf16", "jetrl_ue8m0"):
        assert not torch.equal(results["jetrl"], results[other])
    first, second = (gradients(models[name]) for name in ("jetrl", "jetrl_paper"))
    assert not torch.equal(first["up_proj.weight"], second["up_proj.weight"])


def test_rollout_only_trains_in_bf16() -> None:
    model, ids = make_model("llama"), tokens()
    _, grads, (report,) = step(model, ids, recipe="rollout_only")
    assert report.lowered == {"fprop": 0, "dgrad": 0, "wgrad": 0}
    assert {op.reason for op in report.kept} == {
        "recipe rollout_only has no FP8 in train"
    }
    loss_of(model, ids).backward()
    eager = gradients(model)
    assert all(torch.allclose(grads[n], eager[n], atol=1e-2) for n in grads)
    with torch.no_grad(), collect_reports() as reports:
        loss_of(compiled(model, recipe="rollout_only", phase="rollout"), ids)
    assert reports[0].lowered["fprop"] == 7
