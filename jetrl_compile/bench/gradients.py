"""How far gradients are from a float64-accumulated BF16 reference, as SQNR in dB.

The reference is the eager model in BF16 with each linear layer's three matmuls in
float64 on the same BF16 tensors, rounded to BF16 once. So it has the precision flow of
BF16 training without its accumulation error.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_compile.bench.results import Row
from jetrl_compile.bench.steps import Shape, Steps, stack_steps
from jetrl_compile.bench.ways import Way, WaySpec, dynamo_for_many_ways, failure
from jetrl_compile.layers import decoder_layers

ALL = "all parameters"
MEDIAN, LOWEST, COUNT = "median dB", "min dB", "parameters"
Gradients = dict[str, Tensor]


class ExactLinear(torch.autograd.Function):
    """y = x w^T with fprop, dgrad and wgrad in float64, each rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        """Return y."""
        ctx.save_for_backward(x, w)
        return (x.double() @ w.double().t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        """Return dx and dw."""
        x, w = ctx.saved_tensors
        wide = dy.double()
        dw = wide.flatten(0, -2).t() @ x.double().flatten(0, -2)
        return (wide @ w.double()).to(x.dtype), dw.to(w.dtype)


@contextmanager
def exact_linears(model: nn.Module) -> Iterator[None]:
    """Run a model's linear layers in float64 within the body."""
    function: Any = ExactLinear
    changed = [m for m in model.modules() if isinstance(m, nn.Linear)]

    def call(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            y: Tensor = function.apply(x, linear.weight)
            return y if linear.bias is None else y + linear.bias

        return forward

    try:
        for linear in changed:
            vars(linear)["forward"] = call(linear)
        yield
    finally:
        for linear in changed:
            vars(linear).pop("forward", None)


def sqnr(wanted: Tensor, got: Tensor) -> float:
    """Return signal over noise in dB; infinite where both are equal."""
    signal = wanted.double().square().sum().item()
    noise = (wanted.double() - got.double()).square().sum().item()
    if noise == 0:
        return math.inf
    if not math.isfinite(noise) or not signal:
        return -math.inf
    return 10 * math.log10(signal / noise)


def kind_of(parameter: str, layers: Sequence[str]) -> str:
    """Return a parameter's name without the layer that it is in."""
    for layer in layers:
        if parameter.startswith(f"{layer}."):
            return parameter.removeprefix(f"{layer}.")
    return parameter


def measure_gradients(
    model: nn.Module,
    specs: Sequence[WaySpec],
    shape: Shape,
    device: torch.device,
    say: Callable[[str], None],
) -> list[Row]:
    """Return a row for each way and kind of parameter.

    Args:
        model: With random weights; left as it was.
        specs: The ways; "eager" is plain BF16, and exact mode may be one.
        shape: Of the tokens.
        device: Where the model is.
        say: Called with a line before each part.
    """
    steps = stack_steps(model, shape, device)
    paths = list(decoder_layers(model))
    say("the reference, in float64")
    with exact_linears(model):
        wanted = _gradients(model, steps)
    rows: list[Row] = []
    with dynamo_for_many_ways():
        for spec in specs:
            say(f"{spec.name}: compiling and running")
            try:
                way = Way(spec, model)
                with way.active():
                    got = _gradients(model, steps)
            except Exception as error:  # a compiler raises whatever it likes
                rows.append(Row(ALL, spec.name, note=failure(error), failed=True))
                continue
            finally:
                steps.drop()
            rows += _rows(spec.name, wanted, got, paths)
    cases = {row.case: None for row in rows}
    return [row for case in cases for row in rows if row.case == case]


def _gradients(model: nn.Module, steps: Steps) -> Gradients:
    steps.train()
    found = {
        name: parameter.grad.detach()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    steps.drop()
    return found


def _rows(
    way: str, wanted: Gradients, got: Gradients, layers: Sequence[str]
) -> list[Row]:
    kinds: dict[str, list[float]] = {ALL: []}
    for name, reference in wanted.items():
        value = sqnr(reference, got[name]) if name in got else -math.inf
        kinds[ALL].append(value)
        kinds.setdefault(kind_of(name, layers), []).append(value)
    return [
        Row(
            kind,
            way,
            values={MEDIAN: median(found), LOWEST: min(found), COUNT: len(found)},
        )
        for kind, found in kinds.items()
    ]
