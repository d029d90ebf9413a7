"""Graphs of whole models without weights: folding is exact, bad input is told."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, Gemma3TextConfig, LlamaConfig, Qwen3Config

from jetrl_compile.containment import check_containment
from jetrl_compile.errors import ModelError, RecipeError
from jetrl_compile.precision_graph import PrecisionGraph
from jetrl_compile.recipe import JETRL, Recipe
from jetrl_compile.tracing import trace_config, trace_model

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CONFIGS: dict[str, Callable[[int], Any]] = {
    "qwen3": lambda n: Qwen3Config(head_dim=32, num_hidden_layers=n, **SIZES),
    # Sliding and full attention alternate: two kinds of inner layers.
    "gemma3": lambda n: Gemma3TextConfig(head_dim=32, num_hidden_layers=n, **SIZES),
    # Dense layers first, then experts.
    "deepseek_v3": lambda n: DeepseekV3Config(
        num_hidden_layers=n,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=2,
        kv_lora_rank=32,
        q_lora_rank=64,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=32,
        **{**SIZES, "num_key_value_heads": 4},
    ),
}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch._dynamo")


def names(graph: PrecisionGraph) -> list[str]:
    return [operator.name for operator in graph.operators]


@pytest.mark.parametrize("phase", ["train", "rollout"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_folded_layers_give_the_graph_of_all_layers(name: str, phase: str) -> None:
    config = CONFIGS[name](7)
    folded = trace_config(config, phase=phase)
    whole = trace_config(config, phase=phase, fold_layers=False)
    assert names(folded) == names(whole)
    assert dict(folded.by_name) == dict(whole.by_name)
    assert dict(folded.by_key) == dict(whole.by_key)


def test_a_rollout_graph_is_contained_in_its_training_graph() -> None:
    train = trace_config(CONFIGS["deepseek_v3"](4), phase="train")
    rollout = trace_config(CONFIGS["deepseek_v3"](4), phase="rollout")
    report = check_containment(rollout, train)
    assert report.contained, report.differences[:3]
    kept = {
        op.name.rpartition(":")[0].rpartition(".")[2]: op.reason
        for op in train.high_precision_gemms()
        if op.phase == "forward"
    }
    assert "router" in kept["gate"]
    assert "grouped expert" in kept["experts"]
    assert "lm_head" in kept["lm_head"]


def test_rollout_only_is_not_contained_and_names_every_layer() -> None:
    config = CONFIGS["qwen3"](5)
    train = trace_config(config, phase="train", recipe="rollout_only")
    rollout = trace_config(config, phase="rollout", recipe="rollout_only")
    report = check_containment(rollout, train)
    assert report.contained is False
    assert {d.attribute for d in report.differences} == {"fp8"}
    assert len(report.differences) == 5 * 7


def test_recipes_name_layers_by_their_own_index() -> None:
    ends = Recipe(
        "ends_in_bf16",
        JETRL.flows,
        train=True,
        rollout=True,
        exclude=("model.layers.0.**", "model.layers.6.**"),
    )
    graph = trace_config(CONFIGS["qwen3"](7), phase="rollout", recipe=ends)
    fp8 = {op.module.split(".")[2] for op in graph.gemms("fprop") if graph.is_fp8(op)}
    assert fp8 == {"1", "2", "3", "4", "5"}


def test_a_pattern_that_matches_nothing_lists_near_names() -> None:
    wrong = Recipe(
        "wrong", JETRL.flows, train=True, rollout=True, exclude=("model.layers.0.mlp",)
    )
    with pytest.raises(RecipeError, match=r"matches none .* near names: model\.layers"):
        trace_config(CONFIGS["qwen3"](1), phase="rollout", recipe=wrong)


def test_a_model_in_memory_is_not_changed() -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=5, **SIZES))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    graph = trace_model(model, phase="train")
    assert len(list(graph.gemms("wgrad"))) == 5 * 7 + 1
    assert len(model.model.layers) == 5
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("phase", ["train", "rollout"])
def test_gradient_checkpointing_changes_no_graph(phase: str) -> None:
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **SIZES))
    graph = trace_model(model, phase=phase)
    model.enable_input_require_grads()  # as gradient checkpointing does
    hooks = dict(model.get_input_embeddings()._forward_hooks)
    assert hooks
    assert trace_model(model, phase=phase) == graph
    assert dict(model.get_input_embeddings()._forward_hooks) == hooks


BAD_CONFIGS = {
    "empty folder": (None, "holds no config.json"),
    "no JSON": ("{", "is no JSON object"),
    "JSON list": ("[1]", "is no JSON object"),
    "unknown model": ('{"model_type": "no_such_model"}', "no config that this"),
    "impossible size": (
        '{"model_type": "llama", "hidden_size": -5}',
        "hidden size .*; mend the config",
    ),
    "heads that do not divide": (
        '{"model_type": "llama", "num_key_value_heads": 3, "num_hidden_layers": 1}',
        "LlamaForCausalLM cannot run",
    ),
    "no language model": ('{"model_type": "vit"}', "no causal language model"),
    "float16": (
        '{"model_type": "llama", "torch_dtype": "float16"}',
        'dtype float16.*set "dtype": "bfloat16" in config.json',
    ),
    "float64": ('{"model_type": "llama", "dtype": "float64"}', "has dtype float64"),
    "integers": ('{"model_type": "llama", "dtype": "int8"}', "has dtype int8"),
    "quantized": (
        '{"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}',
        "of a quantized checkpoint; give the config of the unquantized one",
    ),
    "remote code": (
        '{"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}',
        "no config that this",
    ),
}


@pytest.mark.parametrize("kind", list(BAD_CONFIGS))
def test_bad_config_folders_are_told_in_one_line(tmp_path: Path, kind: str) -> None:
    text, message = BAD_CONFIGS[kind]
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message) as caught:
        trace_config(tmp_path)
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize(
    ("dtype", "short"),
    [
        (None, "bf16"),
        ("bfloat16", "bf16"),
        (torch.bfloat16, "bf16"),
        ("float32", "fp32"),
        (torch.float32, "fp32"),
    ],
)
def test_the_dtype_of_a_config_is_used(dtype: Any, short: str) -> None:
    config = LlamaConfig(num_hidden_layers=1, **SIZES)
    config.dtype = dtype
    graph = trace_config(config, phase="rollout", recipe="bf16")
    head = graph.operands["lm_head:fprop"]
    assert {edge.flow.dtype for edge in head.values()} == {short}


def test_a_config_folder_needs_no_weights(tmp_path: Path) -> None:
    config = LlamaConfig(num_hidden_layers=2, **SIZES)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    graph = trace_config(tmp_path, phase="rollout")
    assert graph.meta["model"] == "llama"
    assert sum(map(graph.is_fp8, graph.gemms("fprop"))) == 14


def test_a_config_file_is_the_one_that_is_read(tmp_path: Path) -> None:
    for name, layers in (("config.json", 1), ("other.json", 2)):
        config = LlamaConfig(num_hidden_layers=layers, **SIZES)
        (tmp_path / name).write_text(json.dumps(config.to_dict()))
    graph = trace_config(tmp_path / "other.json", phase="rollout")
    assert sum(map(graph.is_fp8, graph.gemms("fprop"))) == 14
