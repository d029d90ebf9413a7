"""What every pass must satisfy, on joint and inference graphs."""

from typing import Any

import pytest
import torch
from fused_graphs import VARIANTS, layer_context, make_gated, with_options
from tiny_models import Mlp, activations, backward, loss_of, make_model, tokens
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map_only
from traced_graphs import capture_context, fresh

from jetrl_compile.passes.context import Context
from jetrl_compile.pipeline import PASSES
from jetrl_compile.recipe import BF16, get_recipe

NAMES = [name for name, _ in PASSES]
CASES = ("mlp", "mlp_dynamic", "mlp_fp32", "decoder", "inference", "no_gemm")
# Passes that do something only where they are asked to.
OPTIONAL = ("merge_siblings", "fuse_quantize", "cache_weights", "verify")


def traced(case: str, recipe: str) -> Context:
    if case == "decoder":
        return capture_context(
            lambda run: loss_of(run, tokens()), make_model("qwen2"), recipe
        )
    if case == "no_gemm":
        norm = nn.LayerNorm(192, dtype=torch.bfloat16)
        return capture_context(lambda run: run(activations(8, 192)), norm, recipe)
    dtype = torch.float32 if case == "mlp_fp32" else torch.bfloat16
    model, x = Mlp(192, 320, bias=True).to(dtype), activations(64, 192, dtype=dtype)
    if case == "mlp_dynamic":
        torch._dynamo.mark_dynamic(x, 0)
    if case == "inference":
        with torch.no_grad():
            return capture_context(lambda run: run(x), model, recipe)
    return capture_context(lambda run: backward(run(x)), model, recipe)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def contexts(case: str) -> dict[str, Context]:
    start = traced(case, "jetrl")
    paper = replace_recipe(start, "jetrl_paper")
    torch._dynamo.reset()
    return {"jetrl": start, "jetrl_paper": paper}


def replace_recipe(context: Context, name: str) -> Context:
    other = fresh(context)
    other.recipe = get_recipe(name)
    return other


def prepared(
    contexts: dict[str, Context], recipe: str, name: str, **options: Any
) -> Context:
    """A context on which the passes before `name` have run."""
    context = with_options(contexts[recipe], **options)
    for before, run in PASSES[: NAMES.index(name)]:
        assert before != name
        run(context)
    return context


def run_pass(name: str, context: Context) -> int:
    return dict(PASSES)[name](context)


def text(context: Context) -> str:
    """The graph with nodes numbered in order: names may differ between runs."""
    number = {node: f"%{i}" for i, node in enumerate(context.graph.nodes)}

    def spell(value: Any) -> str:
        return str(tree_map_only(Node, number.__getitem__, value))

    return "\n".join(
        f"{number[node]} = {node.target}({spell(node.args)}, {spell(node.kwargs)})"
        for node in context.graph.nodes
        if node.op != "placeholder"
    )


