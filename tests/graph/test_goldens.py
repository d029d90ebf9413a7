"""The text of whole graphs: `pytest --accept` writes it, people read it."""

from collections.abc import Callable

import pytest
import torch
from graph_levels import levels_of
from make_vllm_fixture import FIXTURES
from tiny_models import compiled, step, tokens
from vllm_description import Engine
from vllm_pairs import hugging_face

from jetrl_compile.capture_json import read_captured
from jetrl_compile.graph_builder import build_precision_graph
from jetrl_compile.report_sink import collect_reports

ENGINE = Engine("llama", vocabulary=320)
Golden = Callable[[str, str], None]


def test_unlowered(golden: Golden) -> None:
    levels = levels_of(hugging_face(ENGINE), tokens(2, 16))

    for name, captured in (
        ("llama_train", levels.joint[0]),
        ("llama_inference", levels.inference[0]),
        ("llama_dynamo", levels.dynamo[0]),
    ):
        graph = build_precision_graph(captured).graph
        golden(f"precision_graph/{name}", str(graph))


def test_lowered_training(golden: Golden) -> None:
    torch._dynamo.reset()
    _, _, (report,) = step(hugging_face(ENGINE), tokens(2, 16))
    golden("precision_graph/llama_train_jetrl", str(report.graph))


def test_lowered_inference(golden: Golden) -> None:
    torch._dynamo.reset()
    model = compiled(hugging_face(ENGINE).eval(), phase="rollout")
    with collect_reports() as reports, torch.no_grad():
        model(input_ids=tokens(2, 16), use_cache=False)
    golden("precision_graph/llama_rollout_jetrl", str(reports[0].graph))


@pytest.mark.parametrize("name", ["vllm_qwen3", "vllm_qwen3_lowered"])
def test_vllm(name: str, golden: Golden) -> None:
    captured = read_captured(FIXTURES / f"{name}.json").graph
    golden(f"precision_graph/{name}", str(build_precision_graph(captured).graph))
