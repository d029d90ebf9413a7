"""The options of fusion and kept weights, from torch.compile to the compile caches."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fused_graphs import FUSED, SAVED, WHOLE, calls, make_gated
from tiny_models import (
    IGNORE_SCRIPT_METHOD,
    Recorder,
    activations,
    backward,
    compiled,
    loss_of,
    make_model,
    tokens,
)
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_inductor_cache

from jetrl_compile.backend import JetRLPass, jetrl
from jetrl_compile.errors import RecipeError
from jetrl_compile.kernels import fused_ops
from jetrl_compile.layers import compile_layers
from jetrl_compile.options import parse_options
from jetrl_compile.pipeline import CompileReport
from jetrl_compile.report_sink import collect_reports

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    IGNORE_SCRIPT_METHOD,
    # Dynamo looks at the gradient of a layer's input.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fuse": 0, "saved_gate_up": "e4m3"}, "fuse=0 is unknown; use True, False"),
        ({"fuse": torch.ones(2)}, "is unknown; use True, False or None"),
        ({"cache_weights": 1}, "cache_weights=1 is unknown; use True or False"),
        ({"fuse": "yes"}, "fuse='yes' is unknown; use True, False or None"),
        ({"saved_gate_up": "fp8"}, "saved_gate_up='fp8' is unknown; use bf16 or e4m3"),
        ({"saved_gate_up": None}, "saved_gate_up=None is unknown; use bf16 or e4m3"),
        ({"cache_weights": None}, "cache_weights=None is unknown; use True or False"),
        ({"mode": "max-autotune"}, "mode='max-autotune' .* default or reduce-overhead"),
        ({"fused": True}, "'fused' .* did you mean 'fuse'?"),
        ({"cache_weight": True}, "did you mean 'cache_weights'?"),
        ({"fuse": False, "saved_gate_up": "e4m3"}, "needs fused kernels; set fuse=Tr"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_options(options)


def test_nothing_is_fused_on_a_cpu_unless_asked_for() -> None:
    model, x = make_gated(), activations(8, 256)
    with collect_reports() as reports:
        backward(compiled(model)(x))
    assert reports[0].changes["merge_siblings"] == 0
    assert reports[0].changes["fuse_quantize"] == 0
    assert reports[0].notes == ()
    torch._dynamo.reset()
    with collect_reports() as reports:
        compiled(model, saved_gate_up="e4m3")(x)
    assert reports[0].notes == (
        "gate and up are kept as they are: nothing is fused here; set fuse=True",
    )


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_modes(mode: str) -> None:
    model, x = linear_layers(), activations(8, 256)
    with torch.no_grad():
        wanted = compiled(model)(x)
        torch._dynamo.reset()
        by_option = compiled(model, mode=mode, lowering="inductor")
        assert torch.equal(by_option(x), wanted)
        torch._dynamo.reset()
        by_argument = torch.compile(model, backend="jetrl", mode=mode)
        assert torch.equal(by_argument(x), wanted)


def test_bad_mode_says_what_to_do() -> None:
    run = torch.compile(linear_layers(), backend=jetrl, mode="max-autotune")
    with pytest.raises(BackendCompilerFailed, match="use default or reduce-overhead"):
        run(activations(8, 256))


# Layers one by one -------------------------------------------------------------------


def test_eps_is_a_constant_of_compiled_layers() -> None:
    # CUDA graphs cannot read a scalar on the CPU; with dynamic=True Dynamo makes one.
    model, recorder = make_model("qwen3", **WHOLE), Recorder()
    compile_layers(model, lowering="aot", recorder=recorder, **FUSED)
    with collect_reports() as reports:
        for length in (24, 40, 17):
            loss_of(model, tokens(2, length)).backward()
    assert len(reports) == 1, "any length, one graph"
    forward = recorder.graphs[0].graph
    inputs = [n.meta["val"] for n in forward.find_nodes(op="placeholder")]
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    assert len(tensors) > 4
    assert all(value.dim() > 0 for value in tensors)
    assert not any(isinstance(value, torch.SymFloat) for value in inputs)
    norms = calls(forward, fused_ops.rms_norm_quantize)
    assert [node.args[3:5] for node in norms] == [(1e-6, None)] * 2


@pytest.mark.parametrize("before", [False, True])
def test_setting_of_numbers_is_put_back(before: bool) -> None:
    model, config = make_model("llama"), torch._dynamo.config
    compile_layers(model, lowering="aot")
    patch = config.patch(specialize_float=before, specialize_int=not before)
    with patch, torch.no_grad():
        loss_of(model, tokens(1, 8))
        assert config.specialize_float is before
        with pytest.raises(torch._dynamo.exc.Unsupported):
            model.model.layers[0]()
        assert config.specialize_float is before
        assert config.specialize_int is not before


def test_layers_have_the_bits_of_the_whole_model() -> None:
    ids = tokens(2, 24)
    with torch.no_grad():
        wanted = loss_of(compiled(make_model("qwen3", **WHOLE)), ids)
        torch._dynamo.reset()
        model = make_model("qwen3", **WHOLE)
        compile_layers(model, lowering="aot", cache_weights=True, **FUSED)
        for _ in range(2):
            assert torch.equal(loss_of(model, ids), wanted)


# Compile caches ------------------------------------------------------------------


@pytest.fixture
def caches() -> Iterator[None]:
    """Inductor's caches, on and empty."""
    with (
        fresh_inductor_cache(),
        torch._inductor.config.patch(fx_graph_cache=True),
        torch._functorch.config.patch(enable_autograd_cache=True),
    ):
        yield


