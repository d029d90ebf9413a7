"""Norms and SiLU * mul quantize what they make; the bits of forward stay."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from fused_graphs import (
    FUSED,
    SAVED,
    WHOLE,
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
from torch import Tensor
from torch.fx import GraphModule, Node

from jetrl_compile.containment import check_containment
from jetrl_compile.formats import blocks, groups
from jetrl_compile.kernels import fused_ops, ops
from jetrl_compile.pipeline import CompileReport
from jetrl_compile.recipe import get_recipe
from jetrl_compile.report_sink import collect_reports

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), IGNORE_LRU_CACHE]
BF16 = torch.bfloat16
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


def test_norm_of_a_sum_keeps_the_sum() -> None:
    context = lowered(layer_context(), **FUSED)
    norms = calls(context.graph, fused_ops.rms_norm_quantize)
    (total,) = [user for user in norms[1].users if user.args[1] == 5]
    readers = {user.target for user in total.users}
    assert torch.ops.aten.add.Tensor in readers, "the residual behind the MLP"
    assert fused_ops.scale_rows_quantize in readers


@pytest.mark.parametrize("inner", [320, 512])  # gate and up apart, and merged
@pytest.mark.parametrize("operands", ["x", "dy", "x and dy"])
def test_other_scale_format_for_wgrad(operands: str, inner: int) -> None:
    base = get_recipe("jetrl")
    assert base.flows is not None
    changes = {"x": blocks("M", "ue8m0"), "dy": groups("M", "ue8m0")}
    parts = operands.split(" and ")
    changed: dict[str, Any] = {f"wgrad_{key}": changes[key] for key in parts}
    recipe = replace(base, name="mixed", flows=replace(base.flows, **changed))
    context = layer_context("qwen3", recipe, intermediate_size=inner)
    plain, fused = lowered(context), lowered(context, **FUSED)
    assert plain.final is not None
    assert fused.final is not None
    assert set(flows(fused.final)) == set(flows(plain.final))
    assert formulas(fused.final) == formulas(plain.final)
    apart = [n for n in fused.notes if "another scale format or floor" in n]
    assert apart
    assert all(n.startswith(("mlp.", "self_attn.")) for n in apart)
