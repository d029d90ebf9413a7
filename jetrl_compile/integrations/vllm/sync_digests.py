"""Level 3 of a live model without its weights: digests of what each rank stores.

A digest is of a checkpoint's tensor, or of the rows and columns of it that a rank has.
The trainer asks for the layouts first, and makes the digests of the same shards.
"""

import json

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
