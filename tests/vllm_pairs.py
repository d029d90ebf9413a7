"""Pairs of a described vLLM graph and the trainer's graph of the same sizes."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
import transformers as tf
from tiny_models import step
from vllm_description import Engine, describe_engine

from jetrl_compile.captured_graph import CapturedGraph
from jetrl_compile.graph_builder import build_precision_graph
from jetrl_compile.passes.annotate_precision import annotate_precision
from jetrl_compile.precision_graph import PrecisionGraph
from jetrl_compile.recipe import get_recipe

MODELS = ("qwen3", "llama", "qwen2")
# What the trainer does, too: the residual sum rounded before the norm reads it.
AGREES = {"add_norm": "vllm_c"}


def _config(engine: Engine) -> dict[str, Any]:
    return {
        "vocab_size": engine.vocabulary,
        "hidden_size": engine.hidden,
        "intermediate_size": engine.intermediate,
        "num_hidden_layers": engine.layers,
        "num_attention_heads": engine.heads,
        "num_key_value_heads": engine.kv_heads,
        "head_dim": engine.head_dim,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


def hugging_face(engine: Engine) -> torch.nn.Module:
    """The Hugging Face model of the same sizes, in training mode."""
    sizes = _config(engine)
    make: dict[str, Any] = {
        "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**sizes)),
        "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)),
        "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**sizes)),
    }
    torch.manual_seed(0)
    model: torch.nn.Module = make[engine.model]()
    return model.to(torch.bfloat16).train()


@cache
def trainer(engine: Engine) -> PrecisionGraph:
    """The training graph that the backend reports for the same sizes."""
    torch._dynamo.reset()
    ids = torch.arange(32).reshape(2, 16)
    _, _, (report,) = step(hugging_face(engine), ids)
    return report.graph


def rollout(captured: CapturedGraph) -> PrecisionGraph:
    """The precision graph under recipe jetrl, its GEMMs run by the reference."""
    graph = build_precision_graph(captured, phase="rollout").graph
    graph = annotate_precision(graph, get_recipe("jetrl"), "rollout")
    operators = (
        replace(op, provider="reference", batch_invariant=True)
        if op.kind == "gemm" and graph.is_fp8(op)
        else op
        for op in graph.operators
    )
    return replace(graph, operators=tuple(operators))


def engine_graph(model: str, **variant: object) -> PrecisionGraph:
    return rollout(describe_engine(Engine(model, **variant)))  # type: ignore[arg-type]
