"""The baseline of torchao's FP8 linear layers, on a CPU with a stand-in."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from bench_runs import CONFIG, CPU, ON_CPU, WHOLE_BLOCKS, cells, run, write_config
from tiny_models import IGNORE_LRU_CACHE, IGNORE_SCRIPT_METHOD, gradients, sqnr
from torch import Tensor
from torch._dynamo import register_backend

from jetrl_compile.bench import models, torchao, torchao_ahead
from jetrl_compile.bench.compare_ways import Plan, compare_ways
from jetrl_compile.bench.steps import Shape, layer_steps
from jetrl_compile.bench.ways import Way, parse_way
from jetrl_compile.errors import ProviderError
from jetrl_compile.layers import decoder_layers

pytestmark = [
    IGNORE_SCRIPT_METHOD,
    IGNORE_LRU_CACHE,
    # Dynamo looks at the gradients of a layer's inputs.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture
def config(tmp_path: Path) -> str:
    return write_config(tmp_path)


class FakeFunction:
    """Stands for torchao's autograd function, which needs a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        assert rest == (128, torch.bfloat16, False)
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        assert (ctx.block_size, ctx.use_triton) == (128, False)
        dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)
        return dy @ weight, dw, None, None, None


def no_compiler(gm: Any, inputs: Any) -> Any:
    raise ValueError("no compiling")


register_backend(compiler_fn=no_compiler, name="fails")  # type: ignore[no-untyped-call, unused-ignore]


@pytest.mark.parametrize("backend", ["aot_eager", "fails"])
def test_layer_with_torchao(
    backend: str, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path(config) / "config.json").write_text(
        json.dumps({**CONFIG, **WHOLE_BLOCKS, "attention_bias": True})
    )
    monkeypatch.setattr(torchao, "function", lambda: FakeFunction)
    model = models.make_model(models.find_config(config, 1), CPU)
    specs = [parse_way("eager"), parse_way(f"torchao:backend={backend}")]
    plan = Plan(CPU, (Shape(1, 8),), rounds=1)
    rows = cells(compare_ways(model, specs, layer_steps, plan))
    for step in ("forward", "forward+backward"):
        row = rows[f"{step} 1x8", "torchao"]
        assert not row.failed, row.note
        assert ("eager, not compiled" in row.note) == (backend == "fails")
    assert not any(isinstance(m, torchao.TorchaoLinear) for m in model.modules())


def test_torchao_is_compiled_around(config: str, monkeypatch: Any) -> None:
    (Path(config) / "config.json").write_text(json.dumps({**CONFIG, **WHOLE_BLOCKS}))
    monkeypatch.setattr(torchao, "function", lambda: FakeFunction)
    model = models.make_model(models.find_config(config, 1), CPU)
    steps = layer_steps(model, Shape(2, 8), CPU)
    way = Way(parse_way("torchao:backend=aot_eager"), model)
    plain = steps.train()
    wanted = {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }
    with way.active():
        got = steps.train()
    assert torch.allclose(got, plain, atol=0.03, rtol=0.03)
    found = gradients(model)
    assert min(sqnr(wanted[name], found[name]) for name in found) > 30
    assert wanted.keys() == found.keys()


def test_torchao_calls() -> None:
    linears = models.linear_sizes(models.find_config("qwen3-8b"))
    assert linears == ((4096, 4096), (1024, 4096), (12288, 4096), (4096, 12288))
    calls = torchao_ahead.calls_of(linears, [8192])
    assert len(calls) == 4 * 2 + 3 + 2 + 3
    assert ("triton_fp8_blockwise_act_quant_rhs", 8192, 1024) not in calls


def test_torchao_that_is_not_to_be_had(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    less = ["--shape", "1x8", "--skip", "jetrl", "--skip", "compile"]
    status, out, _ = run("layer", config, *ON_CPU, *less)
    assert status == 0
    assert "failed: torchao" in out
    monkeypatch.setattr(torchao, "function", lambda: FakeFunction)
    model = models.make_model(models.find_config(config), CPU)
    with pytest.raises(
        ProviderError, match="k_proj is 64x128; torchao's layer needs multiples"
    ):
        torchao.with_fp8_linears(list(decoder_layers(model).values()))


def test_the_fastest_configurations_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    kernel = autotuner.__new__(autotuner)
    module = ModuleType(f"{torchao.PACKAGE}.kernels")
    module.kernel = kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torchao.tune_for(5, 20, keep=True)
    assert kernel.cache_results
    assert kernel.do_bench.keywords == {"warmup": 5, "rep": 20}
    torchao.tune_for(1, 1)  # what workers find beside each other is no measurement
    assert not kernel.cache_results
