"""Any number of tokens: no compilation a length, and the values of static shapes."""

import pytest
import torch
from tiny_models import (
    IGNORE_SCRIPT_METHOD,
    Mlp,
    activations,
    backward,
    compiled,
    loss_of,
    make_mlp,
    make_model,
    sqnr,
    tokens,
)
from torch import Tensor, nn

from jetrl_compile.report_sink import collect_reports

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), IGNORE_SCRIPT_METHOD]


def row_by_row(x: Tensor, model: nn.Module) -> Tensor:
    """The result of each token alone, from a graph of static shapes."""
    with torch.no_grad():
        run = compiled(model, dynamic=False)
        return torch.cat([run(x[i : i + 1]) for i in range(len(x))])


# More than 128 tokens here: Inductor guards on whether M has more than one block, so
# that up to 128 tokens have a graph of their own.
@pytest.mark.parametrize("lowering", ["aot", "inductor"])
def test_lengths_share_one_graph(lowering: str) -> None:
    model = make_mlp()
    run = compiled(model, dynamic=True, lowering=lowering)
    with collect_reports() as reports:
        for length in (129, 70, 300, 128):
            x = activations(2, length, 192)
            backward(run(x))
            assert x.grad is not None
    assert len(reports) == 1
    assert reports[0].lowered == {"fprop": 3, "dgrad": 3, "wgrad": 3}
    static = compiled(make_mlp(), dynamic=False, lowering=lowering)
    assert torch.equal(static(x), run(x))


def test_merged_layers_share_one_graph() -> None:
    # gate and up are halves of one result: saved for backward with its strides.
    torch.manual_seed(0)
    model = Mlp(256, 384).to(torch.bfloat16)
    run = compiled(model, dynamic=True, lowering="inductor", fuse=True)
    apart = compiled(model, dynamic=True)
    with collect_reports() as reports:
        for batch, length in ((2, 129), (3, 70), (2, 300), (5, 64)):
            x, other = (activations(batch, length, 256) for _ in range(2))
            backward(run(x))
            backward(apart(other))
            assert x.grad is not None
            assert other.grad is not None
            assert sqnr(other.grad, x.grad) >= 20
    assert [report.changes["merge_siblings"] for report in reports] == [6, 0]


def test_marked_dimension_is_enough() -> None:
    model, ids = make_model("llama"), tokens(2, 24)
    run = compiled(model)
    torch._dynamo.mark_dynamic(ids, 1)
    with collect_reports() as reports:
        for length in (24, 129, 60):
            loss_of(run, ids if length == 24 else tokens(2, length)).backward()
    assert len(reports) == 1


@pytest.mark.parametrize("m", [0, 1, 7, 129])
def test_numbers_of_tokens(m: int) -> None:
    model, x = make_mlp(), activations(m, 192)
    with collect_reports() as reports:
        y = compiled(model)(x)
        backward(y)
    assert reports[0].lowered == {"fprop": 3, "dgrad": 3, "wgrad": 3}
    assert y.shape == (m, 192)
    # A row's bits do not depend on the batch.
    torch._dynamo.reset()
    assert m == 0 or torch.equal(y[:2], row_by_row(x[:2], model))
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert m > 0 or not parameter.grad.any()


def test_expanded_weight_of_a_batched_gemm() -> None:
    # Where a frozen weight meets an x of other strides, matmul expands it over the
    # batch; both sizes of the batch are symbolic here.
    torch.manual_seed(0)
    layer = nn.Linear(192, 64, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    model = nn.Sequential(layer)

    run = compiled(lambda x: model(x.transpose(0, 1)), dynamic=True)
    with collect_reports() as reports:
        for batch, length in ((3, 5), (4, 9), (2, 130)):
            x = activations(length, batch, 192)
            y = run(x)
            backward(y)
            assert y.shape == (batch, length, 64)
    assert len(reports) == 1
    assert reports[0].lowered == {"fprop": 1, "dgrad": 1, "wgrad": 0}
    torch._dynamo.reset()
    flat = x.detach().transpose(0, 1).reshape(-1, 192)
    assert torch.equal(y.flatten(0, 1), compiled(model)(flat))
