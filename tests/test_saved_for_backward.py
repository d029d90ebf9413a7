"""What forward keeps for backward: FP8 codes of x, and nothing of x beside them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import (
    IGNORE_SCRIPT_METHOD,
    Recorder,
    activations,
    backward,
    compiled,
    loss_of,
    make_mlp,
    make_model,
    results_of,
    tokens,
)
from torch import Tensor, nn

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), IGNORE_SCRIPT_METHOD]
E4M3 = torch.float8_e4m3fn
FP8_RECIPES = ("jetrl", "jetrl_paper")


def saved(model: nn.Module, run: Callable[[], Tensor]) -> list[Tensor]:
    """What autograd keeps, less the parameters."""
    kept: list[Tensor] = []
    own = {tensor.data_ptr() for tensor in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return kept


def size(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("lowering", ["aot", "inductor"])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_bytes_of_linear_inputs(recipe: str, lowering: str) -> None:
    # Linear layers alone: all that is kept is their inputs.
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(192, 320, bias=False), nn.Linear(320, 256, bias=False)
    ).to(torch.bfloat16)
    x = activations(2, 96, 192)
    before = 2 * 192 * (192 + 320)
    whole = saved(model, lambda: compiled(model, recipe="bf16")(x))
    assert size(whole) == before

    kept = saved(model, lambda: compiled(model, recipe=recipe, lowering=lowering)(x))
    assert {tensor.dtype for tensor in kept} == {E4M3, torch.float32}
    assert size(kept) <= 0.55 * before


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_no_copy_beside_the_codes(recipe: str) -> None:
    model, x = make_mlp(), activations(2, 96, 192)
    recorder = Recorder()
    backward(compiled(model, recipe=recipe, recorder=recorder)(x))
    forward, back = recorder.graphs
    kept = kept_nodes(forward)
    shapes = sorted(tuple(v.shape) for v in kept.values() if v.dtype is E4M3)
    tokens, codes = 192, [(192, 192), (192, 320)]
    if recipe == "jetrl":  # of x^T
        codes = sorted((width, tokens) for _, width in codes)
    assert shapes == codes
    # Beside them: x of the norm and its statistics, gate and up before SiLU * mul.
    others = {n: tuple(v.shape) for n, v in kept.items() if v.dtype is torch.bfloat16}
    assert sorted(others.values()) == [(192, 320), (192, 320)]
    norm = [v for v in kept.values() if v.dtype is torch.float32 and v.dim() == 3]
    assert [tuple(v.shape) for v in norm] == [(2, 96, 1)]
    made = [n for n in back.graph.nodes if n.target is quantize_op()]
    placeholders = back.graph.find_nodes(op="placeholder")
    from_weights = [n for n in made if n.args[0] in placeholders and n.args[3]]
    assert sum(n.args[-1] is not None for n in from_weights) == 3, "one a layer"


def quantize_op() -> Any:
    return torch.ops.jetrl.quantize.default


def kept_nodes(forward: torch.fx.GraphModule) -> dict[str, Tensor]:
    """The results of forward that are neither its output nor its inputs."""
    return {
        node.name: node.meta["val"]
        for node in results_of(forward)[1:]
        if node.op != "placeholder" and isinstance(node.meta["val"], Tensor)
    }


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_decoder_layer(recipe: str) -> None:
    # Of each linear layer's input only codes are kept; attention keeps its own.
    model, recorder = make_model("llama"), Recorder()
    ids = tokens(2, 64)
    loss_of(compiled(model, recipe=recipe, recorder=recorder), ids).backward()
    forward = recorder.graphs[0]
    kept = kept_nodes(forward)
    codes = [node for node, value in kept.items() if value.dtype is E4M3]
    assert len(codes) == 4, "q, k and v share x, and gate and up; o and down have one"
    quantized = {
        node.args[0] for node in forward.graph.nodes if node.target is quantize_op()
    }
    assert not {node.name for node in quantized} & set(kept)
    weights = {tuple(p.shape) for p in model.parameters()}
    assert not weights & {tuple(kept[n].shape) for n in codes}
    assert not weights & {tuple(kept[n].shape)[::-1] for n in codes}


class Fused(nn.Module):
    """gate and up in one layer, as Phi-3 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(192, 512, bias=False)
        self.down_proj = nn.Linear(256, 192, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        result: Tensor = self.down_proj(nn.functional.silu(gate) * up)
        return result


def test_fused_layer_keeps_codes_alone() -> None:
    recorder, x = Recorder(), activations(96, 192).detach()
    backward(compiled(Fused().to(torch.bfloat16), recorder=recorder)(x * 1.5))
    kept = kept_nodes(recorder.graphs[0])
    codes = sorted(tuple(v.shape) for v in kept.values() if v.dtype is E4M3)
    assert codes == [(192, 96), (256, 96)]
    inputs = [n for n in results_of(recorder.graphs[0]) if n.op == "placeholder"]
    assert (96, 192) not in {tuple(n.meta["val"].shape) for n in inputs}