def check_meta(graph: torch.fx.Graph) -> None:
    """Run each operator on the values that its inputs claim, and compare."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        args, kwargs = torch.fx.map_arg(
            (node.args, node.kwargs), lambda read: read.meta["val"]
        )
        fake = next(
            (v.fake_mode for v in tree_leaves(args) if hasattr(v, "fake_mode")), None
        )
        if fake is None:
            continue
        with fake:
            got = node.target(*args, **kwargs)
        wanted = tree_leaves(node.meta["val"])
        for mine, claimed in zip(tree_leaves(got), wanted, strict=True):
            if isinstance(mine, Tensor):
                assert mine.dtype == claimed.dtype, node.format_node()
                assert len(mine.shape) == len(claimed.shape), node.format_node()
                # Strides too: AOTAutograd makes a number of a symbolic stride of a
                # saved tensor that is not what it was said to be.
                for a, b in zip(
                    (*mine.shape, *mine.stride()),
                    (*claimed.shape, *claimed.stride()),
                    strict=True,
                ):
                    assert str(a) == str(b), node.format_node()


def aliasing(graph: torch.fx.Graph) -> int:
    """The number of operators that change an argument."""
    return sum(
        isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        for node in graph.nodes
    )


pass_names = pytest.mark.parametrize("name", NAMES)
recipes = pytest.mark.parametrize("recipe", ["jetrl", "jetrl_paper"])


def check_sound(name: str, context: Context) -> int:
    """Run a pass; check that the graph can run, and claims what is true."""
    before = aliasing(context.graph)
    placeholders = [n.name for n in context.graph.find_nodes(op="placeholder")]
    outputs = len(tree_leaves(context.graph.output_node().args))
    count = run_pass(name, context)
    context.graph.lint()
    GraphModule(nn.Module(), context.graph).recompile()
    check_meta(context.graph)
    assert aliasing(context.graph) == before
    after = [n.name for n in context.graph.find_nodes(op="placeholder")]
    assert after == placeholders
    assert len(tree_leaves(context.graph.output_node().args)) == outputs
    return count


@recipes
@pass_names
def test_leaves_a_sound_graph(
    contexts: dict[str, Context], recipe: str, name: str
) -> None:
    check_sound(name, prepared(contexts, recipe, name))


@recipes
@pass_names
def test_second_run_changes_nothing(
    contexts: dict[str, Context], recipe: str, name: str
) -> None:
    context = prepared(contexts, recipe, name)
    run_pass(name, context)
    once = text(context)
    run_pass(name, context)
    assert text(context) == once


@pass_names
def test_same_graph_same_result(contexts: dict[str, Context], name: str) -> None:
    results = []
    for _ in range(2):
        context = prepared(contexts, "jetrl", name)
        count = run_pass(name, context)
        results.append((count, text(context), str(context.built.graph)))
    assert results[0] == results[1]


@pass_names
def test_without_a_match_nothing_changes(
    contexts: dict[str, Context], name: str
) -> None:
    context = with_options(
        contexts["jetrl"],
        recipe=BF16,
        fuse=True,
        saved_gate_up="e4m3",
        cache_weights=True,
    )
    before = text(context)
    for each, run in PASSES:
        count = run(context)
        assert count == 0, each
        if each == name:
            break
    assert text(context) == before


def test_every_case_is_what_it_says(case: str, contexts: dict[str, Context]) -> None:
    context = prepared(contexts, "jetrl", "verify")
    target = torch.ops.jetrl.gemm.default
    found = context.graph.find_nodes(op="call_function", target=target)
    wanted = {"decoder": 21, "inference": 3, "no_gemm": 0}.get(case, 9)
    assert len(found) == wanted


# The same where GEMMs are merged, quantization is fused and weights are kept.


def fused_context(case: str) -> Context:
    if case == "layer":
        return layer_context()
    model, x = make_gated(), activations(2, 24, 256)
    if case == "inference":
        with torch.no_grad():
            return capture_context(lambda run: run(x), model)
    if case == "dynamic":
        torch._dynamo.mark_dynamic(x, 1)
    return capture_context(lambda run: backward(run(x)), model)


@pytest.fixture(scope="module", params=["layer", "dynamic", "inference"])
def fused(request: pytest.FixtureRequest) -> dict[str, Context]:
    start = fused_context(request.param)
    torch._dynamo.reset()
    return {"jetrl": start, "jetrl_paper": replace_recipe(start, "jetrl_paper")}


CHOSEN = [("jetrl", variant) for variant in VARIANTS] + [("jetrl_paper", "fused")]


@pytest.mark.parametrize(("recipe", "variant"), CHOSEN)
@pytest.mark.parametrize("name", OPTIONAL)
def test_fused_graphs_are_sound(
    fused: dict[str, Context], recipe: str, variant: str, name: str
) -> None:
    options = VARIANTS[variant]
    results = []
    for _ in range(2):
        context = prepared(fused, recipe, name, **options)
        results.append((check_sound(name, context), text(context)))
    assert results[0] == results[1], "the same graph, the same result"
    count, once = results[0]
    asked = "cache_weights" if name == "cache_weights" else "fuse"
    assert (count > 0) == (name == "verify" or bool(options.get(asked)))
    notes = list(context.notes)
    assert name == "verify" or run_pass(name, context) == 0
    assert text(context) == once, "a second run changes nothing"
    assert context.notes == notes
