"""Options and models that cannot be used: what the message says."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    activations,
    backward,
    compiled,
    loss_of,
    make_mlp,
    make_model,
    tokens,
)
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from jetrl_compile.backend import jetrl
from jetrl_compile.errors import ProviderError, RecipeError
from jetrl_compile.graph_json import read_graph
from jetrl_compile.options import parse_options
from jetrl_compile.recipe import JETRL
from jetrl_compile.report_sink import collect_reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_entry_point() -> None:
    assert "jetrl" in torch._dynamo.list_backends()
    model, x = make_mlp(), activations(8, 192)
    by_name = torch.compile(model, backend="jetrl", options={"lowering": "aot"})
    assert torch.equal(by_name(x), compiled(model)(x))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"recipe": "jetlr"}, RecipeError, r"'jetlr' is unknown; did you mean 'jetrl'"),
        ({"recipie": "bf16"}, RecipeError, r"'recipie' .* did you mean 'recipe'\?"),
        ({"phase": "decode"}, RecipeError, "phase='decode' is unknown; use train or"),
        ({"lowering": "eager"}, RecipeError, "lowering='eager' .* inductor or aot"),
        ({"providers": ("cutlas",)}, ProviderError, "'cutlas' is unknown; .*reference"),
        ({"providers": ()}, ProviderError, "list at least one of reference"),
        ({"providers": 5}, ProviderError, "providers=5 is unknown; use names"),
        ({"providers": [["triton"]]}, ProviderError, "provider .*triton.* is unknown"),
        ({"providers": [None]}, ProviderError, "provider None is unknown"),
        ({8: True}, RecipeError, "option 8 .* is unknown"),
        ("jetrl", RecipeError, "options='jetrl' is unknown; use a dict"),
        ({"recipe": 8}, RecipeError, "recipe 8 is no name"),
        ({"module_path": None}, RecipeError, "module_path=None .* a module path"),
        ({"report": 3}, RecipeError, "report=3 .* a folder or a callable"),
        ({"recorder": object()}, RecipeError, "recorder needs lowering='aot'"),
    ],
)
def test_options_that_cannot_be(
    options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        parse_options(options)
    assert len(str(caught.value).splitlines()) <= 2


def test_message_survives_dynamo() -> None:
    with pytest.raises(BackendCompilerFailed, match="did you mean 'jetrl'"):
        compiled(make_mlp(), recipe="jetlr")(activations(8, 192))
    with pytest.raises(BackendCompilerFailed, match=r"mode=.max-autotune. is unknown"):
        torch.compile(make_mlp(), backend=jetrl, mode="max-autotune")(
            activations(8, 192)
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("autocast", [False, True])
def test_weights_of_other_dtypes(dtype: torch.dtype, autocast: bool) -> None:
    layer = nn.Sequential(nn.Linear(192, 128, dtype=dtype))
    x = activations(8, 192, dtype=dtype)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        pytest.raises(BackendCompilerFailed, match=r"0 is fp.*model.to\(torch.bfloat"),
    ):
        compiled(layer)(x)
    # Nothing is wrong with them where the recipe has no FP8.
    assert compiled(layer, recipe="bf16")(x).dtype is dtype


class IntegerWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        codes = torch.ones(128, 192, dtype=torch.int8)
        self.weight = nn.Parameter(codes, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) * 0.1).t()


def test_integer_weights() -> None:
    model = nn.Sequential(IntegerWeight())
    with pytest.raises(BackendCompilerFailed, match=r"0.weight is int8; .* without q"):
        compiled(model)(activations(8, 192))


def test_graph_without_gemms() -> None:
    # Dynamo splits models where it must: a part without a GEMM is no fault.
    with collect_reports() as reports:
        backward(compiled(nn.LayerNorm(192, dtype=torch.bfloat16))(activations(8, 192)))
    assert reports[0].lowered == {"fprop": 0, "dgrad": 0, "wgrad": 0}
    assert reports[0].kept == []


def test_module_path_makes_whole_names() -> None:
    recipe = replace(JETRL, name="first_layers", exclude=("model.layers.0.**",))
    layer, x = make_mlp(), activations(8, 192)
    for number, lowered in ((0, 0), (1, 3)):
        with collect_reports() as reports:
            path = f"model.layers.{number}.mlp"
            compiled(layer, recipe=recipe, module_path=path)(x)
        (report,) = reports
        assert report.module == path
        assert report.lowered["fprop"] == lowered
        assert f"{path}.up_proj:fprop" in report.graph.by_name
        assert all("excludes 'model.layers.0.**'" in op.reason for op in report.kept)


def test_pattern_that_matches_nothing() -> None:
    model, ids = make_model("llama"), tokens()
    typo = replace(JETRL, name="typo", exclude=("model.layers.0.mlp.down_porj",))
    with pytest.raises(
        BackendCompilerFailed, match=r"down_porj.*near names: .*mlp\.down_proj"
    ):
        loss_of(compiled(model, recipe=typo), ids)
    # A part of a model cannot tell: its pattern may be another part's.
    with collect_reports() as reports:
        compiled(model.model.layers[0].mlp, recipe=typo)(activations(8, 192))
    assert reports[0].lowered["fprop"] == 3
    assert reports[0].unmatched == ("model.layers.0.mlp.down_porj",)


@pytest.mark.parametrize("to_folder", [str, Path])
def test_reports_in_a_folder(tmp_path: Path, to_folder: Callable[[Path], Any]) -> None:
    folder = tmp_path / "graphs"
    run = compiled(make_mlp(), report=to_folder(folder), dynamic=False)
    for length in (8, 16):
        run(activations(length, 192))
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["model.train.training.2.json", "model.train.training.json"]
    graph = read_graph(folder / names[0])
    assert graph.is_fp8(graph.by_name["up_proj:fprop"])


def test_reports_by_callable() -> None:
    found: list[Any] = []
    compiled(make_mlp(), report=found.append, module_path="mlp")(activations(8, 192))
    (report,) = found
    assert str(report) == "mlp: train, recipe jetrl: 3 fprop, 3 dgrad, 3 wgrad in FP8"
    assert report.providers["mlp.up_proj:fprop"] == "reference: first choice"
