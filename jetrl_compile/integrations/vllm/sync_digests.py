"""Level 3 of a live model without its weights: digests of what each rank stores.

A digest is of a checkpoint's tensor, or of the rows and columns of it that a rank has.
The trainer asks for the layouts first, and makes the digests of the same shards.
"""

import json
from collections.abc import Iterable

import torch
from torch import nn

from jetrl_compile.digests import Shard, digests
from jetrl_compile.integrations.vllm.stored import expert_paths, stored_tensors


def layout_document(model: nn.Module) -> str:
    """Return what a rank stores, as JSON: shards, and paths that have no digests.

    Args:
        model: A model that was loaded with `quantization="jetrl"`.
    """
    shards = [
        (item.name, str(item.tensor.dtype).removeprefix("torch."), item.bounds)
        for item in stored_tensors(model)
    ]
    return json.dumps({"shards": shards, "unchecked": expert_paths(model)})


def read_layouts(
    documents: Iterable[str],
) -> tuple[dict[str, list[tuple[Shard, torch.dtype]]], tuple[str, ...]]:
    """Return the shards that ranks store, by tensor, and paths without digests.

    Args:
        documents: The `layout_document` of each rank.
    """
    shards: dict[str, dict[tuple[Shard, torch.dtype], None]] = {}
    unchecked: dict[str, None] = {}
    for document in documents:
        layout = json.loads(document)
        for name, dtype, bounds in layout["shards"]:
            shard = Shard(name, tuple((low, high) for low, high in bounds))
            shards.setdefault(name, {})[shard, getattr(torch, dtype)] = None
        unchecked |= dict.fromkeys(layout["unchecked"])
    return {name: list(found) for name, found in shards.items()}, tuple(unchecked)


def digest_document(model: nn.Module) -> str:
    """Return the digests of all that a rank stores, as JSON, by shard.

    Args:
        model: A model that was loaded with `quantization="jetrl"`.
    """
    made = digests(
        {
            Shard(item.name, item.bounds).key: item.tensor
            for item in stored_tensors(model)
        }
    )
    return json.dumps(made)
