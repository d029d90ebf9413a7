import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_runs import (
    CPU,
    ON_CPU,
    QUICK,
    cells,
    run,
    write_config,
)
from tiny_models import IGNORE_LRU_CACHE, IGNORE_SCRIPT_METHOD
from torch import Tensor

from jetrl_compile.bench import models, runs, warm
from jetrl_compile.bench.compare_ways import Plan, compare_ways
from jetrl_compile.bench.kernels import KERNELS, measure_kernels
from jetrl_compile.bench.results import Row, compare
from jetrl_compile.bench.steps import (
    Shape,
    Steps,
    layers_steps,
    parse_shape,
    stack_steps,
)
from jetrl_compile.bench.timing import Clock, Timing, in_turns, summarize
from jetrl_compile.bench.ways import Way, WaySpec, choose_ways, parse_way
from jetrl_compile.errors import JetRLError, ModelError, RecipeError
from jetrl_compile.layers import decoder_layers

PROFILE = ("--shape", "1x8", "--profile")

pytestmark = [
    IGNORE_SCRIPT_METHOD,
    IGNORE_LRU_CACHE,
    # Dynamo looks at the gradients of a layer's inputs.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture
def config(tmp_path: Path) -> str:
    return write_config(tmp_path)


# Timing ----------------------------------------------------------------------------


def test_ways_take_turns() -> None:
    log: list[str] = []
    works = {name: (lambda name=name: log.append(name)) for name in "abc"}
    timings = in_turns(works, Clock(CPU), 3, before=lambda name: log.append(f"+{name}"))
    assert log == ["+a", "+b", "+c", *["+a", "a", "+b", "b", "+c", "c"] * 3]
    assert {timing.samples for timing in timings.values()} == {3}


def test_a_summary_is_of_medians() -> None:
    found = summarize([4.0, 1.0, 2.0, 3.0, 100.0])
    assert (found.median, found.low, found.high, found.samples) == (3, 1, 100, 5)
    assert summarize([2.0]) == Timing(2, 2, 2, 0, 1)
    assert found.divided(2) == Timing(1.5, 0.5, 50.0, found.spread, 5)


def test_ratios_and_memory_against_baselines() -> None:
    def row(way: str, ms: float, peak: float) -> Row:
        return Row("x", way, summarize([ms]), {"peak GiB": peak})

    failed = Row("x", "broken", failed=True)
    rows = [row("eager", 8, 9), row("compile", 4, 5), row("jetrl", 2, 4), failed]
    found = cells(compare(rows, ("eager", "compile", "torchao")))
    assert found["x", "jetrl"].values == {
        "peak GiB": 4,
        "over eager": 4,
        "over compile": 2,
        "peak over compile": 0.8,
    }
    assert found["x", "compile"].values == {"peak GiB": 5, "over eager": 2}
    assert found["x", "broken"].values == {}


# What is measured ------------------------------------------------------------------


def test_built_in_shapes() -> None:
    found = models.gemm_sizes(models.find_config("qwen3-8b"))
    assert [(size.name, size.n, size.k) for size in found] == [
        ("qkv", 6144, 4096),
        ("o", 4096, 4096),
        ("gate_up", 24576, 4096),
        ("down", 4096, 12288),
    ]
    billions = {
        "qwen3-4b": 4.02,
        "qwen3-8b": 8.19,
        "qwen3-32b": 32.8,
        "qwen2.5-7b": 7.6,
    }
    for name in models.BUILT_IN:
        made = models.find_config(name)
        inner = sum(size.n * size.k for size in models.gemm_sizes(made))
        tables = 1 if made.tie_word_embeddings else 2
        total = made.num_hidden_layers * inner
        total += tables * made.vocab_size * made.hidden_size
        assert round(total / 1e9, 1) == round(billions.get(name, 8.0), 1), name
    assert len(models.find_config("qwen2.5-7b", layers=3).layer_types) == 3


def test_models_that_cannot_be_measured(config: str, tmp_path: Path) -> None:
    for arguments, words in (
        (("stack", "qwen3-9b", *ON_CPU), "is no built-in shape"),
        (("stack", "qwen3-8b", *ON_CPU), "qwen3-8b needs a GPU"),
        (("stack", config, *ON_CPU, "--layers", 3), "the model has 2"),
        (("stack", config, *ON_CPU, "--shape", "4*8"), "write BATCHxLENGTH"),
        (("layer", config, *ON_CPU, "--shape", f"{9**20}x1"), "at most 1,073,741,824"),
        (
            ("layer", config, *ON_CPU, "--shape", "1x8", "--way", "a:fuse=so"),
            "fuse='so",
        ),
        (("gradients", config, "--device", "cpu", "--way", "a:b=1"), "option 'b' of"),
        (
            ("stack", config, *ON_CPU, *PROFILE, tmp_path / "p", "--skip", "jetrl"),
            "no usable way 'jetrl' to profile",
        ),
        (("stack", config, *ON_CPU, *PROFILE, tmp_path / "no/p"), "there is no folder"),
        (("kernels", config, *ON_CPU, "--json", tmp_path), "it is a folder"),
        (("kernels", config, *ON_CPU, "--json", f"{config}/config.json"), "be lost"),
        (
            (
                "layer",
                config,
                *ON_CPU,
                "--json",
                tmp_path / "a",
                *PROFILE,
                f"{config}/a",
            ),
            "another result goes there too",
        ),
        (("stack", config, *ON_CPU, "--graphs", "step"), "CUDA graphs need a GPU"),
        (("stack", config, *ON_CPU, "--skip", "x"), "no way 'x' to skip"),
    ):
        status, out, err = run(*arguments)
        assert (status, out) == (2, "")
        assert words in " ".join(err.split())
    if not torch.cuda.is_available():
        assert "no CUDA GPU was found" in run("stack", "qwen3-8b")[2]
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(ModelError, match="holds no config that"):
        models.find_config(config)


def test_memory_that_runs_out(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    no_memory = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")

    def steps(model: Any, shape: Shape, device: torch.device) -> Steps:
        if shape.batch > 1:
            raise no_memory
        return stack_steps(model, shape, device)

    monkeypatch.setattr(runs, "stack_steps", steps)
    skip = ["--skip", "compile", "--skip", "jetrl"]
    status, out, err = run("stack", config, *ON_CPU, "--shape", "2x8", *skip)
    assert (status, out) == (2, "")
    assert "error: 2x8 tokens do not fit into cpu; give a smaller --shape" in err
    # What was measured before is kept.
    two = ["--shape", "1x8", "--shape", "2x8"]
    status, out, _ = run("stack", config, *ON_CPU, *two, *skip)
    assert status == 0
    assert "forward+backward 1x8" in out
    assert "failed: 2x8 tokens do not fit into cpu" in out
    with (
        pytest.raises(RuntimeError, match="another"),
        models.fitting("these", CPU, "wait"),
    ):
        raise RuntimeError("another")


def test_gemms_to_compile_ahead() -> None:
    made = models.find_config("qwen3-8b")
    found = warm.gemm_shapes(made, [8192])
    assert len(found) == 4 * 4  # wgrad differs between the two recipes
    assert len(warm.gemm_shapes(made, [1, 64], ["jetrl"], backward=False)) == 2 * 4
    said: list[str] = []
    warm.compile_ahead(found, CPU, said.append)
    assert not said


def test_shapes_are_read() -> None:
    assert parse_shape("4x2048") == Shape(4, 2048)
    for text in ("", "4", "x4", "4x", "0x4", "4x-1", "4x4x4"):
        with pytest.raises(ModelError, match="cannot be read"):
            parse_shape(text)


def test_ways_are_read() -> None:
    assert parse_way("eager") == WaySpec("eager", "eager")
    assert parse_way("jetrl") == WaySpec("jetrl", "jetrl", {"recipe": "jetrl"})
    assert parse_way("jetrl_paper").options == {"recipe": "jetrl_paper"}
    found = parse_way("mine:cache=true,count=3,providers=triton+reference,x=y")
    assert (found.name, found.kind) == ("mine", "jetrl")
    assert found.options == {
        "recipe": "jetrl",
        "cache": True,
        "count": 3,
        "providers": ("triton", "reference"),
        "x": "y",
    }
    for text in ("", ":a=b", "a:b", "a:=b", "a:b=c,", "jetrl_papr"):
        with pytest.raises(RecipeError):
            parse_way(text)
    ways = choose_ways(("eager", "jetrl"), ("jetrl:lowering=aot",), ("eager",))
    assert ways == [parse_way("jetrl:lowering=aot")]
    with pytest.raises(RecipeError, match="every way is skipped"):
        choose_ways(("eager",), (), ("eager",))


# Stacks and layers -----------------------------------------------------------------


def test_stack_in_every_way_on_one_model(config: str) -> None:
    model = models.make_model(models.find_config(config), CPU)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    steps = stack_steps(model, Shape(1, 24), CPU)
    wanted = steps.forward()
    specs = choose_ways(
        ("eager", "compile:backend=aot_eager", "jetrl:lowering=aot"),
        ("bad:recipe=nothing", "worse:lowering=aot,providers=deep_gemm"),
        (),
    )
    rows = compare_ways(model, specs, stack_steps, Plan(CPU, (Shape(1, 24),), rounds=1))
    found = cells(rows)
    assert len(rows) == 2 * len(specs)
    for step in ("forward", "forward+backward"):
        case = f"{step} 1x24"
        for way in ("eager", "compile", "jetrl"):
            row = found[case, way]
            assert row.timing is not None
            assert not row.failed
            assert "same bits again" in row.note
            assert "attention flash" in row.note
        # Two layers share one graph: one for training, one for inference.
        assert found[case, "compile"].values["graphs"] == 2
        assert found[case, "jetrl"].values["graphs"] == 2
        assert "recipe 'nothing' is unknown" in found[case, "bad"].note
        assert found[case, "worse"].failed
        assert found[case, "jetrl"].values.keys() >= {"over eager", "over compile"}
    for layer in decoder_layers(model).values():
        assert layer._compiled_call_impl is None
    assert torch.equal(steps.forward(), wanted)
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])


