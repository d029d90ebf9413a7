"""q, k and v, and gate and up, become one GEMM in each role; or the report says why."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fused_graphs import (
    CACHED,
    FUSED,
    WHOLE,
    calls,
    check_same,
    layer_context,
    lowered,
    make_gated,
    run_layer,
)
from tiny_models import (
    Recorder,
    activations,
    backward,
    compiled,
    gradients,
    loss_of,
    make_model,
    sqnr,
    tokens,
)
from torch import Tensor, nn
from torch.fx import Node

from jetrl_compile.kernels import fused_ops, ops, weight_ops
from jetrl_compile.pipeline import CompileReport
from jetrl_compile.recipe import JETRL
from jetrl_compile.report_sink import collect_reports
from jetrl_compile.rollout import make_rollout_model

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
aten = torch.ops.aten
NOT_MERGED = "GEMMs not merged: "
ALONE = "the gradients for their input are not added up alone"


def report_of(model: Any, *inputs: Tensor, **options: Any) -> CompileReport:
    """The report of a training step."""
    with collect_reports() as reports:
        backward(compiled(model, **{**FUSED, **options})(*inputs))
    return reports[0]


def merged(report: CompileReport) -> int:
    return report.changes["merge_siblings"]


@pytest.mark.parametrize("recipe", ["jetrl", "jetrl_paper"])
def test_four_gemms_a_role_and_layer(recipe: str) -> None:
    recorder = Recorder()
    with collect_reports() as reports:
        run_layer(recipe=recipe, recorder=recorder, **FUSED)
    forward, back = (calls(g.graph, ops.gemm) for g in recorder.graphs)
    assert (len(forward), len(back)) == (4, 8)
    # fprop of qkv (256 + 128 + 128), o, gate and up, down; dgrads give x's width.
    assert [n.meta["val"].shape[1] for n in forward] == [512, 256, 512, 256]
    shapes = Counter(tuple(n.meta["val"].shape) for n in back)
    assert shapes == {(48, 256): 4, (512, 256): 2, (256, 256): 2}
    assert merged(reports[0]) == 15
    assert reports[0].lowered == {"fprop": 7, "dgrad": 7, "wgrad": 7}
    assert reports[0].notes == ()
    assert set(reports[0].providers.values()) == {"reference: first choice"}
    assert len(reports[0].providers) == 21


def test_parts_are_read_where_they_lie() -> None:
    context = lowered(layer_context(), "fuse_quantize", **FUSED)
    cut: dict[Node, list[Any]] = {}
    for node in calls(context.graph, aten.slice.Tensor):
        if isinstance(node.args[0], Node) and node.args[0].target is ops.gemm:
            cut.setdefault(node.args[0], []).append(node.args[1:])
    for whole, pieces in cut.items():
        dims = {dim for dim, _, _ in pieces}
        assert dims == {0 if context.lowered[whole].role == "wgrad" else 1}
        ends = [end for _, _, end in pieces]
        starts = [start for _, start, _ in pieces]
        assert [*starts, whole.meta["val"].shape[dims.pop()]] == [0, *ends]
    assert len(cut) == 4
    # Weights lie below each other, gradients beside each other, in one order.
    parts: dict[int, list[list[Node]]] = {0: [], 1: []}
    for node in calls(context.graph, fused_ops.quantize_parts):
        parts[node.args[1]].append(list(node.args[0]))  # type: ignore[index, arg-type]
    widths = [[w.meta["val"].shape[0] for w in weights] for weights in parts[0]]
    assert sorted(widths) == [[256, 128, 128]] * 2 + [[256, 256]] * 2
    widths = [[w.meta["val"].shape[1] for w in dys] for dys in parts[1]]
    assert sorted(widths) == [[256, 128, 128]] * 2 + [[256, 256]] * 2
    qkv = [context.lowered[n].names for n in cut if len(context.lowered[n].names) == 3]
    assert [name.rpartition(".")[2] for name in qkv[0]] == [
        f"{part}_proj:fprop" for part in "qkv"
    ]


def test_dgrad_adds_in_fp32() -> None:
    # Against the unfused sum, whose terms are rounded to BF16 first.
    x = activations(96, 256)
    found = []
    for fuse in (False, True):
        torch._dynamo.reset()
        model = make_gated()
        x.grad = None
        y = compiled(model, fuse=fuse)(x)
        backward(y)
        found.append((y.detach(), x.grad, gradients(model)))
    (y, dx, grads), (fused_y, fused_dx, fused_grads) = found
    assert torch.equal(y, fused_y)
    assert dx is not None
    assert fused_dx is not None
    assert not torch.equal(dx, fused_dx)
    assert sqnr(dx, fused_dx) > 40
    for name, gradient in grads.items():
        assert name == "norm.weight" or torch.equal(gradient, fused_grads[name])
    assert sqnr(grads["norm.weight"], fused_grads["norm.weight"]) > 40


# Reasons not to merge ----------------------------------------------------------------


class Siblings(nn.Module):
    """Layers that read one x; what is done with them is given."""

    def __init__(self, join: Callable[..., Tensor], *sizes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(256, size, bias=False) for size in sizes]
        self.layers = nn.ModuleList(layers).to(torch.bfloat16)
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        return self.join(x, *(layer(x) for layer in self.layers))


def add(_: Tensor, *ys: Tensor) -> Tensor:
    width = min(y.shape[-1] for y in ys)
    total = ys[0][..., :width]
    for y in ys[1:]:
        total = total * y[..., :width]
    return total


def add_x(x: Tensor, *ys: Tensor) -> Tensor:
    return x + add(x, *ys)


def test_three_without_a_last_whole_block() -> None:
    report = report_of(Siblings(add, 256, 128, 200), activations(2, 24, 256))
    assert merged(report) == 9
    assert report.notes == ()


def test_parts_that_are_no_whole_blocks() -> None:
    report = report_of(Siblings(add, 200, 128), activations(24, 256))
    assert merged(report) == 0
    assert report.notes == (
        f"layers.0, layers.1: {NOT_MERGED}out features [200, 128] are not multiples of "
        "128",
    )


def test_smollm2_like_layer() -> None:
    # q of 192 and k, v of 64: only gate and up have whole blocks.
    sizes: dict[str, Any] = {
        "hidden_size": 192,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    }
    context = lowered(layer_context("llama", **sizes), **FUSED)
    names = [gemm.names for gemm in context.lowered.values() if len(gemm.names) > 1]
    assert len(names) == 3
    assert {name.partition(":")[0] for each in names for name in each} == {
        "mlp.gate_proj",
        "mlp.up_proj",
    }
    (note,) = context.notes
    assert "q_proj, self_attn.k_proj, self_attn.v_proj: " + NOT_MERGED in note
    assert "[192, 64, 64] are not multiples of 128" in note


def test_shared_weight() -> None:
    model = Siblings(add, 256, 256)
    layers: Any = model.layers
    layers[1].weight = layers[0].weight
    report = report_of(model, activations(24, 256))
    assert merged(report) == 0
    assert report.notes[0].endswith("two of them have one weight")


def test_weight_tied_to_another_layer_is_merged() -> None:
    # The gradient of the tied weight is added up behind its slice.
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Siblings(add, 256, 256)
            self.second = nn.Linear(256, 256, bias=False).to(torch.bfloat16)
            layers: Any = self.first.layers
            self.second.weight = layers[1].weight

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.second(self.first(x))
            return result

    results = []
    for fuse in (False, True):
        torch._dynamo.reset()
        model, x = Tied(), activations(24, 256)
        report = report_of(model, x, fuse=fuse)
        results.append({**gradients(model)})
    assert merged(report) == 6
    check_same(*results)


def test_gradient_added_before() -> None:
    # x + f(x), as in layers without a norm before them: (dy + da) + db.
    report = report_of(Siblings(add_x, 256, 256), activations(24, 256))
    assert merged(report) == 0
    assert report.notes[0].endswith(ALONE)


class Between(nn.Module):
    """The gradient of a third reader of x is added between those of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(256, 256, bias=False).to(torch.bfloat16)
        self.b = nn.Linear(256, 256, bias=False).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        middle = (x * 1.5).tanh()
        result: Tensor = a * middle * self.b(x)
        return result


