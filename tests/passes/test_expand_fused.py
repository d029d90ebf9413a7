"""The precision graph of a fused graph is that of the model; each fault shows in it."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from fused_graphs import (
    CACHED,
    FUSED,
    SAVED,
    VARIANTS,
    flows,
    formulas,
    layer_context,
    lowered,
    make_gated,
    with_options,
)
from tiny_models import activations, backward
from torch.fx import Graph, Node
from traced_graphs import capture_context

from jetrl_compile.errors import JetRLError, LoweringError
from jetrl_compile.graph_diff import diff_graphs
from jetrl_compile.passes import cache_weights, fuse_quantize, merge_siblings
from jetrl_compile.passes.context import Context
from jetrl_compile.passes.expand_fused import expand_fused
from jetrl_compile.passes.graph_nodes import call_key, hashable
from jetrl_compile.recipe import get_recipe

Edit = Callable[[list[Any]], None]
RECIPES = ("jetrl", "jetrl_paper", "jetrl_ue8m0")


@pytest.fixture(scope="module")
def layer() -> Context:
    context = layer_context()
    torch._dynamo.reset()
    return context


@pytest.fixture(scope="module")
def dynamic() -> Context:
    x = activations(3, 24, 256)
    torch._dynamo.mark_dynamic(x, 1)
    context = capture_context(lambda run: backward(run(x)), make_gated())
    torch._dynamo.reset()
    return context


def check_equal(plain: Context, fused: Context) -> None:
    assert plain.final is not None
    assert fused.final is not None
    assert plain.final.by_name == fused.final.by_name
    assert set(flows(plain.final)) == set(flows(fused.final))
    assert formulas(plain.final) == formulas(fused.final)
    assert any(formulas(fused.final).values())
    found = {item.attribute for item in diff_graphs(plain.final, fused.final)}
    assert found <= {"saved_dtype"}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_graph_is_that_of_the_model(layer: Context, variant: str, recipe: str) -> None:
    chosen = get_recipe(recipe)
    plain = lowered(layer, recipe=chosen)
    fused = lowered(layer, recipe=chosen, **VARIANTS[variant])
    check_equal(plain, fused)
    assert plain.choices == fused.choices


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_graph_with_symbolic_sizes(dynamic: Context, variant: str) -> None:
    fused = lowered(dynamic, **VARIANTS[variant])
    check_equal(lowered(dynamic), fused)
    gemms = [node.meta["val"] for node in fused.lowered]
    assert any(isinstance(out.shape[0], torch.SymInt) for out in gemms)


def test_graph_without_fused_operators_stays(layer: Context) -> None:
    for context in (with_options(layer), lowered(layer)):
        assert expand_fused(context.graph) is context.graph
        names = {node.name for node in context.graph.nodes}
        assert set(context.built.node_of.values()) <= names


def test_keys_of_calls_can_be_compared(layer: Context) -> None:
    # The arguments of a higher-order operator may be dictionaries.
    node = next(iter(layer.graph.nodes))
    args = ([1, [2, node]], {"BLOCK": 64}, None)
    assert hash(call_key("f", args, node)) == hash(call_key("f", args, node))
    assert hashable([1, (2, [3])]) == (1, (2, (3,)))
    assert call_key("f", (1,), node) != call_key("f", (2,), node)


# Planted faults: a pass emits an operator with one wrong argument --------------------


def put(index: int, value: Any) -> Edit:
    """Replace an argument; a function gets the arguments."""

    def edit(args: list[Any]) -> None:
        args[index] = value(args) if callable(value) else value

    return edit


def other(index: int) -> Callable[[list[Any]], Node]:
    """Another placeholder like an argument: the weight of another layer."""

    def find(args: list[Any]) -> Node:
        node: Node = args[index]
        described = (node.meta["val"].shape, node.meta["val"].dtype)
        for found in node.graph.find_nodes(op="placeholder"):
            value = found.meta["val"]
            if found is not node and (value.shape, value.dtype) == described:
                result: Node = found
                return result
        raise AssertionError("the graph has no other such tensor")

    return find


def swap(first: int, second: int) -> Edit:
    def edit(args: list[Any]) -> None:
        args[first], args[second] = args[second], args[first]

    return edit


def both(*edits: Edit) -> Edit:
    def edit(args: list[Any]) -> None:
        for each in edits:
            each(args)

    return edit


def backwards(index: int) -> Edit:
    return put(index, lambda args: list(args[index])[::-1])


NORM, REMADE = "rms_norm_quantize", "scale_rows_quantize"
GATED, GATED_BACKWARD = "silu_mul_quantize", "silu_mul_backward_quantize"
TWICE, PARTS, SLICE = "quantize_twice", "quantize_parts", "slice"
WEIGHTS = "gemm_weights"
REGIONS = "regions of"
# The operator, which of them, what is wrong, and what the message says of it.
FAULTS: dict[str, tuple[str, int, Edit, str]] = {
    "eps": (NORM, 0, put(3, 1e-3), r"input_layernorm:norm: .*eps=0.001"),
    "weight of another norm": (
        NORM,
        0,
        put(2, other(2)),
        r"post_attention_layernorm.weight -> input_layernorm:norm.weight",
    ),
    "norm without residual": (NORM, 1, put(1, None), r"for x \(0,\)"),
    "norm of another sum": (
        NORM,
        1,
        put(1, lambda args: args[0]),
        "post_attention_layernorm:norm.x",
    ),
    "norm's region": (NORM, 0, put(6, 64), REGIONS),
    "norm's scale format": (NORM, 0, put(9, "ue8m0"), "q_proj:fprop.x: .*ue8m0"),
    "norm's amax floor": (NORM, 0, put(10, 1e-4), "q_proj:fprop.x: .*floor 0.0001"),
    "remade by another weight": (REMADE, 0, put(2, other(2)), "q_proj:wgrad|v_proj"),
    "remade from another x": (REMADE, 0, put(0, other(0)), "q_proj:wgrad|v_proj"),
    "remade region": (REMADE, 0, put(3, 1), REGIONS),
    "remade untransposed": (REMADE, 0, put(5, False), "number of columns"),
    "remade scale format": (REMADE, 0, put(6, "ue8m0"), "proj:wgrad.x: .*ue8m0"),
    "gate and up": (GATED, 0, swap(0, 1), "up_proj:fprop -> mlp.act_fn:activation"),
    "gated region": (GATED, 0, put(3, 64), REGIONS),
    "gated scale format": (GATED, 0, put(6, "ue8m0"), "down_proj:fprop.x: .*ue8m0"),
    "gate and up in backward": (GATED_BACKWARD, 0, swap(1, 2), "mlp.act_fn"),
    "gate twice": (GATED_BACKWARD, 0, put(2, lambda a: a[1]), "mlp.act_fn|up_proj"),
    "region for dgrad": (GATED_BACKWARD, 0, put(5, 128), REGIONS),
    "region for wgrad": (GATED_BACKWARD, 0, put(7, 128), REGIONS),
    "region of x": (GATED_BACKWARD, 0, put(9, 1), REGIONS),
    "format in backward": (GATED_BACKWARD, 0, put(11, "ue8m0"), "down_proj.*ue8m0"),
    "region of a gradient": (TWICE, 0, put(4, 128), REGIONS),
    "format of a gradient": (TWICE, 0, put(6, "ue8m0"), "down_proj:wgrad.dy: .*ue8m0"),
    "gradients in another order": (TWICE, 2, backwards(0), "number of columns"),
    "weights in another order": (PARTS, 0, backwards(0), "q_proj:fprop: .*N=128"),
    "gradients for wgrad": (PARTS, 3, backwards(0), "differs .* in 7 places"),
    "gradients of gate and up": (PARTS, 4, backwards(0), "up_proj:dgrad|gate_proj"),
    "format of weights": (PARTS, 0, put(5, "ue8m0"), "q_proj:fprop.w: .*ue8m0"),
    "region of weights": (PARTS, 0, put(2, 1), REGIONS),
    "short slice": (SLICE, 0, put(3, 128), "view.*does not fit what it reads"),
    "slice of q for k": (
        SLICE,
        1,
        both(put(2, 0), put(3, 128)),
        "q_proj:cat -> self_attn.k_norm:norm",
    ),
    "slice of v for k": (
        SLICE,
        1,
        both(put(2, 384), put(3, 512)),
        "v_proj:fprop -> self_attn.k_norm:norm",
    ),
    "slice of up for gate": (
        SLICE,
        6,
        both(put(2, 256), put(3, 512)),
        "up_proj:fprop -> mlp.act_fn:activation.gate",
    ),
    "slice of dw": (SLICE, 3, put(3, 128), "q_proj:backward is new"),
    "dw of v for k": (
        SLICE,
        4,
        both(put(2, 384), put(3, 512)),
        "result that was self_attn.k_proj:wgrad is self_attn.v_proj:wgrad",
    ),
    "another weight": (
        WEIGHTS,
        1,
        put(2, lambda args: [other(0)(args[2])]),
        "down_proj:dgrad",
    ),
    "kept in another order": (WEIGHTS, 5, backwards(2), "columns|contraction|proj"),
    "kept weight's format": (WEIGHTS, 0, put(8, "ue8m0"), "proj:fprop.w: .*ue8m0"),
    "kept weight's floor": (WEIGHTS, 0, put(9, 1e-4), "fprop.w: .*floor 0.0001"),
    "kept weight's region": (WEIGHTS, 0, put(6, 1), r"fprop.w: .*\[1x128"),
    "kept weight straight": (WEIGHTS, 5, put(3, False), "the contraction needs"),
}
OF_SAVED = ("gate and up in backward", "gate twice", "format in backward")


def module_of(name: str) -> ModuleType:
    if name == WEIGHTS:
        return cache_weights
    return merge_siblings if name in (PARTS, SLICE) else fuse_quantize


def plant(
    monkeypatch: pytest.MonkeyPatch, name: str, which: int, edit: Edit
) -> list[int]:
    """Let a pass emit an operator with wrong arguments; count its operators."""
    module = module_of(name)
    original = module.emit
    seen: list[int] = []

    def wrong(graph: Graph, target: Any, args: tuple[Any, ...], at: Any) -> Node:
        if getattr(target, "__name__", "").partition(".")[0] == name:
            if len(seen) == which:
                changed = list(args)
                edit(changed)
                assert tuple(changed) != args
                args = tuple(changed)
            seen.append(which)
        node: Node = original(graph, target, args, at)
        return node

    monkeypatch.setattr(module, "emit", wrong)
    return seen


@pytest.mark.parametrize("fault", list(FAULTS))
def test_planted_fault(
    layer: Context, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, which, edit, message = FAULTS[fault]
    seen = plant(monkeypatch, name, which, edit)
    options = CACHED if name == WEIGHTS else FUSED
    with pytest.raises(JetRLError, match=message):
        lowered(layer, **options)
    assert len(seen) > which


@pytest.mark.parametrize("fault", OF_SAVED)
def test_planted_fault_in_saved_codes(
    layer: Context, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, which, edit, _ = FAULTS[fault]
    plant(monkeypatch, name, which, edit)
    message = "the codes of (gate|up) that forward keeps are not those of"
    with pytest.raises(LoweringError, match=message):
        lowered(layer, **SAVED)


def test_saved_scales_of_the_other_half(
    layer: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, GATED_BACKWARD, 0, swap(3, 4))
    with pytest.raises(LoweringError, match="codes of gate"):
        lowered(layer, **SAVED)


def test_result_that_is_none_is_told(layer: Context) -> None:
    fused = lowered(layer, "verify", **FUSED)
    norm = torch.ops.jetrl.rms_norm_quantize.default
    node = next(n for n in fused.graph.nodes if n.target is norm)
    total = next(user for user in node.users if user.args[1] == 4)
    total.args = (node, 5)  # the sum of a norm without residual
    with pytest.raises(LoweringError, match="is read as one tensor, and is none"):
        expand_fused(fused.graph)
