"""The four benchmarks, each from its options to its results."""

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from jetrl_compile.bench.compare_ways import Plan, compare_ways
from jetrl_compile.bench.gemms import measure_gemms
from jetrl_compile.bench.gradients import measure_gradients
from jetrl_compile.bench.kernels import measure_kernels
from jetrl_compile.bench.models import (
    activation_widths,
    check_device,
    find_config,
    gemm_sizes,
    linear_sizes,
    make_model,
)
from jetrl_compile.bench.results import Results, Row, environment
from jetrl_compile.bench.steps import (
    Shape,
    layer_steps,
    layers_steps,
    parse_shape,
    stack_steps,
)
from jetrl_compile.bench.torchao_ahead import compile_quantizers
from jetrl_compile.bench.warm import compile_ahead, gemm_shapes
from jetrl_compile.bench.ways import JETRL, TORCHAO, WaySpec, choose_ways
from jetrl_compile.errors import ModelError, ProviderError
from jetrl_compile.options import parse_options
from jetrl_compile.recipe import recipe_names

STACK_WAYS = ("eager", "compile", "jetrl")
LAYER_WAYS = ("eager", "compile", "torchao", "jetrl")
GRADIENT_WAYS = ("eager", "jetrl", "jetrl_paper")
LAYER_SAMPLE_MS = 20.0


@dataclass(frozen=True)
class RunOptions:
    """What the benchmarks of ways have in common.

    Attributes:
        model: A built-in shape or a config folder.
        device: "cuda" or "cpu".
        shapes: Such as "4x2048".
        layers: Decoder layers to keep; None: all.
        ways: More ways, or other options of the default ones.
        skip: Names of ways to leave out.
        rounds: Samples of each.
        forward_only: Whether the backward pass is left out.
        graphs: As of `Plan`.
        profile: As of `Plan`.
        profile_way: As of `Plan`.
    """

    model: str
    device: str
    shapes: tuple[str, ...]
    layers: int | None = None
    ways: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    rounds: int = 7
    forward_only: bool = False
    graphs: str = "none"
    profile: str | None = None
    profile_way: str = "jetrl"


Say = Callable[[str], None]


def run_stack(options: RunOptions, say: Say) -> Results:
    """Measure a whole decoder stack in several ways."""
    return _run_ways("stack", options, STACK_WAYS, say)


def run_layer(options: RunOptions, say: Say) -> Results:
    """Measure one decoder layer in several ways."""
    return _run_ways("layer", replace(options, layers=1), LAYER_WAYS, say)


def _run_ways(
    kind: str, options: RunOptions, defaults: Iterable[str], say: Say
) -> Results:
    device = torch.device(options.device)
    check_device(options.model, device)
    specs = _choose(defaults, options)
    plan = Plan(
        device,
        tuple(dict.fromkeys(map(parse_shape, options.shapes))),
        rounds=options.rounds,
        forward_only=options.forward_only,
        graphs=options.graphs,
        profile=options.profile,
        profile_way=options.profile_way,
        say=say,
    )
    make_steps = layers_steps if options.graphs == "step" else stack_steps
    if kind == "layer":
        make_steps = layer_steps
        sample = LAYER_SAMPLE_MS if device.type == "cuda" else 0.0
        plan = replace(plan, sample_ms=sample, run_ahead=True)
    model, config = _make(options, specs, plan.shapes, say)
    rows = compare_ways(model, specs, make_steps, plan)
    settings = {
        "layers": config.num_hidden_layers,
        "rounds": options.rounds,
        "graphs": options.graphs,
        "ways": [{"name": s.name, "kind": s.kind, "options": s.options} for s in specs],
    }
    return _results(kind, options.model, rows, device, settings)


def run_gradients(options: RunOptions, say: Say) -> Results:
    """Measure gradients against a float64-accumulated BF16 reference."""
    device = torch.device(options.device)
    check_device(options.model, device)
    specs = _choose(GRADIENT_WAYS, options)
    shape = parse_shape(options.shapes[0])
    model, config = _make(options, specs, (shape,), say)
    rows = measure_gradients(model, specs, shape, device, say)
    settings = {"layers": config.num_hidden_layers, "shape": str(shape)}
    return _results("gradients", options.model, rows, device, settings)


def run_kernels(
    model: str,
    device_name: str,
    tokens: Sequence[int],
    rounds: int,
    parts: Sequence[str],
    say: Say,
) -> Results:
    """Measure the kernels of a model's layer.

    Args:
        model: A built-in shape or a config folder.
        device_name: "cuda" or "cpu".
        tokens: Values of M; quantize and fused kernels are measured at the first.
        rounds: Samples of each.
        parts: "quantize", "gemm" or both.
        say: Called with a line before each part.
    """
    device = torch.device(device_name)
    check_device(model, device)
    config, tokens = find_config(model), tuple(dict.fromkeys(tokens))
    rows: list[Row] = []
    if "quantize" in parts:
        shapes = [(tokens[0], width) for width in activation_widths(config)]
        rows += measure_kernels(shapes, device, rounds, say)
    if "gemm" in parts:
        _release(device)
        compile_ahead(gemm_shapes(config, tokens), device, say)
        rows += measure_gemms(gemm_sizes(config), tokens, device, rounds, say)
    settings = {"tokens": list(tokens), "rounds": rounds, "parts": list(parts)}
    return _results("kernels", model, rows, device, settings)


def _choose(defaults: Iterable[str], options: RunOptions) -> list[WaySpec]:
    """Return the ways; what cannot be told apart from a typing error ends here.

    Raises:
        JetRLError: A way or an option of the backend jetrl is unknown, or the way to
            profile is not there.
    """
    specs = choose_ways(defaults, options.ways, options.skip)
    for spec in specs:
        if spec.kind == JETRL:
            parse_options(spec.options)
    if options.profile is not None and options.profile_way not in {
        spec.name for spec in specs
    }:
        raise ProviderError(
            f"there is no usable way {options.profile_way!r} to profile; choose one "
            "with --profile-way"
        )
    return specs


def _make(
    options: RunOptions,
    specs: Sequence[WaySpec],
    shapes: Sequence[Shape],
    say: Say,
) -> tuple[Any, Any]:
    """Return a model and its config; kernels are compiled first, in other processes."""
    device = torch.device(options.device)
    config = find_config(options.model, options.layers)
    named = {str(s.options["recipe"]) for s in specs if "recipe" in s.options}
    recipes = sorted(named & set(recipe_names()))
    tokens = sorted({shape.tokens for shape in shapes})
    with suppress(ModelError):  # a model of other layers is compiled as it runs
        needed = gemm_shapes(config, tokens, recipes, not options.forward_only)
        compile_ahead(needed, device, say)
        if device.type == "cuda" and any(s.kind == TORCHAO for s in specs):
            compile_quantizers(linear_sizes(config), tokens, say)
    say(f"making {options.model}, {config.num_hidden_layers} layers, random weights")
    return make_model(config, device), config


def _results(
    kind: str,
    model: str,
    rows: list[Row],
    device: torch.device,
    settings: dict[str, Any],
) -> Results:
    return Results(kind, model, tuple(rows), environment(device), settings)


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