def test_exact_mode_is_one_more_way(config: str) -> None:
    model: Any = models.make_model(models.find_config(config), CPU)
    steps = stack_steps(model, Shape(2, 12), CPU)
    wanted = steps.forward()
    specs = choose_ways(
        ("jetrl:lowering=aot",),
        ("exact:exact=true,lowering=aot", "graphs:exact=true,mode=reduce-overhead"),
        (),
    )
    assert [spec.is_exact for spec in specs] == [False, True, True]
    rows = compare_ways(model, specs, stack_steps, Plan(CPU, (Shape(2, 12),), rounds=1))
    found = cells(rows)
    for step in ("forward", "forward+backward"):
        plain, exact = found[f"{step} 2x12", "jetrl"], found[f"{step} 2x12", "exact"]
        assert not exact.failed, exact.note
        assert "attention flash" in plain.note
        assert "attention flash" not in exact.note
        assert "same bits again" in exact.note
        assert exact.values["over jetrl"] > 0
        assert "over jetrl" not in plain.values
        assert "exact does not go with mode" in found[f"{step} 2x12", "graphs"].note
    # Two layers share a graph; the last norm has one. Each: training, inference.
    assert found["forward 2x12", "exact"].values["graphs"] == 4
    assert model.config._attn_implementation == "sdpa"
    assert all(module._compiled_call_impl is None for module in model.modules())
    assert torch.equal(steps.forward(), wanted)
    body, ids = model.get_decoder(), torch.arange(24).view(2, 12)
    with Way(specs[1], model).active(), torch.no_grad():
        both = body(input_ids=ids, use_cache=False).last_hidden_state
        alone = body(input_ids=ids[1:, :7], use_cache=False).last_hidden_state
    assert torch.equal(alone[0], both[1, :7]), "in any batch"


