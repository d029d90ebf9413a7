"""Compile a model's decoder layers one by one.

A whole-model compile under `torch.utils.checkpoint` leaves the decoder layers
uncompiled in training, but not in evaluation: old log-probs in FP8, training in BF16.
Compiled a layer at a time, with `fullgraph=True`, every phase runs the same FP8 layers,
and layers with equal decisions share one compiled graph.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from jetrl_compile.cache_views import with_own_cache
from jetrl_compile.errors import ModelError
from jetrl_compile.options import parse_options
from jetrl_compile.recipe import Recipe
from jetrl_compile.rollout import QuantizedLinear


def decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's repeated decoder layers by path, in order.

    Raises:
        ModelError: The model has no list of layers.
    """
    named = set(getattr(model, "_no_split_modules", None) or ())
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        if not named or any(type(layer).__name__ in named for layer in module):
            return {f"{path}.{index}": layer for index, layer in enumerate(module)}
    raise ModelError(
        f"{type(model).__name__} has no list of decoder layers; compile it whole with "
        'torch.compile(model, backend="jetrl")'
    )


def compile_layers(model: nn.Module, **options: Any) -> dict[str, str]:
    """Compile each decoder layer in place with the backend "jetrl".

    Args:
        model: A Hugging Face causal model, or a rollout model. Compile before FSDP2's
            `fully_shard`.
        **options: As of the backend: `recipe`, `phase`, `lowering`, ... (no
            `module_path`).

    Returns:
        For each layer's path, the path of the first layer whose compiled graph it
        shares: layers in which the recipe quantizes the same linear layers share one.

    Raises:
        ModelError: The model has no list of decoder layers.
        RecipeError: An option is unknown.
    """
    chosen = parse_options(options)
    shared: dict[tuple[Any, ...], str] = {}
    stands_for: dict[str, str] = {}
    for path, layer in decoder_layers(model).items():
        decisions = _decisions(path, layer, chosen.recipe, chosen.phase)
        first = shared.setdefault((type(layer), decisions), path)
        stands_for[path] = first
        layer.compile(
            backend="jetrl",
            fullgraph=True,
            dynamic=True,
            options={**options, "module_path": first},
        )
        layer._compiled_call_impl = with_own_cache(layer)
        layer._compiled_call_impl = _with_constant_numbers(layer._compiled_call_impl)
    return stands_for


def _with_constant_numbers(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Let Dynamo take a module's floats (a norm's eps) and ints as constants.

    With `dynamic=True` it makes floats tensors on the CPU, which CUDA graphs cannot
    read. And where FSDP2 has wrapped the layer it makes `head_dim` a symbol: then views
    of q, k, v and o are products of symbols, their wgrads are no GEMMs of a weight that
    the passes know, and run in BF16. Sizes of tensors stay dynamic.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        # Set by hand: config.patch() costs 100 us a call.
        config: Any = torch._dynamo.config
        before = config.specialize_float, config.specialize_int
        config.specialize_float = config.specialize_int = True
        try:
            return compiled(*args, **kwargs)
        finally:
            config.specialize_float, config.specialize_int = before

    return call


def _decisions(
    path: str, layer: nn.Module, recipe: Recipe, phase: str
) -> tuple[Any, ...]:
    """What the recipe decides of each linear layer, apart from its role."""
    return tuple(
        (
            name,
            isinstance(module, QuantizedLinear),
            recipe.reason_to_keep(f"{path}.{name}", "linear", phase) is None,
        )
        for name, module in layer.named_modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter)
        or isinstance(module, QuantizedLinear)
    )
