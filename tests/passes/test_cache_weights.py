"""A compiled model quantizes a weight once between its changes, and runs no old one."""

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fused_graphs import CACHED, GatedMlp, calls, check_same, make_gated
from tiny_models import (
    IGNORE_SCRIPT_METHOD,
    Recorder,
    activations,
    backward,
    compiled,
    gradients,
    loss_of,
    make_model,
    tokens,
)
from torch import Tensor, nn

from jetrl_compile import forget_weights
from jetrl_compile.backend import jetrl
from jetrl_compile.kernels import fused_ops, ops, weight_ops
from jetrl_compile.kernels.weight_ops import weight_counts
from jetrl_compile.report_sink import collect_reports

# As FSDP2 writes to a gathered parameter.
keep_version: Any = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
pytestmark = pytest.mark.usefixtures("fresh_dynamo")
Counts = Callable[[], tuple[int, int]]


@pytest.fixture(autouse=True)
def counts() -> Iterator[Counts]:
    """How often codes were made and read since the last call."""
    forget_weights()
    last = [weight_counts()]

    def since() -> tuple[int, int]:
        now, before = weight_counts(), last[0]
        last[0] = now
        return now["made"] - before["made"], now["read"] - before["read"]

    yield since
    forget_weights()


def train(run: Callable[..., Any], x: Tensor) -> Tensor:
    y: Tensor = run(x)
    backward(y)
    return y.detach()


