"""On a Hopper GPU: decoder layers through Inductor with the fast kernels."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import (
    IGNORE_LRU_CACHE,
    IGNORE_SCRIPT_METHOD,
    IGNORE_SOFTMAX,
    IGNORE_TF32,
    gradients,
    loss_of,
    make_model,
    sqnr,
    tokens,
)
from torch import Tensor

from jetrl_compile.gemm_shapes import shapes_of_config
from jetrl_compile.kernels import quantizers
from jetrl_compile.kernels.deep_gemm_tiles import token_steps
from jetrl_compile.kernels.warm_up import warm_up
from jetrl_compile.layers import compile_layers
from jetrl_compile.pipeline import CompileReport
from jetrl_compile.report_sink import collect_reports

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_dynamo"),
    IGNORE_SCRIPT_METHOD,
    IGNORE_LRU_CACHE,
    IGNORE_TF32,
    IGNORE_SOFTMAX,
    # Dynamo looks at the gradient of a layer's input.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
# Attention written out: its backward adds in a fixed order, so gradients have bits to
# compare. Sizes that merge (kv 128) and one pair of layers that shares a graph.
mark_step: Any = torch.compiler.cudagraph_mark_step_begin
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "attn_implementation": "eager",
}


@pytest.fixture(autouse=True, scope="module")
def compiled_kernels() -> None:
    """Compile DeepGEMM's kernels several at once: one by one they take minutes."""
    config = make_model("qwen3", **SIZES).config
    for recipe in ("jetrl", "jetrl_paper"):
        done = warm_up(shapes_of_config(config, token_steps(64, 258), recipe=recipe))
        assert not done.failed


@pytest.fixture(autouse=True)
def no_fallbacks() -> Iterator[None]:
    """Each operator ran as a kernel of its own."""
    before = quantizers.fallbacks()
    yield
    assert quantizers.fallbacks() == before


def run(
    model: Any, ids: Tensor, **options: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor], list[CompileReport]]:
    """Loss of training, logits without gradient, gradients, reports."""
    model = copy.deepcopy(model)
    torch._dynamo.reset()
    with collect_reports() as reports:
        if options.pop("compile", True):
            compile_layers(model, **options)
        loss = loss_of(model, ids)
        loss.backward()
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
    return loss.detach(), logits, gradients(model), reports


@pytest.mark.parametrize("recipe", ["jetrl", "jetrl_paper"])
@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen2"])
def test_fused_layers(name: str, recipe: str) -> None:
    model, ids = make_model(name, **SIZES).cuda(), tokens(3, 67).cuda()
    plain = run(model, ids, compile=False)
    fused = run(model, ids, recipe=recipe)
    apart = run(model, ids, recipe=recipe, fuse=False)
    slow = run(model, ids, recipe=recipe, providers=("reference",))
    training, inference = fused[3]
    assert training.lowered == {"fprop": 7, "dgrad": 7, "wgrad": 7}
    assert inference.lowered == {"fprop": 7, "dgrad": 0, "wgrad": 0}
    assert training.changes["merge_siblings"] == 15
    assert {line.partition(":")[0] for line in training.providers.values()} == {
        "deep_gemm"
    }
    for other in (apart, slow):
        assert abs(fused[0] - other[0]) <= 2e-3 * abs(other[0])
        assert sqnr(other[1], fused[1]) >= 20
        assert min(sqnr(other[2][n], g) for n, g in fused[2].items()) >= 15
    assert abs(fused[0] - plain[0]) <= 0.02 * abs(plain[0])
    assert min(sqnr(plain[2][n], g) for n, g in fused[2].items()) >= 10


def test_training_and_inference_forwards_have_the_same_bits() -> None:
    model, ids = make_model("qwen3", **SIZES).cuda(), tokens(2, 128).cuda()
    compile_layers(model)
    trained = model(input_ids=ids, use_cache=False).logits
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, trained)


def test_two_runs_have_the_same_bits() -> None:
    model, ids = make_model("qwen3", **SIZES).cuda(), tokens(2, 128).cuda()
    first, second = run(model, ids), run(model, ids)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    for name, gradient in first[2].items():
        if "embed" not in name:  # its backward adds atomically
            assert torch.equal(gradient, second[2][name]), name


def test_any_number_of_tokens_compiles_once() -> None:
    model = make_model("qwen3", **SIZES).cuda()
    with collect_reports() as reports:
        compile_layers(model)
        for batch, length in ((2, 100), (3, 67), (1, 200), (4, 64), (1, 129)):
            ids = tokens(batch, length).cuda()
            loss_of(model, ids).backward()
    assert len(reports) <= 2  # one more for a batch of one sequence


@pytest.mark.parametrize("options", [{"cache_weights": True}, {}])
def test_micro_batches_and_optimizer_steps(options: dict[str, Any]) -> None:
    model, ids = make_model("qwen3", **SIZES).cuda(), tokens(2, 64).cuda()
    other = copy.deepcopy(model)
    compile_layers(model, **options)
    compile_layers(other)
    for net in (model, other):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
        for _ in range(3):
            for part in (ids[:1], ids[1:]):
                loss_of(net, part).backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        assert torch.equal(
            model(input_ids=ids, use_cache=False).logits,
            other(input_ids=ids, use_cache=False).logits,
        )


def test_gate_and_up_kept_in_fp8() -> None:
    model, ids = make_model("qwen3", **SIZES).cuda(), tokens(2, 128).cuda()
    whole, kept = run(model, ids), run(model, ids, saved_gate_up="e4m3")
    assert torch.equal(whole[1], kept[1])
    values = [sqnr(whole[2][n], g) for n, g in kept[2].items()]
    assert 15 <= min(values) < 100


@pytest.mark.filterwarnings("ignore:.*CUDAGraph:UserWarning")
@pytest.mark.parametrize("cache_weights", [False, True])
def test_cuda_graphs_have_the_same_bits(cache_weights: bool) -> None:
    model, ids = make_model("qwen3", **SIZES).cuda(), tokens(2, 128).cuda()
    wanted = run(model, ids)
    model = copy.deepcopy(model)
    torch._dynamo.reset()
    compile_layers(model, mode="reduce-overhead", cache_weights=cache_weights)
    with collect_reports() as reports:
        for _ in range(4):  # warm up, record, replay
            mark_step()
            loss = loss_of(model, ids)
            loss.backward()
            got = gradients(model)
    assert torch.equal(loss.detach(), wanted[0])
    for name, gradient in wanted[2].items():
        if "embed" not in name:
            assert torch.equal(got[name], gradient), name
    for _ in range(4):
        mark_step()
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits.clone()
    assert torch.equal(logits, wanted[1])
    # A new version of the weights is seen by a replay.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
        mark_step()
        other = model(input_ids=ids, use_cache=False).logits
    assert not torch.equal(other, logits)
    noted = [n for report in reports for n in report.notes if "CUDA graph" in n]
    assert bool(noted) == cache_weights


def test_checkpointed_layers() -> None:
    model, ids = make_model("qwen3", **SIZES).cuda(), tokens(2, 128).cuda()
    wanted = run(model, ids)
    enable = getattr(model, "activation_checkpointing_enable", None)  # its new name
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    got = run(model, ids)
    assert torch.equal(got[0], wanted[0])
    for name, gradient in wanted[2].items():
        if "embed" not in name:
            assert torch.equal(got[2][name], gradient), name
