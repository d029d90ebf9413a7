"""Let decoder layers that are compiled one by one share a graph when they use a cache.

A layer reads its part of a key/value cache by its own index, so Dynamo would compile
each layer anew. Here a compiled layer is handed a view of the cache that holds its part
alone, at index 0; the parts are the cache's own objects, so what it appends is there.
"""

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from jetrl_compile.errors import ModelError

_VIEWS = "_jetrl_views"


def with_own_cache(layer: nn.Module) -> Callable[..., Any]:
    """Return a compiled layer's call, with a view in place of a cache it is given.

    Args:
        layer: A decoder layer after `layer.compile(...)`.

    Raises:
        ModelError: On a call, where the cache has no part for the layer yet.
    """
    compiled: Callable[..., Any] = layer._compiled_call_impl  # type: ignore[assignment]
    indexed = [
        module
        for module in layer.modules()
        if isinstance(vars(module).get("layer_idx"), int)
    ]

    def call(*args: Any, **kwargs: Any) -> Any:
        if not indexed or not any(map(_is_cache, (*args, *kwargs.values()))):
            return compiled(*args, **kwargs)
        own = [vars(module)["layer_idx"] for module in indexed]
        args = tuple(_view(value, own[0]) for value in args)
        kwargs = {key: _view(value, own[0]) for key, value in kwargs.items()}
        for module in indexed:
            vars(module)["layer_idx"] = 0
        try:
            return compiled(*args, **kwargs)
        finally:
            for module, index in zip(indexed, own, strict=True):
                vars(module)["layer_idx"] = index

    return call


def _is_cache(value: Any) -> bool:
    """Whether an argument is a transformers cache: parts in `layers`, and `update`."""
    return isinstance(getattr(value, "layers", None), list) and hasattr(value, "update")


def _view(value: Any, index: int) -> Any:
    """Return the view of a cache for one layer, the same object each time."""
    if not _is_cache(value):
        return value
    views = vars(value).setdefault(_VIEWS, {})
    part = value.layers[index : index + 1]
    if not part:
        raise ModelError(
            f"the cache has parts for {len(value.layers)} layers, none for layer "
            f"{index}; make it with its config, such as DynamicCache(config=config)"
        )
    if index not in views or views[index].layers[0] is not part[0]:
        view = copy.copy(value)
        vars(view).pop(_VIEWS, None)
        view.layers = part
        views[index] = view
    return views[index]
