"""Where each tensor of a checkpoint goes in a loaded model; made once a model.

A push of an 8B model is a few hundred tensors and 10 ms of memory traffic, so nothing
is looked up while it runs: the parts of a fused layer are quantized by one kernel, and
what stays in BF16 is copied by one call.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from jetrl_compile.integrations.vllm.layout import LayerLayout
from jetrl_compile.integrations.vllm.storage import (
    LAYOUT,
    quantized_layers,
    scales_of,
)
from jetrl_compile.kernels import fused_ops


@dataclass(frozen=True)
class LayerTarget:
    """The storage of one FP8 layer.

    Attributes:
        layout: Its parts.
        names: The checkpoint's weights of its parts, in order.
        codes: The stored codes, (N, K).
        scales: The stored scales.
    """

    layout: LayerLayout
    names: tuple[str, ...]
    codes: Tensor
    scales: Tensor

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Quantize a layer's weights into its storage."""
        flow = self.layout.flow
        assert flow.granularity is not None
        region = (flow.granularity.rows, flow.granularity.cols)
        given = [
            weights[name][part.source].to(self.codes.device, non_blocking=True)
            for name, part in zip(self.names, self.layout.parts, strict=True)
        ]
        last = (False, flow.scale_format, flow.amax_floor, None)
        if self.layout.is_one_matrix:
            made = fused_ops.quantize_parts(given, 0, *region, *last)
            self.codes.copy_(made[0])
            self.scales.copy_(made[1])
            return
        for weight, part in zip(given, self.layout.parts, strict=True):
            codes, scales = fused_ops.quantize_parts([weight], 0, *region, *last)
            self.codes[part.low : part.low + part.rows].copy_(codes)
            high = part.scale_low + part.scale_rows
            self.scales[part.scale_low : high].copy_(scales)


@dataclass(frozen=True)
class PushPlan:
    """Where the tensors of a checkpoint go.

    Attributes:
        layers: The FP8 layers.
        plain: For each tensor that stays as it is, the parameter or part of one.
        shapes: The shape that each tensor of the checkpoint must have.
        whole: Whether `plain` holds whole tensors: no tensor parallelism.
    """

    layers: tuple[LayerTarget, ...]
    plain: Mapping[str, Tensor]
    shapes: Mapping[str, tuple[int, ...]]
    whole: bool = True
    made_for: tuple[int, ...] = field(default=(), repr=False)

    @staticmethod
    def state_of(model: nn.Module) -> tuple[int, ...]:
        """Return what changes when a model has other parameters."""
        return tuple(id(parameter) for parameter in model.parameters())


def make_plan(model: nn.Module) -> PushPlan:
    """Return the plan of a loaded model."""
    layers = quantized_layers(model)
    modules = dict(model.named_modules())
    targets: list[LayerTarget] = []
    shapes: dict[str, tuple[int, ...]] = {}
    stored: set[int] = set()
    whole = True
    for layer in layers.values():
        layout: LayerLayout = getattr(layer, LAYOUT)
        codes = layer.weight
        assert isinstance(codes, Tensor)
        scales = scales_of(layer)
        names = tuple(f"{part.name}.weight" for part in layout.parts)
        shapes |= dict(zip(names, (part.shape for part in layout.parts), strict=True))
        whole &= all(part.shape == (part.rows, layout.cols) for part in layout.parts)
        targets.append(LayerTarget(layout, names, codes.data, scales.data))
        stored |= {id(codes), id(scales)}
    plain: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in stored:
            continue
        path, _, leaf = name.rpartition(".")
        if path in layers:
            for part in getattr(layers[path], LAYOUT).parts:
                own = f"{part.name}.{leaf}"
                plain[own] = parameter.data[part.low : part.low + part.rows]
                shapes[own] = part.shape[:1]
            continue
        rows = getattr(modules.get(path), "org_vocab_size", None)
        shapes[name] = tuple(parameter.shape)
        plain[name] = parameter.data
        if rows is not None:  # the engine pads a vocabulary
            shapes[name] = (int(rows), *parameter.shape[1:])
            plain[name] = parameter.data[: int(rows)]
    return PushPlan(tuple(targets), plain, shapes, whole, PushPlan.state_of(model))


def write_plain(plan: PushPlan, weights: Mapping[str, Tensor]) -> None:
    """Copy what stays as it is, rounded to the parameter's dtype."""
    targets = [target for name, target in plan.plain.items() if name in weights]
    sources = [
        weights[name].to(target.device, non_blocking=True)
        for name, target in plan.plain.items()
        if name in weights
    ]
    if targets:
        torch._foreach_copy_(targets, sources)
