"""Compile a model's decoder layers one by one.

A whole-model compile under `torch.utils.checkpoint` leaves the decoder layers
uncompiled in training, but not in evaluation: old log-probs in FP8, training in BF16.
Compiled a layer at a time, with `fullgraph=True`, every phase runs the same FP8 layers,
and layers with equal decisions share one compiled graph.
"""

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from jetrl_compile.cache_views import with_own_cache
from jetrl_compile.errors import ModelError
from jetrl_compile.exact_attention import is_exact, use_exact_attention
from jetrl_compile.options import parse_options
from jetrl_compile.recipe import BF16, Recipe
from jetrl_compile.rollout import QuantizedLinear

RECOMPILE_LIMIT = 64  # of a layer, where Dynamo's own is lower


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

    With `exact=True` the model's attention becomes that of exact mode, and the modules
    behind the layers (the last norm, the output head) are compiled too, in BF16.

    Args:
        model: A Hugging Face causal model, or a rollout model. Compile before FSDP2's
            `fully_shard`.
        **options: As of the backend: `recipe`, `phase`, `lowering`, ... (no
            `module_path`).

    Returns:
        For each layer's path, the path of the first layer whose compiled graph it
        shares: layers in which the recipe quantizes the same linear layers share one.

    Raises:
        ModelError: The model has no list of decoder layers, or, with `exact`, takes no
            other attention.
        ProviderError: With `exact`, a kernel cannot run in this process.
        RecipeError: An option is unknown.
    """
    chosen = parse_options(options)
    if chosen.exact:
        _compile_the_rest(model, options)
    shared: dict[tuple[Any, ...], str] = {}
    stands_for: dict[str, str] = {}
    for path, layer in decoder_layers(model).items():
        decisions = _decisions(path, layer, chosen.recipe, chosen.phase)
        first = shared.setdefault((type(layer), decisions), path)
        stands_for[path] = first
        _compile(layer, {**options, "module_path": first}, with_own_cache)
    return stands_for


def _compile(
    module: nn.Module,
    options: Mapping[str, Any],
    wrap: Callable[[nn.Module], Any] | None = None,
) -> None:
    how: dict[str, Any] = {"backend": "jetrl", "fullgraph": True, "dynamic": True}
    module.compile(**how, options=dict(options))
    if wrap is not None:
        module._compiled_call_impl = wrap(module)
    compiled: Any = module._compiled_call_impl
    if wrap is None:
        # Dynamo passes over frames of torch.nn, so that nn.Linear.compile() compiles
        # nothing: it needs one of another file.
        run = torch.compile(_own_forward(), **how, options=dict(options))
        compiled = _with_hooks(module, functools.partial(run, module))
    module._compiled_call_impl = _with_settings(compiled)


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward: Any = type(module).forward
    return forward(module, *args, **kwargs)


def _own_forward() -> Callable[..., Any]:
    """Return `_forward` with code of its own: Dynamo counts recompiles by code."""
    return types.FunctionType(_forward.__code__.replace(), globals())


def _with_hooks(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module's call with another forward; its hooks (FSDP2's) run eagerly."""

    def call(*args: Any, **kwargs: Any) -> Any:
        run: Any = module._call_impl
        vars(module)["forward"] = forward
        try:
            return run(*args, **kwargs)
        finally:
            del vars(module)["forward"]

    return call


def _compile_the_rest(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Let what computes logits outside of the decoder layers be exact, too.

    Embeddings copy rows, and tables of cosines are functions of positions.
    """
    if not is_exact(model):
        use_exact_attention(cast(PreTrainedModel, model))
    inside = {
        id(m) for layer in decoder_layers(model).values() for m in layer.modules()
    }
    for path, module in model.named_modules():
        if id(module) in inside or isinstance(module, nn.Embedding):
            continue
        if any(True for _ in module.parameters(recurse=False)):
            own = {"recipe": BF16, "module_path": path}
            _compile(module, {**options, **own})


def _with_settings(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Let Dynamo take a module's floats and ints as constants, and compile it often.

    With `dynamic=True` it makes floats (a norm's eps) tensors on the CPU, which CUDA
    graphs cannot read. And where FSDP2 has wrapped the layer it makes `head_dim` a
    symbol: then views of q, k, v and o are products of symbols, their wgrads are no
    GEMMs of a weight that the passes know, and run in BF16. Sizes of tensors stay
    dynamic.

    A training run needs a layer with and without a mask (Hugging Face leaves it out of
    a batch without padding), with and without gradients, of inputs that need them or
    not, for an actor and its reference: more than the 8 times that Dynamo allows.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        # Set by hand: config.patch() costs 100 us a call.
        config: Any = torch._dynamo.config
        before = config.specialize_float, config.specialize_int, config.recompile_limit
        config.specialize_float = config.specialize_int = True
        config.recompile_limit = max(before[2], RECOMPILE_LIMIT)
        try:
            return compiled(*args, **kwargs)
        finally:
            config.specialize_float, config.specialize_int, config.recompile_limit = (
                before
            )

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
