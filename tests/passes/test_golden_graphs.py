"""What the passes do to a graph, as text: read these files to see it.

The text is that of our precision graph, so it is the same for every version of torch.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import (
    Mlp,
    activations,
    backward,
    compiled,
    loss_of,
    make_model,
    tokens,
)

from jetrl_compile.precision_graph import PrecisionGraph
from jetrl_compile.report_sink import collect_reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
RECIPES = ("bf16", "jetrl", "jetrl_paper")


def mlp(**options: Any) -> None:
    backward(
        compiled(Mlp(192, 320, bias=True).bfloat16(), **options)(activations(64, 192))
    )


def decoder_layer(**options: Any) -> None:
    model, x = make_model("qwen3").model, activations(2, 16, 192)
    tables = model.rotary_emb(x, torch.arange(16)[None])
    run = compiled(model.layers[0], module_path="model.layers.0", **options)
    backward(run(x, position_embeddings=tables))


def rollout(**options: Any) -> None:
    with torch.no_grad():
        loss_of(compiled(make_model("qwen3"), phase="rollout", **options), tokens())


def graph_of(run: Callable[..., None], recipe: str) -> PrecisionGraph:
    with collect_reports() as reports:
        run(recipe=recipe)
    (report,) = reports
    return report.graph


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("run", [mlp, decoder_layer, rollout])
def test_graph_text(
    run: Callable[..., None], recipe: str, golden: Callable[[str, str], None]
) -> None:
    if run is rollout and recipe == "jetrl_paper":
        recipe = "rollout_only"  # the rollout of jetrl_paper is that of jetrl
    golden(f"passes/{run.__name__}.{recipe}", str(graph_of(run, recipe)))


def test_rollouts_of_recipes_with_one_forward_are_equal() -> None:
    first = graph_of(rollout, "jetrl")
    for other in ("jetrl_paper", "rollout_only"):
        assert graph_of(rollout, other) == first
