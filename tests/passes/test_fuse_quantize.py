"""Norms and SiLU * mul quantize what they make; the bits of forward stay."""

from typing import Any

import pytest
import torch
from fused_graphs import (
    FUSED,
    SAVED,
    WHOLE,
    RmsNorm,
    calls,
    check_same,
    flows,
    formulas,
    layer_context,
    layer_of,
    lowered,
    make_gated,
)
from tiny_models import (
    IGNORE_LRU_CACHE,
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
from torch.fx import GraphModule, Node

from jetrl_compile.containment import check_containment
from jetrl_compile.kernels import fused_ops, ops
from jetrl_compile.pipeline import CompileReport
from jetrl_compile.report_sink import collect_reports

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), IGNORE_LRU_CACHE]
BF16 = torch.bfloat16
silu = nn.functional.silu
NOT_FUSED = "not fused with what makes x: "
# Models, sizes (none: parts that are no whole blocks, as SmolLM2 has) and recipes.
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {}, "jetrl"),
    ("qwen2", WHOLE, "jetrl"),
    ("qwen3", WHOLE, "jetrl"),
    ("qwen3", WHOLE, "jetrl_paper"),
    ("qwen3", WHOLE, "jetrl_ue8m0"),
    ("gemma3", WHOLE, "jetrl"),
    ("qwen3_moe", WHOLE, "jetrl"),
    ("gpt2", {}, "jetrl"),
]


def training(
    name: str, sizes: dict[str, Any], **options: Any
) -> tuple[Tensor, dict[str, Tensor], CompileReport]:
    torch._dynamo.reset()
    model = make_model(name, **sizes)
    with collect_reports() as reports:
        loss = loss_of(compiled(model, **options), tokens())
    loss.backward()
    return loss.detach(), gradients(model), reports[0]


@pytest.mark.parametrize(
    ("name", "sizes", "recipe"),
    CASES,
    ids=[f"{name}-{'whole' if sizes else 'part'}-{r}" for name, sizes, r in CASES],
)
def test_equal_bits(name: str, sizes: dict[str, Any], recipe: str) -> None:
    plain, grads, report = training(name, sizes, recipe=recipe)
    loss, fused_grads, fused = training(name, sizes, recipe=recipe, **FUSED)
    assert torch.equal(loss, plain)
    assert grads.keys() == fused_grads.keys()
    worst = min(sqnr(grads[key], fused_grads[key]) for key in grads)
    if fused.changes["merge_siblings"]:
        assert worst > 20
    else:
        check_same(grads, fused_grads)
    # The precision graph is that of the model, whatever was fused.
    assert fused.changes["fuse_quantize"] > 4
    assert report.graph.by_name == fused.graph.by_name
    assert set(flows(report.graph)) == set(flows(fused.graph))
    assert formulas(report.graph) == formulas(fused.graph)
    # Without gradient: other patterns, the same bits; contained either way.
    torch._dynamo.reset()
    with torch.no_grad(), collect_reports() as reports:
        run = compiled(make_model(name, **sizes), recipe=recipe, **FUSED)
        assert torch.equal(loss_of(run, tokens()), plain)
    for inference, trained in ((reports[0], report), (reports[0], fused)):
        contained = check_containment(inference.graph, trained.graph)
        assert contained.contained is True, contained.differences
        assert [level.status for level in contained.levels[:2]] == ["passed"] * 2


def test_unfused_rollout_of_any_length_in_fused_training() -> None:
    _, _, train = training("llama", WHOLE, **FUSED)
    torch._dynamo.reset()
    ids = tokens(3, 21)
    torch._dynamo.mark_dynamic(ids, 1)
    run = compiled(make_model("llama", **WHOLE), phase="rollout")
    with torch.no_grad(), collect_reports() as reports:
        loss_of(run, ids)
    contained = check_containment(reports[0].graph, train.graph)
    assert contained.contained is True, contained.differences


def test_eps_that_is_a_tensor() -> None:
    # With dynamic=True, Dynamo makes a module's float a tensor on the CPU.
    results = []
    for fuse in (False, True):
        torch._dynamo.reset()
        model, x = make_gated(), activations(24, 256)
        with collect_reports() as reports:
            y = compiled(model, fuse=fuse, dynamic=True)(x)
            backward(y)
        results.append((y.detach(), reports[0]))
    (y, plain), (fused_y, fused) = results
    assert torch.equal(y, fused_y)
    assert fused.changes["fuse_quantize"] > 4
    assert plain.graph.by_name == fused.graph.by_name
    assert set(flows(plain.graph)) == set(flows(fused.graph))


# What is left in the graphs, and what is kept ------------------------------------


