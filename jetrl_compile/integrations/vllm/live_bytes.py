"""Level 3 on a live vLLM model: the bytes that the trainer's weights give."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from jetrl_compile.containment import Difference, LevelResult
from jetrl_compile.errors import ModelError
from jetrl_compile.integrations.vllm.live_model import (
    parts_of,
    plain_parameters,
    vocabulary_rows,
)
from jetrl_compile.integrations.vllm.storage import (
    LAYOUT,
    quantize_part,
    quantized_layers,
    scale_name,
    scales_of,
)

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class _Pair:
    """A stored tensor, and what the trainer's weights give."""

    name: str
    operator: str
    operand: str
    stored: Tensor
    wanted: Tensor


def check_live_bytes(
    model: nn.Module, masters: Mapping[str, Tensor]
) -> tuple[LevelResult, list[Difference]]:
    """Compare every weight of a loaded model with the trainer's, bit for bit.

    Args:
        model: A model that was loaded with `quantization="jetrl"`.
        masters: The trainer's parameters by Hugging Face's names, BF16 or FP32.

    Returns:
        The result of level 3, and a difference for each tensor that is not what the
        trainer's weights give: rounded to BF16, then quantized by the layer's flow.

    Raises:
        ModelError: The trainer lacks a parameter that the engine stores.
    """
    differences = []
    count = 0
    for pair in _pairs(model, masters):
        count += 1
        found = _compare(pair)
        if found is not None:
            differences.append(found)
    status = "failed" if differences else "passed"
    return LevelResult(3, status, counts={"tensors": count}), differences


def _pairs(model: nn.Module, masters: Mapping[str, Tensor]) -> Iterable[_Pair]:
    for name, (layer, part) in parts_of(model).items():
        layout = getattr(layer, LAYOUT)
        weight = layer.weight
        assert isinstance(weight, Tensor)
        shard = _master(masters, f"{name}.weight")[part.source].to(weight.device)
        codes, scales = quantize_part(shard, layout.flow)
        gemm = f"{name}:fprop"
        stored = weight.detach()[part.low : part.low + part.rows]
        yield _Pair(f"{name}.weight", gemm, "w", stored, codes)
        high = part.scale_low + part.scale_rows
        own = scales_of(layer).detach()[part.scale_low : high]
        yield _Pair(f"{name}.{scale_name(layout.flow)}", gemm, "w", own, scales)
    layers = quantized_layers(model)
    modules = dict(model.named_modules())
    for name, parameter in plain_parameters(model).items():
        path, _, leaf = name.rpartition(".")
        if path in layers:
            for part in getattr(layers[path], LAYOUT).parts:
                stored = parameter.detach()[part.low : part.low + part.rows]
                yield _plain(f"{part.name}.{leaf}", stored, masters, part.source[0])
        else:
            rows = vocabulary_rows(modules.get(path)) or slice(None)
            yield _plain(name, parameter.detach(), masters, rows)


def _plain(
    name: str, stored: Tensor, masters: Mapping[str, Tensor], rows: slice
) -> _Pair:
    wanted = _master(masters, name)[rows].to(stored.device, stored.dtype)
    if stored.dim() == 2:  # the engine pads a vocabulary
        stored = stored[: wanted.shape[0]]
    return _Pair(name, name, "", stored, wanted)


def _master(masters: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in masters:
        raise ModelError(
            f"the trainer has no parameter {name}, which the engine stores; check the "
            "model whose weights were pushed"
        )
    return masters[name].detach()


def _compare(pair: _Pair) -> Difference | None:
    stored, wanted = pair.stored, pair.wanted
    facts = [
        ("dtype", str(stored.dtype), str(wanted.dtype)),
        ("shape", str(tuple(stored.shape)), str(tuple(wanted.shape))),
        ("memory order", str(stored.stride()), str(wanted.stride())),
    ]
    for attribute, found, needed in facts:
        if found != needed:
            what = f"{attribute} is {found} in the engine, {needed} in training"
            return _difference(pair, attribute, found, needed, what)
    differ = _bits(stored) != _bits(wanted)
    count = int(differ.sum())
    if not count:
        return None
    first = tuple(int(i) for i in differ.nonzero()[0])
    found, needed = (f"{t[first].float().item():g}" for t in (stored, wanted))
    what = (
        f"{count} of {differ.numel()} elements ({count / differ.numel():.2%}) differ, "
        f"first {list(first)}: {found} in the engine, {needed} in training"
    )
    return _difference(pair, "bytes", None, None, what)


def _difference(
    pair: _Pair, attribute: str, found: str | None, needed: str | None, what: str
) -> Difference:
    message = f"{pair.name}: {what}"
    return Difference(
        3, pair.operator, attribute, found, needed, message, operand=pair.operand
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_BITS[tensor.element_size()])
