"""An engine of several ranks: weights go there in chunks, digests come back.

The ranks are processes of their own, which share no memory with the trainer. A refit
sends them whole weights, of which each keeps its shards; level 3 sends nothing: a rank
says which shards it has and what the digests of their bytes are.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_compile.containment import Difference, LevelResult
from jetrl_compile.digests import (
    Digests,
    StoredLayer,
    compare_digests,
    merge_ranks,
)
from jetrl_compile.integrations.vllm.refit import (
    begin_push,
    check_push,
    plan_of,
    push_some,
    release_push,
    settle_push,
)
from jetrl_compile.integrations.vllm.sync_digests import (
    digest_document,
    layout_document,
    read_layouts,
)
from jetrl_compile.integrations.vllm.workers import ask
from jetrl_compile.precision_graph import PrecisionGraph

CHUNK = 1 << 28  # bytes that are sent at a time, and one decoder layer at least
_LAYER = re.compile(r".*?\.\d+\.")


def push_to_ranks(llm: Any, weights: Mapping[str, Tensor]) -> int:
    """Push all weights into the ranks of an engine; return how many tensors.

    Args:
        llm: vLLM's LLM.
        weights: The trainer's parameters by Hugging Face's names.

    Raises:
        RefitError: As `refit_model`, on any rank; where one refuses to generate, all
            do, since the others would wait for it.
        ModelError: A rank failed otherwise; all refuse until a complete push.
    """
    facts = {name: (tuple(w.shape), w.dtype) for name, w in weights.items()}
    ask(llm, partial(_check, facts))
    ask(llm, begin_push)
    for chunk in chunks(weights, CHUNK):
        ask(llm, partial(_some, chunk))
    ask(llm, settle_push)
    ask(llm, release_push)
    return len(weights)


def chunks(
    weights: Mapping[str, Tensor], most: int = CHUNK
) -> Iterator[dict[str, Tensor]]:
    """Yield weights on the CPU, a decoder layer's together, in chunks.

    Args:
        weights: By name.
        most: Bytes of a chunk, unless a group alone has more.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    for name, weight in weights.items():
        found = _LAYER.match(name)
        groups.setdefault(found.group() if found else name, {})[name] = weight
    chunk: dict[str, Tensor] = {}
    size = 0
    for group in groups.values():
        own = sum(weight.numel() * weight.element_size() for weight in group.values())
        if chunk and size + own > most:
            yield chunk
            chunk, size = {}, 0
        chunk |= {name: w.detach().to("cpu") for name, w in group.items()}
        size += own
    yield chunk


def _check(
    facts: Mapping[str, tuple[tuple[int, ...], torch.dtype]], model: nn.Module
) -> None:
    shapes = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, (shape, dtype) in facts.items()
    }
    check_push(plan_of(model), shapes)


def _some(chunk: Mapping[str, Tensor], model: nn.Module) -> None:
    push_some(model, chunk)


def check_ranks(
    llm: Any, live: PrecisionGraph, masters: Mapping[str, Tensor]
) -> tuple[LevelResult, list[Difference]]:
    """Compare what all ranks store with the trainer's weights, by digests.

    Args:
        llm: vLLM's LLM.
        live: Its graph, which says how the layers are quantized.
        masters: The trainer's parameters by Hugging Face's names, BF16 or FP32.

    Returns:
        The result of level 3, and a difference for each tensor that is not what the
        trainer's weights give.
    """
    shards, unchecked = read_layouts(ask(llm, layout_document))
    layers = {
        op.module: StoredLayer(live.operands[op.name]["w"].flow, False)
        for op in live.gemms("fprop")
        if live.is_fp8(op)
    }
    made = Digests()
    for name, master in masters.items():
        path, _, leaf = name.rpartition(".")
        tensors = {name: master.detach()}
        if path in layers and leaf == "weight":
            codes, scales = layers[path].quantize(master.detach())
            tensors = {name: codes, f"{path}.{layers[path].scale_leaf}": scales}
        for each, tensor in tensors.items():
            for shard, dtype in shards.get(each, ()):
                made.add(shard.key, shard.of(tensor).to(dtype))
    wanted = made.result()
    stored = merge_ranks(map(json.loads, ask(llm, digest_document)), wanted)
    result, differences = compare_digests(stored, wanted, layers)
    if unchecked:
        counts = {**result.counts, "fused experts, not compared": len(unchecked)}
        result = replace(result, counts=counts)
    return result, differences
