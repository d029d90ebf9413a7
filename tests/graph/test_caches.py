"""A decode step with a key/value cache, against the training graph."""

import pytest
import torch
import transformers as tf
from graph_coverage import uncovered
from graph_levels import levels_of
from tiny_models import make_model, tokens

from jetrl_compile.captured_graph import CapturedGraph
from jetrl_compile.containment import check_containment
from jetrl_compile.examples.sampling import cache_argument
from jetrl_compile.graph_builder import build_precision_graph


@pytest.mark.parametrize("kind", [tf.StaticCache, tf.DynamicCache])
def test_decode_step_is_contained(kind: type) -> None:
    model, ids = make_model("qwen3").eval(), tokens(2, 8)
    train = build_precision_graph(levels_of(model, ids, infer=False).joint[0]).graph
    sizes = {"max_cache_len": 32} if kind is tf.StaticCache else {}
    cache = {cache_argument(model): kind(config=model.config, **sizes)}
    with torch.no_grad():
        model(input_ids=ids, use_cache=True, **cache)

    step = {"use_cache": True, "train": False, **cache}
    levels = levels_of(model, ids[:, :1], fullgraph=False, **step)

    captured: list[CapturedGraph] = [*levels.dynamo, *levels.inference]
    assert len(captured) == 2
    for graph in captured:
        assert not uncovered(graph)
        built = build_precision_graph(graph).graph
        assert not built.unknown()
        report = check_containment(built, train)
        assert report.contained, report.differences
        attention = "model.layers.0.self_attn:attention"
        assert built.operands[attention]["k"].source.endswith(":rope.k")
        assert built.operands[attention]["v"].source.endswith("v_proj:fprop")


def test_a_cache_that_the_graph_makes_is_empty_at_first() -> None:
    """`use_cache=True` without a cache: keys are appended to an empty tensor."""
    model, ids = make_model("qwen3").eval(), tokens(2, 8)
    train = build_precision_graph(levels_of(model, ids, infer=False).joint[0]).graph
    prefill = levels_of(model, ids, fullgraph=False, train=False, use_cache=True)
    for captured in prefill.inference:
        report = check_containment(build_precision_graph(captured).graph, train)
        assert report.contained, report.differences