def layer_graphs(**options: Any) -> tuple[GraphModule, GraphModule]:
    """Forward and backward of a decoder layer as they were partitioned."""
    torch._dynamo.reset()
    (layer, run), recorder = layer_of(), Recorder()
    backward(run(compiled(layer, recorder=recorder, **options)))
    forward, back = recorder.graphs
    return forward, back


def kept_bytes(**options: Any) -> int:
    """The bytes of the storages that autograd keeps, less the parameters."""
    torch._dynamo.reset()
    layer, run = layer_of(length=96)
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run(compiled(layer, **options))
    del result
    return sum(kept.values())


def test_bytes_kept_for_backward() -> None:
    bf16, plain = kept_bytes(recipe="bf16"), kept_bytes()
    fused, saved = kept_bytes(**FUSED), kept_bytes(**SAVED)
    assert fused <= bf16
    assert fused < plain
    # gate and up: 192 tokens of 2 x 256 in codes and 2 x 2 scales, instead of BF16.
    assert fused - saved == 192 * 512 - 192 * 4 * 4


MAKES_CODES = (ops.quantize, fused_ops.quantize_parts, fused_ops.quantize_twice)


@pytest.mark.parametrize("recipe", ["jetrl", "jetrl_paper"])
def test_no_bf16_copy_that_gemms_alone_read(recipe: str) -> None:
    forward, back = layer_graphs(recipe=recipe, **FUSED)
    weights = {n.name for n in forward.graph.find_nodes(op="placeholder")}
    # Forward quantizes weights, and the result of the attention.
    made = [
        node.args[0] for target in MAKES_CODES for node in calls(forward.graph, target)
    ]
    flat = [n for arg in made for n in (arg if isinstance(arg, list) else [arg])]
    others = [n for n in flat if isinstance(n, Node) and n.name not in weights]
    assert len(others) == 1
    assert "view" in others[0].name
    for graph in (forward, back):
        for node in graph.graph.nodes:
            users = [user.target for user in node.users]
            if node.target is torch.ops.aten.mul.Tensor and users:
                value = node.meta["val"]
                wide = value.dtype is BF16 and value.shape[-1] == 256
                assert not (wide and all(t in MAKES_CODES for t in users)), node
    assert len(calls(forward.graph, fused_ops.rms_norm_quantize)) == 2
    assert len(calls(forward.graph, fused_ops.silu_mul_quantize)) == 1
    # One residual add is fused into the norm behind it; it stays BF16.
    norms = calls(forward.graph, fused_ops.rms_norm_quantize)
    assert [node.args[1] is None for node in norms] == [True, False]


def test_nothing_of_weights_is_kept() -> None:
    for options in (FUSED, SAVED, {"recipe": "jetrl_paper", **FUSED}):
        forward, back = layer_graphs(**options)
        (outputs,) = forward.graph.output_node().args
        kept: Any = outputs
        weights = {
            node
            for target in (ops.quantize, fused_ops.quantize_parts)
            for node in calls(forward.graph, target)
            if all(n.op == "placeholder" for n in node.all_input_nodes)
        }
        assert len(weights) == 4
        for node in kept[1:]:
            assert not (isinstance(node, Node) and set(node.args[:1]) & weights)
        dgrads = calls(back.graph, ops.gemm)
        assert len(dgrads) == 8


def test_backward_remakes_what_forward_quantized() -> None:
    forward, back = layer_graphs(**FUSED)
    assert len(calls(back.graph, fused_ops.scale_rows_quantize)) == 2
    assert len(calls(back.graph, fused_ops.silu_mul_backward_quantize)) == 1
    assert not calls(forward.graph, fused_ops.scale_rows_quantize)
    # Gradients of o, qkv and down are quantized for dgrad and wgrad from one read.
    assert len(calls(back.graph, fused_ops.quantize_twice)) == 3
    # What is remade from forward's tensors waits for a gradient.
    for target, last in (
        (fused_ops.scale_rows_quantize, 8),
        (fused_ops.quantize_parts, 7),
    ):
        for node in calls(back.graph, target):
            assert isinstance(node.args[last], Node)


def test_gradients_of_saved_codes() -> None:
    results = []
    for options in (FUSED, SAVED):
        torch._dynamo.reset()
        model, x = make_gated(), activations(96, 256)
        y = compiled(model, **options)(x)
        backward(y)
        results.append((y.detach(), {"x": x.grad, **gradients(model)}))
    (y, grads), (saved_y, saved_grads) = results
    assert torch.equal(y, saved_y)
    for name, gradient in grads.items():
        other = saved_grads[name]
        assert gradient is not None
        assert other is not None
        assert 20 < sqnr(gradient, other) < 80, name


# Forms that have no kernel stay as they are -------------------------------------