def linear_layers(*sizes: int) -> nn.Module:
    """GEMMs alone: Inductor makes no C++ code for them, which takes seconds."""
    torch.manual_seed(0)
    sizes = sizes or (256, 256)
    return nn.Sequential(
        *(nn.Linear(256, size, bias=False, dtype=torch.bfloat16) for size in sizes)
    )


def infer(model: Any, **options: Any) -> tuple[CompileReport, Tensor]:
    """Compile as a new process would, as far as Dynamo knows."""
    torch._dynamo.reset()
    counters.clear()
    with collect_reports() as reports, torch.no_grad():
        y = compiled(model, lowering="inductor", **options)(activations(24, 256))
    (report,) = reports
    return report, y


def test_uuid_tells_options_apart() -> None:
    options: list[dict[str, Any]] = [
        {},
        {"fuse": False},
        FUSED,
        SAVED,
        {"cache_weights": True},
        {**FUSED, "cache_weights": True},
    ]
    found = {JetRLPass([], [], parse_options(o)).uuid() for o in options}
    assert len(found) == len(options)


@pytest.mark.usefixtures("caches")
def test_cached_graph_of_other_options_is_not_used() -> None:
    model = linear_layers()
    first, y = infer(model)
    for options in ({"fuse": True}, {"cache_weights": True}, {"saved_gate_up": "e4m3"}):
        other, again = infer(model, **options)
        assert not other.from_cache, options
        assert counters["aot_autograd"]["autograd_cache_hit"] == 0
        assert torch.equal(y, again)
    assert first.changes["cache_weights"] == 0
    kept, _ = infer(model, cache_weights=True)
    assert kept.from_cache
    assert kept.changes["cache_weights"] == 2
    assert infer(model)[0].changes["cache_weights"] == 0
    # The graph from the cache reads the weights as they are.
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    changed, twice = infer(model, cache_weights=True)
    assert changed.from_cache
    assert torch.equal(twice, infer(model)[1])
    assert not torch.equal(twice, y)


class Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linear_layers(200, 128)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        layers: Any = self.layers
        return tuple(layer(x) for layer in layers)


@pytest.mark.usefixtures("caches")
def test_notes_come_from_the_cache_too() -> None:
    model = Siblings()
    first, _ = infer(model, fuse=True)
    second, _ = infer(model, fuse=True)
    assert second.from_cache
    assert not first.from_cache
    assert len(first.notes) == 1
    assert "[200, 128] are not multiples of 128" in first.notes[0]
    assert second.notes == first.notes


def test_report_by_callable_has_notes() -> None:
    found: list[CompileReport] = []
    report: Callable[[CompileReport], None] = found.append
    compiled(Siblings(), fuse=True, report=report)(activations(24, 256))
    assert len(found[0].notes) == 1
