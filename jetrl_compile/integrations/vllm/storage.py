"""FP8 storage of a linear layer of vLLM: codes and block scales, and no BF16 copy.

vLLM loads a BF16 weight on the meta device first; when all parts of a layer are there
it is materialized, quantized part by part, and dropped. Later pushes are quantized into
the same storage, so that CUDA graphs stay valid.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_compile.errors import ModelError, RefitError
from jetrl_compile.formats import Flow
from jetrl_compile.integrations.vllm.layout import LayerLayout, Part
from jetrl_compile.integrations.vllm.weight_state import WeightState
from jetrl_compile.kernels import ops
from jetrl_compile.kernels.layouts import code_strides

LAYOUT = "jetrl_layout"  # attributes of a layer
LOADED = "jetrl_loaded"


def scale_name(flow: Flow) -> str:
    """Return what the scales of a layer are called; as in DeepSeek's checkpoints."""
    return "weight_scale_inv" + ("_ue8m0" if flow.scale_format == "ue8m0" else "")


def scales_of(layer: nn.Module) -> Tensor:
    """Return the stored scales of a layer.

    Raises:
        RefitError: vLLM has taken the storage away for a reload that did not end.
    """
    layout: LayerLayout = getattr(layer, LAYOUT)
    scales: Tensor | None = getattr(layer, scale_name(layout.flow), None)
    if scales is None:
        raise RefitError(
            f"{layout.name} waits for weights of a reload of vLLM's that did not end; "
            "call llm.start_weight_update() and llm.finish_weight_update(), and push "
            "all weights"
        )
    return scales


def quantized_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers with FP8 storage, by their names in the engine."""
    return {
        getattr(layer, LAYOUT).name: layer
        for layer in model.modules()
        if hasattr(layer, LAYOUT)
    }


def quantize_part(weight: Tensor, flow: Flow) -> tuple[Tensor, Tensor]:
    """Return codes and scales of a weight (N, K), BF16 or FP32."""
    assert flow.granularity is not None
    codes, scales = ops.quantize(
        weight,
        flow.granularity.rows,
        flow.granularity.cols,
        False,
        flow.scale_format,
        flow.amax_floor,
        None,
    )
    return codes, scales


def counting(loader: Callable[..., Any], layer: nn.Module) -> Callable[..., Any]:
    """Return vLLM's weight loader of a layer, noting which parts it wrote."""

    @wraps(loader)
    def load(param: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = loader(param, *args, **kwargs)
        if not param.is_meta:
            key = args[1] if len(args) > 1 else kwargs.get("loaded_shard_id")
            getattr(layer, LOADED).update(key if isinstance(key, tuple) else (key,))
        return result

    return load


def store(layer: nn.Module, state: WeightState, *, unchecked: bool = False) -> None:
    """Quantize the loaded BF16 weight of a layer, and keep the codes alone.

    vLLM's reloads call it again, and then put the new codes into the first storage; an
    exception would leave the layer without it. So what is wrong with a reload is told
    when the model is to generate: parts that did not come, NaN and infinity.

    Args:
        layer: Its `weight` is (N, K) in BF16 or FP32.
        state: Told what was written.
        unchecked: Whether the weight was filled by something else than a loader.

    Raises:
        ModelError: Not all parts were loaded, the first time.
    """
    layout: LayerLayout = getattr(layer, LAYOUT)
    loaded: set[Any] = getattr(layer, LOADED)
    again = all(map(state.is_loaded, layout.parts))
    missing = [p.name for p in layout.parts if p.key not in loaded]
    if None in loaded or unchecked:
        missing = []
    if missing and not again:
        raise ModelError(
            f"{layout.name} was loaded without {', '.join(missing)}; give a checkpoint "
            "with all weights"
        )
    loaded.clear()
    weight = layer.weight
    assert isinstance(weight, Tensor)
    device = weight.device
    codes = torch.empty_strided(
        (layout.rows, layout.cols),
        code_strides(layout.rows, layout.cols),
        dtype=torch.float8_e4m3fn,
        device=device,
    )
    scales = torch.zeros(layout.scale_shape, dtype=torch.float32, device=device)
    for part in layout.parts:
        if part.name in missing:
            codes[part.low : part.low + part.rows].zero_()
            continue
        rows = weight.detach()[part.low : part.low + part.rows]
        made = quantize_part(rows, layout.flow)
        write(part, made, codes, scales, state, later=again)
    del layer.weight
    param = nn.Parameter(codes, requires_grad=False)
    param.weight_loader = in_place(layer, state)  # type: ignore[attr-defined]
    layer.register_parameter("weight", param)
    name = scale_name(layout.flow)
    layer._parameters.pop(name, None)
    layer.register_parameter(name, nn.Parameter(scales, requires_grad=False))


def write(
    part: Part,
    made: tuple[Tensor, Tensor],
    codes: Tensor,
    scales: Tensor,
    state: WeightState,
    *,
    later: bool = False,
) -> None:
    """Write codes and scales of a part into a layer's storage.

    Args:
        part: The part.
        made: Its codes and scales.
        codes: The layer's.
        scales: The layer's.
        state: Told what was written.
        later: As in `WeightState.wrote`.
    """
    try:
        with torch.no_grad():
            codes[part.low : part.low + part.rows].copy_(made[0])
            high = part.scale_low + part.scale_rows
            scales[part.scale_low : high].copy_(made[1])
    except BaseException:
        state.broken = f"writing {part.name} failed; push all weights"
        raise
    state.wrote(part, made[1], later=later)


def check_pushed(part: Part, loaded: Tensor) -> None:
    """Check a weight that is pushed for a part.

    Raises:
        RefitError: Its shape or dtype does not fit.
    """
    if tuple(loaded.shape) != part.shape:
        raise RefitError(
            f"weight {part.name}.weight has shape {tuple(loaded.shape)}, the engine "
            f"stores {part.shape}; push the weights of the same architecture"
        )
    if loaded.dtype not in (torch.bfloat16, torch.float32):
        raise RefitError(
            f"weight {part.name}.weight is "
            f"{str(loaded.dtype).removeprefix('torch.')}; push BF16, or FP32 that is "
            "rounded to BF16 here"
        )


def in_place(layer: nn.Module, state: WeightState) -> Callable[..., None]:
    """Return a weight loader that quantizes a pushed weight into the storage.

    It has the interface of vLLM's: `loader(param, loaded_weight[, shard_id])`.
    """

    def load(
        param: Tensor,
        loaded_weight: Tensor,
        loaded_shard_id: str | int | None = None,
    ) -> None:
        layout: LayerLayout = getattr(layer, LAYOUT)
        parts = layout.parts
        if loaded_shard_id is None and len(parts) > 1:  # fused in the checkpoint, too
            pieces = torch.split(loaded_weight, [p.shape[0] for p in parts])
        else:
            parts, pieces = (layout.part(loaded_shard_id),), (loaded_weight,)
        for part, piece in zip(parts, pieces, strict=True):
            check_pushed(part, piece)
            # The caller may use its buffer again once this returns: no async copy.
            shard = piece.detach()[part.source].to(param.device)
            made = quantize_part(shard, layout.flow)
            write(part, made, param.data, scales_of(layer).data, state)

    return load