def test_gradient_added_between() -> None:
    results = []
    for fuse in (False, True):
        torch._dynamo.reset()
        model, x = Between(), activations(24, 256)
        report = report_of(model, x, fuse=fuse)
        results.append({**gradients(model), "x": x.grad})
    assert merged(report) == 0
    assert report.notes == (f"a, b: {NOT_MERGED}{ALONE}",)
    check_same(*results)


def test_some_weights_are_frozen() -> None:
    model = make_gated()
    model.up_proj.requires_grad_(False)
    report = report_of(model, activations(24, 256))
    assert merged(report) == 0
    assert report.notes[0] == (
        f"gate_proj, up_proj: {NOT_MERGED}their wgrads are not alike"
    )
    assert report.lowered == {"fprop": 3, "dgrad": 3, "wgrad": 2}


def test_all_weights_are_frozen() -> None:
    model, recorder = make_gated().requires_grad_(False), Recorder()
    report = report_of(model, activations(24, 256), recorder=recorder)
    assert merged(report) == 4
    assert report.notes == ()
    assert report.lowered == {"fprop": 3, "dgrad": 3, "wgrad": 0}
    kept = [len(calls(g.graph, ops.gemm)) for g in recorder.graphs]
    assert kept == [2, 2]


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, as PEFT writes it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.base = nn.Linear(256, size, bias=False).requires_grad_(False)
        self.lora_A = nn.Linear(256, 16, bias=False)
        self.lora_B = nn.Linear(16, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.lora_B(self.lora_A(x)) * 2
        return result


def test_adapters() -> None:
    results = []
    for fuse in (False, True):
        torch._dynamo.reset()
        model = make_gated()
        torch.manual_seed(1)
        model.gate_proj, model.up_proj = Adapted(256), Adapted(256)  # type: ignore[assignment]
        model, x = model.to(torch.bfloat16), activations(24, 256)
        report = report_of(model, x, fuse=fuse)
        results.append({**gradients(model), "x": x.grad})
    # base and lora_A of both read one x: 256, 16, 256, 16 out features.
    assert merged(report) == 0
    assert any("[256, 16, 256, 16] are not multiples" in n for n in report.notes)
    check_same(*results)


def test_stored_codes_of_a_rollout_model() -> None:
    rollout = make_rollout_model(make_model("qwen3", **WHOLE))
    logits = []
    with torch.no_grad():
        for fuse in (False, True):
            torch._dynamo.reset()
            run = compiled(rollout, phase="rollout", fuse=fuse, cache_weights=fuse)
            with collect_reports() as reports:
                logits.append(run(input_ids=tokens(), use_cache=False).logits)
    assert torch.equal(*logits)
    assert merged(reports[0]) == 0
    assert reports[0].changes["cache_weights"] == 0
    assert len(reports[0].notes) == 2
    assert all(
        note.endswith(NOT_MERGED + "their weights are stored in FP8")
        for note in reports[0].notes
    )
    assert reports[0].changes["fuse_quantize"] == 3, "norms and SiLU * mul"


def test_recipe_that_names_one_of_two() -> None:
    recipe = replace(JETRL, name="gate_only", exclude=("up_proj",))
    report = report_of(make_gated(), activations(24, 256), recipe=recipe)
    assert merged(report) == 0
    assert report.lowered == {"fprop": 2, "dgrad": 2, "wgrad": 2}


def test_inference_merges_fprop_alone() -> None:
    model, recorder = make_model("qwen3", **WHOLE), Recorder()
    with torch.no_grad(), collect_reports() as reports:
        loss_of(compiled(model, **CACHED, recorder=recorder), tokens())
    assert merged(reports[0]) == 5
    found = calls(recorder.graphs[0].graph, weight_ops.gemm_weights)
    assert [len(n.args[2]) for n in found] == [3, 1, 2, 1]  # type: ignore[arg-type]
