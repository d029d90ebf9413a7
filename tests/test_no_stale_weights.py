"""After any change of a weight the next forward reads the new one."""

from collections.abc import Callable

import pytest
import torch
from tiny_models import (
    IGNORE_SCRIPT_METHOD,
    Mlp,
    activations,
    backward,
    compiled,
    make_mlp,
    make_model,
    tokens,
)
from torch import Tensor, nn

from jetrl_compile.backend import jetrl
from jetrl_compile.report_sink import collect_reports

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), IGNORE_SCRIPT_METHOD]


def fused(model: Mlp) -> None:
    torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True).step()


def foreach(model: Mlp) -> None:
    torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True).step()


def data_copy(model: Mlp) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 1.5)


def load_state_dict(model: Mlp) -> None:
    model.load_state_dict({k: v * 1.5 for k, v in model.state_dict().items()})


def new_parameter(model: Mlp) -> None:
    weight = model.gate_proj.weight.detach() * 1.5
    model.gate_proj.weight = nn.Parameter(weight)


def swap_data(model: Mlp) -> None:
    model.gate_proj.weight.data = model.gate_proj.weight.data * 1.5


CHANGES = (fused, foreach, data_copy, load_state_dict, new_parameter, swap_data)


@pytest.mark.parametrize("change", CHANGES)
def test_forward_reads_the_new_weight(change: Callable[[Mlp], None]) -> None:
    model, x = make_mlp(), activations(64, 192)
    run = compiled(model)
    with torch.no_grad():
        old = run(x)
    backward(run(x))
    change(model)
    with torch.no_grad():
        inferred = run(x)
    trained = run(x)
    fresh = make_mlp()
    fresh.load_state_dict(model.state_dict())
    torch._dynamo.reset()
    wanted = compiled(fresh)(x)
    assert not torch.equal(old, wanted)
    assert torch.equal(inferred, wanted)
    assert torch.equal(trained, wanted)


def test_dgrad_reads_the_weight_of_its_forward() -> None:
    # The weight is quantized again in backward: autograd rejects one that changed.
    model, x = make_mlp(), activations(64, 192)
    y = compiled(model)(x)
    with torch.no_grad():
        model.down_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(y)


def test_steps_through_inductor() -> None:
    model, x = make_mlp(), activations(64, 192)
    twin = make_mlp()
    runs = (compiled(model, lowering="inductor"), compiled(twin))
    for _ in range(3):
        results = []
        for run, each in zip(runs, (model, twin), strict=True):
            optimizer = torch.optim.SGD(each.parameters(), lr=1e-3)
            y = run(x)
            backward(y)
            optimizer.step()
            optimizer.zero_grad()
            results.append(y.detach())
        assert (results[0] - results[1]).abs().max() < 0.05 * results[1].abs().max()


def test_layers_that_share_a_graph_run_their_own_weights() -> None:
    # As trainers compile: each decoder layer in place, with equal options.
    model = make_model("llama", num_hidden_layers=3).eval()
    ids = tokens()
    with torch.no_grad():
        wanted = compiled(model)(input_ids=ids, use_cache=False).logits
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(
            backend=jetrl, fullgraph=True, dynamic=True, options={"lowering": "aot"}
        )
    with torch.no_grad(), collect_reports() as reports:
        got = model(input_ids=ids, use_cache=False).logits
    assert len(reports) == 1
    assert reports[0].lowered["fprop"] == 7
    assert torch.equal(got, wanted)


def test_stored_weights_differ_between_models_of_one_class() -> None:
    models = [make_mlp(), make_mlp()]
    data_copy(models[1])
    x = activations(8, 192)
    results: list[Tensor] = []
    with torch.no_grad(), collect_reports() as reports:
        for _ in range(2):
            results += [compiled(model)(x) for model in models]
    assert len(reports) == 1
    assert not torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
