"""One rank's graph is read as that of the whole model, and its weights as shards."""

import pytest
import torch
from torch import Tensor, nn
from vllm_engine_model import EngineModel, make_trainer

from jetrl_compile.captured_graph import CapturedGraph, CapturedNode, Ref
from jetrl_compile.containment import check_containment
from jetrl_compile.integrations.vllm.graph_reading import build
from jetrl_compile.integrations.vllm.live_bytes import check_live_bytes
from jetrl_compile.integrations.vllm.live_graph import trace_live
from jetrl_compile.integrations.vllm.live_model import vocabulary_rows, whole_shapes
from jetrl_compile.integrations.vllm.sharding import META, without_sums
from jetrl_compile.tracing import trace_model

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def call(target: str, *args: object) -> CapturedNode:
    return CapturedNode(target, "call", target, args, {}, "bf16", (None, 8))


def test_sums_pass_on_what_they_add() -> None:
    ids = CapturedNode("ids", "placeholder", "input", dtype="int64", shape=(None,))
    table = CapturedNode("w", "placeholder", "parameter", dtype="bf16", shape=(16, 8))
    table.module = "model.embed_tokens.weight"
    nodes = (
        ids,
        table,
        call("embedding", Ref(1), Ref(0)),
        call("masked_fill", Ref(2), Ref(0), 0),
        call("vllm.all_reduce", Ref(3), "tp:0"),
        CapturedNode("output", "output", "output", ((Ref(4),),)),
    )
    graph = CapturedGraph(nodes)
    assert without_sums(graph) == 1
    assert [node.target for node in nodes[2:5]] == ["embedding", "alias", "alias"]
    built = build(CapturedGraph(nodes), {}, {}).graph
    assert [op.kind for op in built.operators if op.kind != "parameter"] == [
        "input",
        "embedding",
        "output",
    ]
    assert META not in built.meta  # no sum is left to speak of


def test_sizes_are_those_of_whole_layers() -> None:
    trainer = make_trainer("llama")
    model = EngineModel(trainer)
    config = model.config_of_engine
    shapes = {name: (2 * n, k) for name, (n, k) in whole_shapes(model).items()}
    live = trace_live(model, config.settings(), fused=True, whole=shapes)
    found = check_containment(live.graph, trace_model(trainer)).differences
    sizes = [d for d in found if d.attribute == "params.N"]
    assert {d.operator for d in sizes} == {f"{name}:fprop" for name in shapes}


def test_rows_of_a_vocabulary_shard() -> None:
    class Indices:
        org_vocab_start_index, org_vocab_end_index = 128, 256

    trainer = make_trainer("llama")
    model = EngineModel(trainer)
    head = model.lm_head
    assert vocabulary_rows(head) is None
    head.shard_indices = Indices()  # type: ignore[assignment]
    assert vocabulary_rows(head) == slice(128, 256)
    weight: Tensor = head.weight  # type: ignore[assignment]
    head.weight = nn.Parameter(weight.data[128:].clone(), requires_grad=False)
    masters = {name: p.detach() for name, p in trainer.named_parameters()}
    assert check_live_bytes(model, masters)[0].status == "passed"
    with torch.no_grad():
        head.weight[3, 5] += 1
    _, found = check_live_bytes(model, masters)
    assert [d.operator for d in found] == ["lm_head.weight"]
