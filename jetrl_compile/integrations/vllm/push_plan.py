"""Where each tensor of a checkpoint goes in a loaded model; made once a model.

A push of an 8B model is a few hundred tensors and 10 ms of memory traffic, so nothing
is looked up while it runs: the parts of a fused layer are quantized by one kernel, and
what stays in BF16 is copied by one call.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_compile.integrations.vllm.layout import LayerLayout, Part
from jetrl_compile.integrations.vllm.live_model import has_experts, tied_parameters
from jetrl_compile.integrations.vllm.storage import (
    LAYOUT,
    quantized_layers,
    scales_of,
)
from jetrl_compile.kernels import quantizers


@dataclass(frozen=True)
class Piece:
    """Rows of an FP8 layer that one kernel writes.

    Attributes:
        sources: The checkpoint's weights below each other, and which part of each is
            wanted; None: the whole.
        codes: Where their codes are stored, (N, K).
        scales: Where their scales are.
    """

    sources: tuple[tuple[str, tuple[slice, slice] | None], ...]
    codes: Tensor
    scales: Tensor


@dataclass(frozen=True)
class LayerTarget:
    """The storage of one FP8 layer.

    Attributes:
        layout: Its parts.
        names: The checkpoint's weights of its parts, in order.
        pieces: What is written; one, unless a seam of two parts cuts a block.
        scales: The stored scales.
    """

    layout: LayerLayout
    names: tuple[str, ...]
    pieces: tuple[Piece, ...]
    scales: Tensor

    @classmethod
    def of(cls, layout: LayerLayout, codes: Tensor, scales: Tensor) -> "LayerTarget":
        """Return the target of a layer with this storage."""
        named = [
            (f"{part.name}.weight", _wanted(layout, part)) for part in layout.parts
        ]
        if layout.is_one_matrix:
            pieces = [Piece(tuple(named), codes, scales)]
        else:
            pieces = [
                Piece(
                    (source,),
                    codes[part.low : part.low + part.rows],
                    scales[part.scale_low : part.scale_low + part.scale_rows],
                )
                for source, part in zip(named, layout.parts, strict=True)
            ]
        return cls(layout, tuple(name for name, _ in named), tuple(pieces), scales)

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Quantize a layer's weights into its storage."""
        flow = self.layout.flow
        assert flow.granularity is not None
        assert flow.scale_format is not None
        assert flow.amax_floor is not None
        rows, cols = flow.granularity.rows, flow.granularity.cols
        device = self.scales.device
        for piece in self.pieces:
            given = []
            for name, wanted in piece.sources:
                weight = weights[name] if wanted is None else weights[name][wanted]
                if weight.device != device:
                    weight = weight.to(device, non_blocking=True)
                given.append(weight)
            how = (rows, cols, flow.scale_format, flow.amax_floor)
            quantizers.quantize_into(given, *how, piece.codes, piece.scales)


def _wanted(layout: LayerLayout, part: Part) -> tuple[slice, slice] | None:
    return None if part.shape == (part.rows, layout.cols) else part.source


@dataclass(frozen=True)
class PushPlan:
    """Where the tensors of a checkpoint go.

    Attributes:
        layers: The FP8 layers.
        plain: For each tensor that stays as it is, the parameter or part of one.
        shapes: The shape that each tensor of the checkpoint must have.
        whole: Whether `plain` holds whole tensors: no tensor parallelism.
        tied: Further names of tensors that the model has once.
        experts: Paths of fused experts, which no push writes yet.
        owners: For each parameter, the dictionary of the module that has it, its name
            there, and itself.
    """

    layers: tuple[LayerTarget, ...]
    plain: Mapping[str, Tensor]
    shapes: Mapping[str, tuple[int, ...]]
    whole: bool = True
    tied: Mapping[str, str] = field(default_factory=dict)
    experts: tuple[str, ...] = ()
    owners: tuple[tuple[dict[str, Any], str, Any], ...] = field(default=(), repr=False)

    @property
    def is_current(self) -> bool:
        """Whether the model still has the parameters that the plan was made for."""
        return all(own.get(name) is given for own, name, given in self.owners)


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
        target = LayerTarget.of(layout, codes.data, scales.data)
        targets.append(target)
        for name, part in zip(target.names, layout.parts, strict=True):
            shapes[name] = part.shape
            whole &= _wanted(layout, part) is None
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
    owners = tuple(
        (module._parameters, name, parameter)
        for module in modules.values()
        for name, parameter in module._parameters.items()
    )
    experts = tuple(name for name, module in modules.items() if has_experts(module))
    tied = tied_parameters(model)
    return PushPlan(tuple(targets), plain, shapes, whole, tied, experts, owners)


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


def largest(plan: PushPlan) -> dict[str, Tensor]:
    """Return the largest magnitude in each tensor that stays as it is, FP32 ().

    NaN and infinity pass on to it; all are found by one call.
    """
    own = {n: t for n, t in plan.plain.items() if t.is_floating_point() and t.numel()}
    if not own:
        return {}
    found = torch._foreach_norm(list(own.values()), float("inf"))
    stacked = torch.stack(list(found)).float()
    return dict(zip(own, stacked.unbind(), strict=True))
