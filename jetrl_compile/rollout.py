"""A rollout model in plain PyTorch: FP8 weights stored once a sync, refitted in place.

Each linear layer that the recipe quantizes keeps E4M3 codes and block scales, and no
BF16 copy. Compiled with `backend="jetrl"` and `phase="rollout"`, its GEMM reads them as
they are; run eagerly, the layer computes in BF16 on dequantized weights.
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_compile.errors import ModelError, RefitError
from jetrl_compile.formats import Flow
from jetrl_compile.kernels import ops
from jetrl_compile.recipe import Recipe, get_recipe
from jetrl_compile.tracing import trace_model


class QuantizedLinear(nn.Module):
    """A linear layer, y = x w^T + bias, that stores w_NK in FP8.

    Attributes:
        weight: Codes, (N, K), float8_e4m3fn, row-major.
        weight_scale_inv: FP32, (ceil(N / rows), ceil(K / cols)), row-major; multiplies
            the codes. Named as in DeepSeek's checkpoints and vLLM. With powers of two
            (UE8M0) it is called `weight_scale_inv_ue8m0`.
        bias: (N,), BF16, or None.
        flow: How the weight is quantized.
        transposed: Whether the trainer keeps this weight as (K, N) (GPT-2's Conv1D).
    """

    weight: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, flow: Flow) -> None:
        super().__init__()
        assert flow.granularity is not None
        self.flow = flow
        self.rows, self.cols = flow.granularity.rows, flow.granularity.cols
        self.scale_name = "weight_scale_inv" + (
            "_ue8m0" if flow.scale_format == "ue8m0" else ""
        )
        self.transposed = False
        codes, scales = self.quantize(weight)
        self.register_buffer("weight", codes)
        self.register_buffer(self.scale_name, scales)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes and scales of a weight (N, K), BF16 or FP32."""
        codes, scales = ops.quantize(
            weight,
            self.rows,
            self.cols,
            False,
            self.flow.scale_format,
            self.flow.amax_floor,
            None,
        )
        return codes, scales

    @property
    def scales(self) -> Tensor:
        """The stored scales."""
        scales: Tensor = getattr(self, self.scale_name)
        return scales

    def forward(self, x: Tensor) -> Tensor:
        """Return x w^T + bias; x is (..., K), BF16 or FP32."""
        weight = ops.dequantize(self.weight, self.scales, self.rows, self.cols, x.dtype)
        return nn.functional.linear(x, weight, self.bias)

    def extra_repr(self) -> str:
        """Return sizes and flow, for print(model)."""
        n, k = self.weight.shape
        return f"in_features={k}, out_features={n}, {self.flow}"


def make_rollout_model(
    model: nn.Module, recipe: str | Recipe = "jetrl", *, fold_layers: bool = True
) -> nn.Module:
    """Return a rollout model with the weights of a trainer's model, which is unchanged.

    Args:
        model: A Hugging Face causal model with BF16 or FP32 weights.
        recipe: A recipe or its name; without rollout FP8 the copy is BF16 alone.
        fold_layers: Trace repeated decoder layers once a kind to find the layers.

    Returns:
        A copy in eval mode, without gradients: parameters in BF16, quantized layers as
        `QuantizedLinear`, other buffers as they were. `refit` brings new weights.

    Raises:
        ModelError: Weights are FP16, FP64 or integers, or hold NaN or infinity.
        RecipeError: The recipe is unknown, or one of its patterns matches nothing.
    """
    chosen = get_recipe(recipe)
    for name, parameter in model.named_parameters():
        _check_weight(name, parameter, ModelError)
    graph = trace_model(model, phase="rollout", recipe=chosen, fold_layers=fold_layers)
    named = {op.module: graph.operands[op.name] for op in graph.gemms("fprop")}
    quantized = {m: o["w"].flow for m, o in named.items() if o["w"].flow.is_quantized}
    rollout = copy.deepcopy(model).eval()
    for parameter in rollout.parameters():
        parameter.requires_grad_(False)
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)
    for path, flow in quantized.items():
        layer = rollout.get_submodule(path)
        tensors = dict(layer.named_parameters(recurse=False))
        weight, bias = tensors["weight"].data, tensors.get("bias")
        transposed = not isinstance(layer, nn.Linear)
        stored = QuantizedLinear(
            weight.t() if transposed else weight,
            None if bias is None else bias.data,
            flow,
        )
        stored.transposed = transposed
        parent, _, name = path.rpartition(".")
        setattr(rollout.get_submodule(parent), name, stored)
    return rollout


