"""Faults planted into a live engine of vLLM, and the level that must name each.

Each function takes vLLM's LLM and the trainer, and returns the differences that the
check found. The caller pushes the weights again afterwards.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_compile.containment import check_containment
from jetrl_compile.differences import Difference
from jetrl_compile.integrations.vllm.engine import engine_graph, on_device, refit
from jetrl_compile.integrations.vllm.live_bytes import check_live_bytes
from jetrl_compile.integrations.vllm.live_model import config_of, parts_of
from jetrl_compile.integrations.vllm.storage import quantized_layers, scales_of
from jetrl_compile.kernels.dispatch import default_providers
from jetrl_compile.tracing import trace_model

LAYER = 1  # the decoder layer that is changed
O_PROJ = f"model.layers.{LAYER}.self_attn.o_proj"
Found = list[Difference]


def bytes_of(llm: Any, weights: dict[str, Tensor]) -> Found:
    """Return what level 3 finds."""
    found: Found = llm.apply_model(lambda model: check_live_bytes(model, weights))[0][1]
    return found


def weights_of(trainer: nn.Module) -> dict[str, Tensor]:
    """Return the trainer's parameters by name."""
    return {name: p.detach() for name, p in trainer.named_parameters()}


def graphs_of(llm: Any, trainer: nn.Module, recipe: str = "jetrl") -> Found:
    """Return what levels 1 and 2 find."""
    live = engine_graph(llm)
    train = trace_model(trainer, phase="train", recipe=recipe)
    device = live.meta.get("device", "")
    own = on_device(train, device, default_providers(device))
    return list(check_containment(live, own).differences)


class _Plain:
    """A layer's method: a product with a BF16 weight."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.linear(x, layer.stand_in.weight, bias)


def skipped_layer(llm: Any, trainer: nn.Module) -> Found:
    """One layer computes in BF16, as a skip list on one side has it.

    What vLLM compiled before is as after a hit of its compile cache: not known.
    """
    weight = weights_of(trainer)[f"{O_PROJ}.weight"]
    kept: list[Any] = []

    def plant(model: nn.Module) -> None:
        layer: Any = model.get_submodule(O_PROJ)
        rows, cols = weight.shape
        with weight.device:
            plain = nn.Linear(cols, rows, bias=False, dtype=torch.bfloat16)
        plain.weight.requires_grad_(False).copy_(weight)
        reports = config_of(model).reports
        kept.extend((layer.quant_method, list(reports)))
        layer.quant_method, layer.stand_in = _Plain(), plain
        reports.clear()

    def restore(model: nn.Module) -> None:
        layer: Any = model.get_submodule(O_PROJ)
        del layer.stand_in
        layer.quant_method = kept[0]
        config_of(model).reports.extend(kept[1])

    llm.apply_model(plant)
    try:
        return graphs_of(llm, trainer)
    finally:
        llm.apply_model(restore)


def ue8m0_flow(llm: Any, trainer: nn.Module) -> Found:
    """The trainer rounds scales to powers of two, and the engine does not."""
    return graphs_of(llm, trainer, recipe="jetrl_ue8m0")


def ue8m0_scales(llm: Any, trainer: nn.Module) -> Found:
    """Stored scales are rounded up to powers of two while the codes stay."""

    def plant(model: nn.Module) -> None:
        for layer in quantized_layers(model).values():
            scales = scales_of(layer).data
            scales.copy_(scales.log2().ceil().exp2())

    llm.apply_model(plant)
    return bytes_of(llm, weights_of(trainer))


def fp32_source(llm: Any, trainer: nn.Module) -> Found:
    """Codes are made of FP32 masters that were not rounded to BF16 first."""
    weights = weights_of(trainer)
    name = f"{O_PROJ}.weight"
    master = weights[name].float()
    weights[name] = master = master + 1e-3 * torch.randn_like(master)
    refit(llm, weights)

    def plant(model: nn.Module) -> None:
        layer, _ = parts_of(model)[O_PROJ]
        weight: Any = layer.weight
        scales = scales_of(layer).repeat_interleave(128, 0)[: master.shape[0]]
        scales = scales.repeat_interleave(128, 1)[:, : master.shape[1]]
        codes = (master / scales).clamp(-448, 448)
        weight.data.copy_(codes)

    llm.apply_model(plant)
    return bytes_of(llm, weights)


def transposed_block(llm: Any, trainer: nn.Module) -> Found:
    """A block of codes was copied in another memory order."""

    def plant(model: nn.Module) -> None:
        layer: Any = model.get_submodule(O_PROJ)
        block = layer.weight.data[:128, :128]
        block.copy_(block.clone().t())

    llm.apply_model(plant)
    return bytes_of(llm, weights_of(trainer))


def stale_layer(llm: Any, trainer: nn.Module) -> Found:
    """A layer keeps the codes of the weights before a refit."""

    def stored(model: nn.Module) -> Tensor:
        layer: Any = model.get_submodule(O_PROJ)
        weight: Tensor = layer.weight.data
        return weight

    old = llm.apply_model(lambda model: stored(model).clone())[0]
    weights = {name: w * 1.5 for name, w in weights_of(trainer).items()}
    weights[f"{O_PROJ}.weight"] = weights_of(trainer)[f"{O_PROJ}.weight"].roll(1, 0)
    refit(llm, weights)
    llm.apply_model(lambda model: stored(model).copy_(old))
    return bytes_of(llm, weights)


def only_o_proj(found: Found) -> bool:
    """Whether the first difference, and every one of an FP8 layer, names the layer."""
    names = [one.operator for one in found if one.operator.endswith(":fprop")]
    return bool(names) and all(name.startswith(O_PROJ) for name in names)


FAULTS: dict[str, tuple[Callable[[Any, nn.Module], Found], int, bool]] = {
    # What plants it, the level that names it, whether one layer alone differs.
    "one layer skipped": (skipped_layer, 1, True),
    "UE8M0 in the flow": (ue8m0_flow, 2, False),
    "UE8M0 scales stored": (ue8m0_scales, 3, False),
    "FP32 master as source": (fp32_source, 3, True),
    "transposed code block": (transposed_block, 3, True),
    "stale layer after refit": (stale_layer, 3, True),
}


def judge(name: str, found: Found) -> str:
    """Return "level N: operator" where the right level named it, else what is wrong."""
    _, level, alone = FAULTS[name]
    if not found:
        return "NOT FOUND"
    levels = sorted({one.level for one in found})
    first = found[0]
    text = f"level {first.level}: {first.operator} ({len(found)} differences)"
    own = [one for one in found if one.level == level]
    if levels[0] != level or (alone and not only_o_proj(own)):
        return f"WRONG, level {level} expected; levels {levels}, {text}"
    return text