def test_a_way_that_runs_eagerly_fails(config: str) -> None:
    model = models.make_model(models.find_config(config), CPU)
    plan = Plan(CPU, (Shape(1, 8),), rounds=1, forward_only=True)
    specs = [parse_way("eager"), parse_way("compile:backend=aot_eager")]
    with torch.compiler.set_stance("force_eager"):
        first, second = compare_ways(model, specs, stack_steps, plan)
    assert first.timing is not None
    assert (second.timing, second.failed) == (None, True)
    assert second.note == "Dynamo compiled nothing, so the layers ran eagerly"


def test_two_shapes_forward_only(config: str) -> None:
    shapes = [word for shape in ("2x4", "1x8", "2x4") for word in ("--shape", shape)]
    arguments = [*shapes, "--forward-only"]
    status, out, _ = run(
        "stack", config, *ON_CPU, *arguments, *QUICK, "--skip", "jetrl"
    )
    assert out.count("forward 2x4") == out.count("forward 1x8") == 1
    assert "backward" not in out
    assert status == 0


def test_a_case_without_targets(config: str) -> None:
    arguments = ["--m", 8, "--rounds", 1, "--only", "gemm", "--check"]
    status, out, err = run("kernels", config, *ON_CPU, *arguments)
    assert "M=8" in out
    assert (status, "no target is set" in err) == (2, True)