def refit(
    rollout: nn.Module, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
) -> int:
    """Bring a trainer's weights into a rollout model, all or nothing.

    Every tensor is checked, rounded to BF16 and quantized before any is written; they
    are then written into the same storage, so that compiled graphs stay valid.

    Args:
        rollout: From `make_rollout_model`.
        weights: The trainer's parameters by name, all of them, BF16 or FP32, such as
            `trainer.named_parameters()`; a tied weight may come once. Of quantized
            layers also codes and scales, as the layer stores them and by its names.

    Returns:
        The number of tensors that were written.

    Raises:
        RefitError: A name, shape or dtype does not fit, a parameter is missing, or a
            weight holds NaN or infinity; the rollout model is unchanged.
    """
    given = dict(weights)
    layers = {
        path: layer
        for path, layer in rollout.named_modules()
        if isinstance(layer, QuantizedLinear)
    }
    plain = dict(rollout.named_parameters(remove_duplicate=False))
    first = {id(p): name for name, p in rollout.named_parameters()}
    writes: list[tuple[Tensor, Tensor]] = []
    seen: set[str] = set()
    for name, tensor in given.items():
        path, _, leaf = name.rpartition(".")
        source = tensor.detach()
        if path in layers and _is_stored(layers[path], leaf, source):
            _check_shape(name, source, getattr(layers[path], leaf))
            writes.append((getattr(layers[path], leaf), source))
            seen.add(name)
            continue
        _check_weight(name, tensor, RefitError)
        if path in layers and name.endswith(".weight"):
            layer = layers[path]
            source = source.t() if layer.transposed else source
            _check_shape(name, source, layer.weight)
            codes, scales = layer.quantize(source.to(layer.weight.device))
            writes += [(layer.weight, codes), (layer.scales, scales)]
            seen.add(name)
        elif name in plain:
            _check_shape(name, source, plain[name])
            writes.append((plain[name].data, source.to(torch.bfloat16)))
            seen.add(first[id(plain[name])])
        else:
            raise RefitError(
                f"the rollout model has no parameter {name}; push the parameters of "
                "the model that it was made from, by their names in named_parameters()"
            )
    wanted = {f"{path}.weight" for path in layers} | set(first.values())
    wanted |= {
        f"{path}.{layer.scale_name}"
        for path, layer in layers.items()
        if f"{path}.weight" in given
        and given[f"{path}.weight"].dtype == layer.weight.dtype
    }
    missing = sorted(wanted - seen)
    if missing:
        raise RefitError(
            f"{len(missing)} of {len(wanted)} parameters are missing, first "
            f"{missing[0]}; push all of them at once: nothing was written"
        )
    with torch.no_grad():
        for target, value in writes:
            target.copy_(value)
    return len(writes)


def _is_stored(layer: QuantizedLinear, leaf: str, tensor: Tensor) -> bool:
    """Whether a tensor is codes or scales, as the layer stores them."""
    if leaf == layer.scale_name:
        return bool(torch.isfinite(tensor).all())
    return leaf == "weight" and tensor.dtype == layer.weight.dtype


def _check_weight(name: str, tensor: Tensor, error: type[Exception]) -> None:
    if tensor.dtype not in (torch.bfloat16, torch.float32):
        raise error(
            f"weight {name} is {str(tensor.dtype).removeprefix('torch.')}; needed is "
            "BF16 or FP32: convert the model with model.to(torch.bfloat16)"
        )
    if not bool(torch.isfinite(tensor.detach()).all()):
        raise error(
            f"weight {name} holds NaN or infinity; restore a sound checkpoint before "
            "it goes to the rollout model"
        )


def _check_shape(name: str, tensor: Tensor, stored: Any) -> None:
    if tensor.shape != stored.shape:
        raise RefitError(
            f"weight {name} has shape {tuple(tensor.shape)}, the rollout model stores "
            f"{tuple(stored.shape)}; push the weights of the same architecture"
        )