def test_once_a_step_and_direction(counts: Counts) -> None:
    model, x = make_gated(), activations(24, 256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = compiled(model, **CACHED)
    for _ in range(2):
        with torch.no_grad():  # old log-probs, and a reference pass
            run(x)
            assert counts() == (2, 0)  # gate and up are one
            run(activations(7, 256, grad=False))
            assert counts() == (0, 2)
        for micro_batch in range(3):
            train(run, x)
            assert counts() == ((2, 2) if micro_batch == 0 else (0, 4))
        optimizer.step()
        optimizer.zero_grad()


def test_without_fusion_each_weight_is_kept(counts: Counts) -> None:
    model, x = make_gated(), activations(24, 256)
    run = compiled(model, cache_weights=True)
    train(run, x)
    assert counts() == (6, 0)
    train(run, x)
    assert counts() == (0, 6)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("recipe", ["jetrl", "jetrl_paper"])
def test_same_bits_as_without(fuse: bool, recipe: str) -> None:
    results = []
    for cache in (False, True):
        torch._dynamo.reset()
        model, x = make_gated(), activations(24, 256)
        run = compiled(model, fuse=fuse, cache_weights=cache, recipe=recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for _ in range(2):
            y = train(run, x)
            optimizer.step()
        results.append((y, {"x": x.grad, **gradients(model)}))
    assert torch.equal(results[0][0], results[1][0])
    check_same(results[0][1], results[1][1])


def test_graphs_hold_no_codes_of_weights() -> None:
    model, recorder = make_gated(), Recorder()
    with collect_reports() as reports:
        train(compiled(model, recorder=recorder, **CACHED), activations(24, 256))
    for graph in recorder.graphs:
        assert len(calls(graph.graph, weight_ops.gemm_weights)) == 2
        assert not calls(graph.graph, fused_ops.quantize_parts)
        assert not calls(graph.graph, ops.quantize)
    assert len(calls(recorder.graphs[1].graph, ops.gemm)) == 2, "wgrad"
    assert reports[0].changes["cache_weights"] == 4
    assert reports[0].lowered == {"fprop": 3, "dgrad": 3, "wgrad": 3}


@pytest.mark.parametrize("autocast", [False, True])
def test_masters_of_fp32_are_kept(autocast: bool, counts: Counts) -> None:
    # The quantizer reads the FP32 weight itself and rounds it to BF16.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256, bias=False))
    x = activations(24, 256, dtype=torch.float32)
    run = compiled(model, **CACHED)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        first = train(run, x)
        assert counts() == (2, 0)
        assert torch.equal(train(run, x), first)
        assert counts() == (0, 2)


# Never stale -----------------------------------------------------------------------


def adam(model: GatedMlp) -> None:
    torch.optim.AdamW(model.parameters(), lr=1e-1, fused=True).step()


def sgd(model: GatedMlp) -> None:
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def in_place(model: GatedMlp) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)


def load(model: GatedMlp) -> None:
    model.load_state_dict({k: v * 1.5 for k, v in model.state_dict().items()})


def assign(model: GatedMlp) -> None:
    state = {k: v * 1.5 for k, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def replace(model: GatedMlp) -> None:
    model.up_proj.weight = nn.Parameter(model.up_proj.weight.detach() * 1.5)


def data_and_forget(model: GatedMlp) -> None:
    for p in model.parameters():
        p.data.copy_(p.data * 1.5)
    forget_weights()


def gather(model: GatedMlp) -> None:
    parameters = list(model.parameters())
    with keep_version(tuple(parameters)):
        torch._foreach_mul_([p.detach() for p in parameters], 1.5)
    shard = nn.Parameter(torch.ones(2))
    shard.grad = torch.ones(2)
    torch.optim.SGD([shard], lr=1.0).step()


CHANGES = (adam, sgd, in_place, load, assign, replace, data_and_forget, gather)


@pytest.fixture(scope="module")
def fresh_result() -> Callable[[GatedMlp, Tensor], Tensor]:
    """The result of a model's weights without anything kept."""

    def result(model: GatedMlp, x: Tensor) -> Tensor:
        other = copy.deepcopy(model)
        with torch.no_grad():
            y: Tensor = compiled(other, fuse=True)(x)
        return y

    return result


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_after_a_change(
    change: Callable[[GatedMlp], None],
    fresh_result: Callable[[GatedMlp, Tensor], Tensor],
) -> None:
    model, x = make_gated(), activations(24, 256)
    run = compiled(model, **CACHED)
    old = train(run, x)
    for _ in range(2):
        change(model)
        with torch.no_grad():
            new = run(x)
        wanted = fresh_result(model, x)
        assert not torch.equal(new, old)
        assert torch.equal(new, wanted)
        assert torch.equal(train(run, x), wanted)
        old = new


def test_dgrad_reads_the_new_weight() -> None:
    results: list[Tensor | None] = []
    for options in (CACHED, {"fuse": True}):
        torch._dynamo.reset()
        model, x = make_gated(), activations(24, 256)
        run = compiled(model, **options)
        train(run, x)
        in_place(model)
        x.grad = None
        train(run, x)
        results.append(x.grad)
    assert results[0] is not None
    assert results[1] is not None
    assert torch.equal(results[0], results[1])


def test_changed_before_backward_is_rejected() -> None:
    # As without kept codes: autograd sees the version.
    model, x = make_gated(), activations(24, 256)
    y = compiled(model, **CACHED)(x)
    in_place(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(y)


def test_models_come_and_go(
    fresh_result: Callable[[GatedMlp, Tensor], Tensor], counts: Counts
) -> None:
    x = activations(24, 256, grad=False)
    wanted = []
    for scale in (1.0, 2.0, 3.0):
        model = make_gated()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(scale)
            assert torch.equal(compiled(model, **CACHED)(x), fresh_result(model, x))
            wanted.append(model)
        assert counts() == (2, 0)
    # All at once, and copies of them, through one graph.
    models = [*wanted, copy.deepcopy(wanted[0])]
    with torch.no_grad():
        for _ in range(2):
            results = [compiled(model, **CACHED)(x) for model in models]
    assert torch.equal(results[0], results[3])
    assert not torch.equal(results[0], results[1])
    assert counts() == (2, 14)
    del wanted, models, model, p
    torch._dynamo.reset()
    gc.collect()
    assert not weight_ops._KEPT


def test_layers_that_share_a_graph(counts: Counts) -> None:
    model = make_model("llama", num_hidden_layers=2).eval()
    ids = tokens(1, 16)
    with torch.no_grad():
        wanted = loss_of(compiled(model, fuse=True), ids)
        torch._dynamo.reset()
        for layer in model.model.layers:
            layer.compile(
                backend=jetrl,
                fullgraph=True,
                options={"lowering": "aot", **CACHED},
            )
        for made, read in ((14, 0), (0, 14)):
            assert torch.equal(loss_of(model, ids), wanted)
            assert counts() == (made, read)


@IGNORE_SCRIPT_METHOD
def test_nothing_is_kept_under_cuda_graphs(counts: Counts) -> None:
    model, x = make_gated(), activations(24, 256)
    with collect_reports() as reports:
        train(compiled(model, **CACHED, lowering="inductor", mode="reduce-overhead"), x)
    assert reports[0].changes["cache_weights"] == 0
    assert any("CUDA graph" in note for note in reports[0].notes)
    assert counts() == (0, 0)
    torch._dynamo.reset()
    with collect_reports() as reports:
        train(compiled(model, **CACHED, lowering="inductor"), x)
    assert reports[0].changes["cache_weights"] > 0
    assert not reports[0].notes