@pytest.mark.parametrize("kind", ["layer", "stack"])
def test_a_model_without_targets_is_told_before_it_is_measured(
    kind: str, config: str, tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    status, out, err = run(kind, config, *ON_CPU, "--check", "--json", file)
    assert (status, out, file.exists()) == (2, "", False)
    assert f"no target of jetrl bench {kind} is set for {config}; leave --check" in err


def test_stack_command(config: str, tmp_path: Path) -> None:
    file, profile = tmp_path / "out.json", tmp_path / "profile.txt"
    arguments = ["--shape", "1x16", "--layers", 1, *QUICK]
    status, out, _ = run(
        "stack", config, *ON_CPU, *arguments, "--json", file, "--profile", profile
    )
    assert status == 0
    assert "forward+backward 1x16" in out
    table = json.loads(file.read_text())
    assert (table["format"], table["version"]) == ("jetrl.bench", 1)
    assert len(table["rows"]) == 2 * 3
    assert table["settings"]["layers"] == 1
    assert table["environment"]["versions"]["torch"] == torch.__version__
    assert {"torchao", "deep_gemm", "triton"} <= set(table["environment"]["versions"])
    assert table["rows"][0]["timing"]["samples"] == 2
    text = profile.read_text()
    assert text.startswith("jetrl, forward: ")
    assert "jetrl::gemm" in text
    assert "jetrl, forward+backward: " in text


def test_errors_are_the_projects_own() -> None:
    with pytest.raises(JetRLError):
        Plan(CPU, (), graphs="all")


def test_layers_alone_do_what_the_stack_does(config: str) -> None:
    model: Any = models.make_model(models.find_config(config), CPU)
    steps = layers_steps(model, Shape(2, 8), CPU)
    inputs: list[Tensor] = []
    handle = next(iter(decoder_layers(model).values())).register_forward_pre_hook(
        lambda _, args: inputs.append(args[0])
    )
    got = steps.forward()
    handle.remove()
    body = model.get_decoder()
    with torch.no_grad():
        wanted = body(inputs_embeds=inputs[0], use_cache=False).last_hidden_state
        assert torch.equal(body.norm(got), wanted)
    steps.train()
    assert all(p.grad is not None for p in body.layers.parameters())
    steps.drop()
    assert not any(p.grad is not None for p in model.parameters())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("graphs", ["none", "step"])
def test_stack_on_a_gpu(config: str, graphs: str) -> None:
    device = torch.device("cuda")
    model = models.make_model(models.find_config(config), device)
    plan = Plan(device, (Shape(2, 128),), rounds=3, graphs=graphs, run_ahead=True)
    specs = choose_ways(runs.STACK_WAYS, (), ())
    make_steps = layers_steps if graphs == "step" else stack_steps
    rows = compare_ways(model, specs, make_steps, plan)
    assert not [row.note for row in rows if row.failed]
    train = [row for row in rows if row.case.startswith("forward+backward")]
    assert all(row.values["peak GiB"] > 0 for row in train)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_kernels_on_a_gpu() -> None:
    device = torch.device("cuda")
    rows = measure_kernels([(256, 512)], device, 3, lambda _: None, sample_ms=1.0)
    assert len(rows) == 1 + len(KERNELS)
    assert not [row.note for row in rows if row.failed]
    # Each was captured; its replays read buffers that are still there.
    assert not [row.note for row in rows[1:] if row.note]
