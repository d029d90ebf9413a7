"""Layers compiled before FSDP2's `fully_shard` keep every GEMM in FP8."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import (
    IGNORE_SCRIPT_METHOD,
    IGNORE_SOFTMAX,
    loss_of,
    make_model,
    tokens,
)
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from jetrl_compile.layers import compile_layers
from jetrl_compile.report_sink import collect_reports

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    IGNORE_SCRIPT_METHOD,
    IGNORE_SOFTMAX,
    # Dynamo looks at the gradient of a layer's input.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[Any]:
    """A process group of this process alone."""
    place = f"file://{tmp_path / 'store'}"
    distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("lowering", ["aot"])
def test_every_gemm_of_backward_is_fp8(one_rank: Any, lowering: str) -> None:
    model: Any = make_model("qwen3", num_hidden_layers=2)
    compile_layers(model, lowering=lowering)
    for layer in model.model.layers:
        fully_shard(layer, mesh=one_rank)
    fully_shard(model, mesh=one_rank)
    with collect_reports() as reports:
        for length in (8, 12):
            loss_of(model, tokens(2, length)).backward()
    assert reports
    for report in reports:
        assert report.lowered == {"fprop": 7, "dgrad": 7, "wgrad": 7}
    assert all(p.grad is not None for p in model.model.layers.parameters())
