"""Seven architectures, compiled whole: what is FP8, what is not, and how close."""

import pytest
import torch
from tiny_models import (
    ARCHITECTURES,
    IGNORE_LRU_CACHE,
    IGNORE_SCRIPT_METHOD,
    compiled,
    gradients,
    linear_modules,
    loss_of,
    make_model,
    sqnr,
    tokens,
)

from jetrl_compile.passes.annotate_precision import GROUPED_REASON
from jetrl_compile.recipe import GEMM_ROLES
from jetrl_compile.report_sink import collect_reports

HEAD = "keeps the role lm_head in high precision"
ROUTER = "keeps the role router in high precision"
KEPT = {
    "qwen3_moe": {
        "model.layers.0.mlp.gate",
        "model.layers.0.mlp.experts",
        "lm_head",
    },
}
pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    IGNORE_LRU_CACHE,
    IGNORE_SCRIPT_METHOD,
]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_named_layer_is_fp8(name: str) -> None:
    model, ids = make_model(name), tokens()
    wanted = linear_modules(model)
    reference = loss_of(model, ids)
    reference.backward()
    expected = gradients(model)

    with collect_reports() as reports:
        run = compiled(model)
        loss = loss_of(run, ids)
        loss.backward()
        with torch.no_grad():
            old = loss_of(run, ids)
    got = gradients(model)

    # Old log-probs have the bits of the forward that is trained.
    assert torch.equal(loss.detach(), old)
    report, inference = reports
    assert (report.training, inference.training) == (True, False)
    assert inference.lowered == {"fprop": len(wanted), "dgrad": 0, "wgrad": 0}
    assert report.lowered == dict.fromkeys(GEMM_ROLES, len(wanted))
    graph = report.graph
    for role in GEMM_ROLES:
        names = {op.module for op in graph.gemms(role) if graph.is_fp8(op)}
        assert names == wanted
    kept = {op.module for op in report.kept}
    assert kept == KEPT.get(name, {"lm_head"})
    for op in report.kept:
        reason = GROUPED_REASON if op.kind == "grouped_gemm" else ROUTER
        assert (HEAD if op.module == "lm_head" else reason) in op.reason
    assert loss.item() == pytest.approx(reference.item(), rel=0.02)
    assert got.keys() == expected.keys() == dict(model.named_parameters()).keys()
    quality = {key: sqnr(expected[key], got[key]) for key in got}
    worst = min(quality, key=quality.__getitem__)
    assert quality[worst] >= 12, f"{worst} has {quality[worst]:.1f} dB"


def test_inductor_compiles_training_and_inference() -> None:
    model, ids = make_model("llama"), tokens()
    reference = loss_of(model, ids)
    reference.backward()
    expected = gradients(model)
    with collect_reports() as reports:
        run = compiled(model, lowering="inductor")
        loss = loss_of(run, ids)
        loss.backward()
        with torch.no_grad():
            old = loss_of(run, ids)
    got = gradients(model)
    assert [report.lowered["fprop"] for report in reports] == [7, 7]
    assert loss.item() == pytest.approx(reference.item(), rel=0.02)
    # Inductor fuses the two graphs apart; equal bits need kernels of one's own.
    assert old.item() == pytest.approx(loss.item(), rel=1e-3)
    assert min(sqnr(expected[key], got[key]) for key in got) >= 12


def test_rollout_and_inference_mode_have_the_bits_of_training() -> None:
    model, ids = make_model("llama"), tokens()
    with collect_reports() as reports:
        training = loss_of(compiled(model), ids)
        with torch.inference_mode():
            assert torch.equal(training, loss_of(compiled(model), ids))
            rollout = loss_of(compiled(model, phase="rollout"), ids)
    assert torch.equal(training, rollout)
    assert [report.phase for report in reports] == ["train", "train", "rollout"]
