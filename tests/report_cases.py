"""A real pair of graphs or models for each case of public bug reports, fault planted.

Graphs are traced from tiny configs under the recipe that holds the fault, or built from
the description of vLLM's graphs; where no recipe can make the fault, the graph is
edited. Level 3 compares models whose weights are exact fractions, so that the bytes are
the same on every machine.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import transformers as tf
from sample_graphs import with_edges, with_operators
from vllm_description import Engine
from vllm_pairs import AGREES, engine_graph, trainer

from jetrl_compile.bytes_check import check_bytes
from jetrl_compile.containment import ContainmentReport, check_containment
from jetrl_compile.formats import Flow, blocks
from jetrl_compile.precision_graph import Edge, Operator, PrecisionGraph
from jetrl_compile.recipe import JETRL, Recipe, get_recipe
from jetrl_compile.rollout import QuantizedLinear, make_rollout_model, refit
from jetrl_compile.tracing import trace_config

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
MOE: dict[str, Any] = {
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
SMOLLM2: dict[str, Any] = {
    "hidden": 576,
    "heads": 9,
    "kv_heads": 3,
    "intermediate": 1536,
}


@cache
def traced(phase: str, recipe: Recipe = JETRL, moe: bool = False, **sizes: Any) -> Any:
    """The graph of a tiny Qwen3 of six layers."""
    make: Any = tf.Qwen3MoeConfig if moe else tf.Qwen3Config
    config = make(**{**SIZES, **(MOE if moe else {}), **sizes})
    return trace_config(config, phase=phase, recipe=recipe)


def skip(*patterns: str) -> Recipe:
    return replace(JETRL, name="rollout_skips", exclude=patterns)


def flows(
    graph: PrecisionGraph, wanted: Callable[[Edge], bool], **changes: Any
) -> PrecisionGraph:
    """Change the flows of the quantized edges that are wanted."""
    return with_edges(
        graph,
        lambda edge: (
            replace(edge, flow=replace(edge.flow, **changes))
            if edge.flow.is_quantized and wanted(edge)
            else edge
        ),
    )


def eager(graph: PrecisionGraph, module: str, reason: str) -> PrecisionGraph:
    """A layer that ran without the passes: its GEMMs are BF16."""

    def change(op: Operator) -> Operator:
        inside = op.kind == "gemm" and op.name.startswith(module)
        return replace(op, reason=reason) if inside else op

    graph = with_operators(graph, change)
    return with_edges(
        graph,
        lambda e: (
            replace(e, flow=Flow("bf16"))
            if e.flow.is_quantized and e.target.startswith(module)
            else e
        ),
    )


# Levels 1 and 2 --------------------------------------------------------------------


def substring_skip() -> ContainmentReport:
    """`mlp.gate` as a substring takes gate_up_proj along, which is two layers here."""
    parts = "model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"
    return check_containment(traced("rollout", skip(*parts)), traced("train"))


def scales_rounded_in_rollout() -> ContainmentReport:
    rollout = traced("rollout", get_recipe("jetrl_ue8m0"))
    return check_containment(rollout, traced("train"))


def scales_rounded_in_trainer() -> ContainmentReport:
    train = flows(traced("train"), lambda edge: True, scale_format="ue8m0")
    return check_containment(traced("rollout"), train)


def fp32_master() -> ContainmentReport:
    """After an optimizer step: level 2 by the graphs, level 3 by the bytes."""
    train = flows(traced("train"), lambda e: e.operand == "w", source_dtype="fp32")
    report = check_containment(traced("rollout"), train)
    model, rollout = live_pair(torch.float32)
    for path, layer in quantized(rollout):
        master = model.get_submodule(path).weight.detach()
        codes, scales = quantize_fp32(master)
        layer.weight.copy_(codes)
        layer.scales.copy_(scales)
    return report.with_level(*check_bytes(model, rollout))


def straddling_parts() -> ContainmentReport:
    rollout = engine_graph("llama", **{**SMOLLM2, **AGREES})
    return check_containment(rollout, trainer(Engine("llama", **SMOLLM2)))


def embedding_of_a_tied_head() -> ContainmentReport:
    """The head is FP8 on both sides; in the rollout its tied embedding is, too."""
    recipe = replace(JETRL, name="with_head", include=("lm_head",))
    train = traced("train", recipe, tie_word_embeddings=True)
    rollout = traced("rollout", recipe, tie_word_embeddings=True)
    rollout = with_edges(
        rollout,
        lambda e: (
            replace(e, flow=blocks("K"))
            if e.target.endswith(":embedding") and e.operand == "weight"
            else e
        ),
    )
    return check_containment(rollout, train)


def quantized_router() -> ContainmentReport:
    recipe = replace(JETRL, name="rollout_all", include=("model.layers.*.mlp.gate",))
    rollout = traced("rollout", recipe, moe=True)
    return check_containment(rollout, traced("train", moe=True))


def residual_in_fp32() -> ContainmentReport:
    return check_containment(engine_graph("qwen3"), trainer(Engine("qwen3")))


def rope_in_fp32() -> ContainmentReport:
    rollout = engine_graph("llama", table_dtype="fp32", **AGREES)
    return check_containment(rollout, trainer(Engine("llama")))


def activation_in_fp32() -> ContainmentReport:
    rollout = engine_graph("qwen2", activation="fp32", **AGREES)
    return check_containment(rollout, trainer(Engine("qwen2")))


def bias_in_fp32() -> ContainmentReport:
    rollout = engine_graph("qwen2", **AGREES)
    rollout = with_edges(
        rollout,
        lambda e: replace(e, flow=Flow("fp32")) if e.operand == "bias" else e,
    )
    return check_containment(rollout, trainer(Engine("qwen2")))


def ninth_recompile() -> ContainmentReport:
    why = "ran eagerly: torch._dynamo.config.recompile_limit (8) was reached"
    train = eager(traced("train"), "model.layers.3.", why)
    return check_containment(traced("rollout"), train)


def passes_skipped_by_a_cache() -> ContainmentReport:
    why = "the compile cache held this graph without its passes"
    return check_containment(eager(traced("rollout"), "model.", why), traced("train"))


def padded_vocabulary() -> ContainmentReport:
    rollout = traced("rollout", vocab_size=384)
    return check_containment(rollout, traced("train"))


def larger_floor() -> ContainmentReport:
    rollout = flows(traced("rollout"), lambda e: e.operand == "w", amax_floor=0.045)
    return check_containment(rollout, traced("train"))


# Level 3 ---------------------------------------------------------------------------


def live_pair(dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """A trainer and its rollout model, with weights that are exact fractions."""
    sizes = {**SIZES, "num_hidden_layers": 2}
    model: Any = tf.Qwen3ForCausalLM(tf.Qwen3Config(**sizes))
    model.to(dtype).eval()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            steps = torch.arange(parameter.numel(), dtype=torch.int64) * 7919 + number
            values = (steps % 65521 - 32760).to(torch.float32) / 65536
            parameter.copy_(values.reshape(parameter.shape))
    return model, make_rollout_model(model)


def quantized(model: Any) -> list[tuple[str, QuantizedLinear]]:
    return [
        (path, layer)
        for path, layer in model.named_modules()
        if isinstance(layer, QuantizedLinear)
    ]


def quantize_fp32(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize an FP32 weight in 128x128 blocks without rounding it to BF16 first."""
    n, k = weight.shape
    tiles = weight.reshape(n // 128, 128, k // 128, 128)
    scales = tiles.abs().amax((1, 3)).clamp(min=1e-10) / 448
    codes = (tiles / scales[:, None, :, None]).clamp(-448, 448)
    return codes.to(torch.float8_e4m3fn).reshape(n, k), scales


def audited(plant: Callable[[Any, Any], None]) -> ContainmentReport:
    model, rollout = live_pair()
    report = check_containment(traced("rollout"), traced("train"))
    refit(rollout, model.named_parameters())
    plant(model, rollout)
    return report.with_level(*check_bytes(model, rollout))


def memory_layout() -> ContainmentReport:
    def plant(model: Any, rollout: Any) -> None:
        layer = rollout.get_submodule("model.layers.1.self_attn.q_proj")
        codes = layer.weight.view(torch.uint8)
        codes.copy_(codes.t().contiguous())

    return audited(plant)


def scales_after_the_codes() -> ContainmentReport:
    def plant(model: Any, rollout: Any) -> None:
        for _, layer in quantized(rollout):
            layer.scales.copy_(torch.exp2(torch.ceil(torch.log2(layer.scales))))

    return audited(plant)


def zero_block() -> ContainmentReport:
    """A pruned block; the rollout made its scale without a floor: 0 / 448."""

    def plant(model: Any, rollout: Any) -> None:
        with torch.no_grad():
            model.get_submodule("model.layers.0.mlp.up_proj").weight[:128, :128] = 0
        refit(rollout, model.named_parameters())
        rollout.get_submodule("model.layers.0.mlp.up_proj").scales[0, 0] = 0

    return audited(plant)


def stale_weights() -> ContainmentReport:
    """The trainer took a step, and nothing was synced."""

    def plant(model: Any, rollout: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)

    return audited(plant)


CASES: dict[str, Callable[[], ContainmentReport]] = {
    "01_substring_skip": substring_skip,
    "02_scales_rounded_in_rollout": scales_rounded_in_rollout,
    "02_scales_rounded_in_trainer": scales_rounded_in_trainer,
    "03_fp32_master": fp32_master,
    "04_memory_layout": memory_layout,
    "04_stale_weights": stale_weights,
    "05_scales_after_the_codes": scales_after_the_codes,
    "06_straddling_parts": straddling_parts,
    "07_embedding_of_a_tied_head": embedding_of_a_tied_head,
    "08_quantized_router": quantized_router,
    "09_zero_block": zero_block,
    "10_residual_in_fp32": residual_in_fp32,
    "10_rope_in_fp32": rope_in_fp32,
    "10_activation_in_fp32": activation_in_fp32,
    "10_bias_in_fp32": bias_in_fp32,
    "11_ninth_recompile": ninth_recompile,
    "12_passes_skipped_by_a_cache": passes_skipped_by_a_cache,
    "13_padded_vocabulary": padded_vocabulary,
    "14_larger_floor": larger_floor,
}
