"""Let compiled decoder layers share one graph although they use a cache.

A decoder layer asks the cache for its own slot by its number, and Dynamo would compile
each layer anew because that number differs. Here every layer is number 0 of a cache of
one slot, its own, so layers that `compile_layers` let share a graph do so with a cache
too.
"""

from typing import Any

from torch import nn
from transformers import DynamicCache

from jetrl_compile.errors import ModelError
from jetrl_compile.examples.sampling import cache_argument
from jetrl_compile.layers import decoder_layers


def share_layer_graphs(model: nn.Module) -> None:
    """Make each compiled decoder layer of a model see only its own slot of a cache.

    The model takes an ordinary `DynamicCache`, filled as without this.

    Args:
        model: A Hugging Face causal model after `compile_layers`.

    Raises:
        ModelError: A decoder layer is not compiled.
    """
    keyword = cache_argument(model)
    for index, (path, layer) in enumerate(decoder_layers(model).items()):
        compiled = layer._compiled_call_impl
        if compiled is None:
            raise ModelError(f"{path} is not compiled; call compile_layers first")
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = 0  # type: ignore[assignment]
        # What nn.Module.compile() sets and nn.Module.__call__ runs.
        layer._compiled_call_impl = _with_own_slot(compiled, keyword, index)


def _with_own_slot(compiled: Any, keyword: str, index: int) -> Any:
    """Return a call of a layer in which its cache has one slot."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get(keyword) is not None:
            slot = DynamicCache()
            slot.layers = [kwargs[keyword].layers[index]]
            kwargs[keyword] = slot
        return compiled(*args, **kwargs)

    return call
