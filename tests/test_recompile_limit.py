"""Past Dynamo's recompile limit modules run eagerly: never without a word."""

import pytest
import torch
from tiny_models import activations, compiled, make_mlp, make_model, tokens
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit

from jetrl_compile.layers import compile_layers
from jetrl_compile.recompile_limit import RecompileLimitWarning
from jetrl_compile.report_sink import collect_reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Layer(nn.Module):
    """One graph a mode: what makes trainers recompile."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = make_mlp()

    def forward(self, x: Tensor, mode: str) -> Tensor:
        result: Tensor = self.mlp(x)
        return result if mode else x


def test_last_allowed_compilation_warns() -> None:
    x = activations(8, 192)
    with torch._dynamo.config.patch(recompile_limit=3), collect_reports() as reports:
        run = compiled(Layer(), fullgraph=False)
        for mode in ("a", "b"):
            run(x, mode)
        message = r"^mlp was compiled 3 times and .*recompile_limit is 3: .*without FP8"
        with pytest.warns(RecompileLimitWarning, match=message):
            run(x, "c")
        assert len(reports) == 3
        run(x, "d")  # what the warning is about
        assert len(reports) == 3


def test_module_path_is_named() -> None:
    x = activations(8, 192)
    with torch._dynamo.config.patch(recompile_limit=1):
        run = compiled(Layer(), fullgraph=False, module_path="model.layers.7")
        with pytest.warns(RecompileLimitWarning, match=r"^model\.layers\.7 was"):
            run(x, "a")


def test_fullgraph_raises_dynamos_own_error() -> None:
    x = activations(8, 192)
    with torch._dynamo.config.patch(recompile_limit=2):
        run = compiled(Layer())
        for mode in ("a", "b"):
            run(x, mode)
        with pytest.raises(FailOnRecompileLimitHit):
            run(x, "c")


def test_without_fp8_there_is_nothing_to_lose() -> None:
    x = activations(8, 192)
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled(Layer(), fullgraph=False, recipe="bf16")(x, "a")


def test_models_that_are_gone_do_not_count() -> None:
    x = activations(8, 192)
    with torch._dynamo.config.patch(recompile_limit=3):
        for _ in range(5):
            compiled(Layer(), fullgraph=False, dynamic=False)(x, "a")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_layers_of_a_training_run_may_be_compiled_often() -> None:
    """Masks, gradients, a reference beside the actor: more kinds than Dynamo allows."""
    models = [make_model("llama", num_hidden_layers=1) for _ in range(2)]
    for model in models:
        compile_layers(model, lowering="aot")
    ids = tokens(2, 24)
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    with torch._dynamo.config.patch(recompile_limit=2), collect_reports() as reports:
        for model in models:
            for mask in (padded, torch.ones_like(ids)):
                with torch.no_grad():
                    model(input_ids=ids, attention_mask=mask, use_cache=False)
                out = model(input_ids=ids, attention_mask=mask, use_cache=False)
                out.logits.float().sum().backward()
        assert torch._dynamo.config.recompile_limit == 2
    assert len(reports) > 2
    assert all(report.lowered["fprop"] == 7 for report in reports)