class Linears(nn.Module):
    """Two layers, and something between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(256, 256, bias=False)
        self.b = nn.Linear(256, 256, bias=False)
        self.last = nn.Linear(256, 256, bias=False)
        self.norm = RmsNorm(256)
        self.heads = RmsNorm(64)
        self.scale = nn.Parameter(torch.rand(256))
        self.to(BF16)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def cut(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], 4, 64)


class NormOfHeads(Linears):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.heads(cut(self.a(x))).flatten(-2))
        return result


class GatedHeads(Linears):
    def forward(self, x: Tensor) -> Tensor:
        gated = silu(cut(self.a(x))) * cut(self.b(x))
        result: Tensor = self.last(gated.flatten(-2))
        return result


class GatedByParameter(Linears):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(silu(self.a(x)) * self.scale)
        return result


class GatedByColumn(Linears):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(silu(self.a(x)) * x[..., :1])
        return result


class GatedByItself(Linears):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.a(x)
        result: Tensor = self.last(silu(gate) * gate)
        return result


class UpBeforeGate(Linears):
    def forward(self, x: Tensor) -> Tensor:
        up = self.b(x)
        result: Tensor = self.last(silu(self.a(x)) * up)
        return result


class NormIsRead(Linears):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        result: Tensor = self.last(h) + h
        return result


class TwoNorms(Linears):
    """Two norms of one sum, written in one module."""

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.scale * x
        wide = total.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        first = self.scale * wide.to(BF16)
        result: Tensor = self.a(self.norm(total)) + self.b(first) + total
        return result


class TwiceTheNorm(Linears):
    """Twice the same norm, of one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.a(self.norm(x)) * self.last(self.norm(x))
        return result


class NormOfOneNumber(Linears):
    def __init__(self) -> None:
        super().__init__()
        self.norm = RmsNorm(1).to(BF16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.norm(x))
        return result


class BiasedGates(Linears):
    """The gradients of gate and up are read by the biases' gradients too."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(256, 256).to(BF16)
        self.b = nn.Linear(256, 256).to(BF16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(silu(self.a(x)) * self.b(x))
        return result


ROWS = f"last:fprop: {NOT_FUSED}it is made in rows of 64 and read in rows of 256"
KEPT = "last:fprop: gate and up are kept "
FORMS: dict[type[Linears], tuple[tuple[str, ...], ...]] = {
    NormOfHeads: (("heads", ROWS),),
    GatedHeads: (("silu", ROWS),),
    GatedByParameter: (),
    GatedByColumn: (),
    GatedByItself: (("saved", KEPT),),
    UpBeforeGate: (("saved", KEPT),),
    NormIsRead: (("read", f"last:fprop: {NOT_FUSED}aten.add.Tensor reads it too"),),
    TwoNorms: (),
    TwiceTheNorm: (),
    NormOfOneNumber: (),
    BiasedGates: (("saved", KEPT),),
}


@pytest.mark.parametrize("form", list(FORMS), ids=lambda form: form.__name__)
def test_other_forms(form: type[Linears]) -> None:
    results = []
    for chosen in ({}, FUSED, SAVED):
        torch._dynamo.reset()
        model, x = form(), activations(2, 24, 256)
        with collect_reports() as reports:
            y = compiled(model, **chosen)(x)
            backward(y)
        results.append((y.detach(), {"x": x.grad, **gradients(model)}))
        if chosen:
            check_form(form, chosen, reports[0], results[0], results[-1])


Result = tuple[Tensor, dict[str, Tensor | None]]


def check_form(
    form: type[Linears],
    options: dict[str, Any],
    report: CompileReport,
    plain: Result,
    fused: Result,
) -> None:
    assert torch.equal(plain[0], fused[0])
    if report.changes["merge_siblings"]:
        for name, gradient in plain[1].items():
            other = fused[1][name]
            assert gradient is not None
            assert other is not None
            assert sqnr(gradient, other) > 20, name
    else:
        check_same(plain[1], fused[1])
    wanted = [note for name, note in FORMS[form] if name != "saved" or options is SAVED]
    notes = report.notes
    assert all(any(n.startswith(w) for n in notes) for w in wanted), notes
    assert bool(wanted) == bool(notes), notes


def test_norm_of_a_sum_keeps_the_sum() -> None:
    context = lowered(layer_context(), **FUSED)
    norms = calls(context.graph, fused_ops.rms_norm_quantize)
    (total,) = [user for user in norms[1].users if user.args[1] == 5]
    readers = {user.target for user in total.users}
    assert torch.ops.aten.add.Tensor in readers, "the residual behind the MLP"
    assert fused_ops.scale_rows_quantize in readers
