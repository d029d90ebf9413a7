"""Activation checkpointing: the same bits, and a warning where it hides the layers."""

from typing import Any

import pytest
import torch
from tiny_models import (
    activations,
    backward,
    compiled,
    gradients,
    loss_of,
    make_mlp,
    make_model,
    tokens,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jetrl_compile.backend import jetrl
from jetrl_compile.errors import LoweringError
from jetrl_compile.report_sink import check_phases, collect_reports

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo looks at the gradient of each input of a layer.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    # Its new name is not in every transformers 5.
    pytest.mark.filterwarnings(
        "ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"
    ),
]
OPTIONS = {"lowering": "aot"}


def compile_layers(model: Any) -> None:
    """As trainers do: each decoder layer in place."""
    for layer in model.model.layers:
        layer.compile(backend=jetrl, fullgraph=True, dynamic=True, options=OPTIONS)


def test_checkpoint_inside_the_compiled_region() -> None:
    model, x = make_mlp(), activations(129, 192)

    def inside(x: Tensor) -> Any:
        return checkpoint(model, x, use_reentrant=False)

    results: list[dict[str, Tensor]] = []
    for function in (model, inside):
        torch._dynamo.reset()
        x.grad = None
        with collect_reports() as reports:
            y = compiled(function)(x)
            backward(y)
        assert reports[0].lowered == {"fprop": 3, "dgrad": 3, "wgrad": 3}
        assert x.grad is not None
        results.append({"y": y.detach(), "x": x.grad, **gradients(model)})
    for name, plain in results[0].items():
        assert torch.equal(plain, results[1][name]), name


def test_checkpoint_around_compiled_layers() -> None:
    ids = tokens(1, 24)
    results: list[dict[str, Tensor]] = []
    for checkpointed in (False, True):
        torch._dynamo.reset()
        model = make_model("llama", num_hidden_layers=2)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        compile_layers(model)
        with collect_reports() as reports:
            loss = loss_of(model, ids)
            loss.backward()
            with torch.no_grad():
                loss_of(model, ids)
        assert all(report.lowered["fprop"] == 7 for report in reports)
        check_phases(reports)
        results.append({"loss": loss.detach(), **gradients(model)})
    for name, plain in results[0].items():
        assert torch.equal(plain, results[1][name]), name


class Hidden(nn.Module):
    """Layers that Dynamo does not see in training, as checkpoint once did to them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = make_mlp(), make_mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if torch.is_grad_enabled():
            torch._dynamo.graph_break()
            x = eagerly(self.second, x)
        else:
            x = self.second(x)
        return x


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def eagerly(layer: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = layer(x)
    return result


def test_layers_hidden_in_training_are_named() -> None:
    run = compiled(Hidden(), fullgraph=False)
    with collect_reports() as reports:
        backward(run(activations(8, 192)))
        with torch.no_grad():
            run(activations(8, 192))
    with pytest.raises(
        LoweringError,
        match=r"3 layers are FP8 in train/inference but not in "
        r"train/training: second\.down_proj, second\.gate_proj",
    ):
        check_phases(reports)


def test_whole_model_under_checkpoint_keeps_its_layers() -> None:
    model, ids = make_model("llama"), tokens()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    run = compiled(model)
    with collect_reports() as reports:
        loss_of(run, ids).backward()
    assert reports[0].lowered == {"fprop": 7, "dgrad": 7, "wgrad": 7}
