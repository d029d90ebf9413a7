"""On a Hopper GPU: the reference provider and Inductor, training and inference."""

import copy

import pytest
import torch
from tiny_models import (
    ARCHITECTURES,
    IGNORE_LRU_CACHE,
    IGNORE_SCRIPT_METHOD,
    IGNORE_SOFTMAX,
    IGNORE_TF32,
    compiled,
    gradients,
    linear_modules,
    loss_of,
    make_model,
    sqnr,
    step,
    tokens,
)

from jetrl_compile.bytes_check import check_bytes
from jetrl_compile.kernels import ops
from jetrl_compile.pipeline import CompileReport
from jetrl_compile.precision_graph import Operator
from jetrl_compile.rollout import make_rollout_model, refit

pytestmark = [
    pytest.mark.gpu,
    IGNORE_SCRIPT_METHOD,
    IGNORE_LRU_CACHE,
    IGNORE_TF32,
    IGNORE_SOFTMAX,
]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("lowering", ["aot", "inductor"])
@pytest.mark.parametrize("name", ["qwen3", "gpt2", "qwen3_moe"])
def test_training_and_inference(name: str, lowering: str) -> None:
    assert name in ARCHITECTURES
    model = make_model(name).cuda()
    ids = tokens().cuda()
    reference = loss_of(model, ids)
    reference.backward()
    wanted = gradients(model)
    loss, got, reports = step(model, ids, lowering=lowering)
    layers = len(linear_modules(model) & {op.module for op in fp8(reports)})
    assert reports[0].lowered == dict.fromkeys(("fprop", "dgrad", "wgrad"), layers)
    assert abs(loss - reference) <= 0.02 * abs(reference)
    assert min(sqnr(wanted[n], got[n]) for n in wanted) >= 12
    with torch.no_grad():
        again = loss_of(compiled(model, lowering=lowering), ids)
    assert abs(again - loss) <= 1e-3 * abs(loss)


def fp8(reports: list[CompileReport]) -> list[Operator]:
    graph = reports[0].graph
    return [op for op in graph.gemms("fprop") if graph.is_fp8(op)]


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("rows", [1, 128])
def test_quantized_bits_are_those_of_the_cpu(rows: int, transpose: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 470, generator=generator).mul(0.01).to(torch.bfloat16)
    cpu = ops.quantize(x, rows, 128, transpose, "fp32", 1e-10, None)
    gpu = ops.quantize(x.cuda(), rows, 128, transpose, "fp32", 1e-10, None)
    for left, right in zip(cpu, gpu, strict=True):
        as_bytes = [t.cpu().contiguous().view(torch.uint8) for t in (left, right)]
        assert torch.equal(*as_bytes)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_rollout_model_stores_the_same_bytes_on_both_devices() -> None:
    trainer = make_model("qwen3").eval()
    rollout = make_rollout_model(trainer)
    on_gpu = make_rollout_model(copy.deepcopy(trainer).cuda())
    refit(on_gpu, trainer.named_parameters())
    assert check_bytes(trainer, on_gpu)[0].status == "passed"
    for name, value in rollout.state_dict().items():
        other = on_gpu.state_dict()[name].cpu()
        assert torch.equal(value.view(torch.uint8), other.view(torch.uint8)), name
