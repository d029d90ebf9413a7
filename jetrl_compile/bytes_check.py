"""Level 3: does the rollout model store the bytes that the trainer would compute?"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from jetrl_compile.containment import Difference, LevelResult
from jetrl_compile.errors import ModelError
from jetrl_compile.mismatch import TensorGap
from jetrl_compile.rollout import QuantizedLinear


@dataclass(frozen=True, slots=True)
class Pair:
    """A stored tensor and what the trainer would store there.

    Attributes:
        name: What messages call it.
        operator: The operator whose operand it is.
        operand: Of that operator; "" for another parameter.
        stored: What is stored.
        wanted: What the trainer's weights give.
    """

    name: str
    operator: str
    operand: str
    stored: Tensor
    wanted: Tensor


def check_bytes(
    trainer: nn.Module, rollout: nn.Module
) -> tuple[LevelResult, list[Difference]]:
    """Compare every weight of a rollout model with the trainer's, bit for bit.

    Args:
        trainer: The trainer's model, BF16 or FP32 masters.
        rollout: From `make_rollout_model`, perhaps refitted.

    Returns:
        The result of level 3, and a difference for each tensor whose codes, scales,
        values, dtype, shape or memory order are not those that the trainer's weights
        give: rounded to BF16, then quantized by the layer's flow.

    Raises:
        ModelError: The trainer lacks a parameter that the rollout model stores.
    """
    result, differences, _ = compare_bytes(trainer, rollout)
    return result, differences


def compare_bytes(
    trainer: nn.Module, rollout: nn.Module
) -> tuple[LevelResult, list[Difference], tuple[TensorGap, ...]]:
    """Compare as `check_bytes` does, and say of every tensor how much of it differs.

    Args:
        trainer: The trainer's model, BF16 or FP32 masters.
        rollout: From `make_rollout_model`, perhaps refitted.

    Raises:
        ModelError: The trainer lacks a parameter that the rollout model stores.
    """
    differences, gaps = [], []
    for pair in _pairs(trainer, rollout):
        found, differ = compare_pair(pair)
        if found is not None:
            differences.append(found)
        gaps.append(TensorGap(pair.name, differ, pair.stored.numel()))
    status = "failed" if differences else "passed"
    result = LevelResult(3, status, counts={"tensors": len(gaps)})
    return result, differences, tuple(gaps)


def _pairs(trainer: nn.Module, rollout: nn.Module) -> Iterable[Pair]:
    masters = dict(trainer.named_parameters(remove_duplicate=False))
    for path, layer in rollout.named_modules():
        if not isinstance(layer, QuantizedLinear):
            continue
        master = _master(masters, f"{path}.weight")
        source = master.t() if layer.transposed else master
        codes, scales = layer.quantize(source.to(layer.weight.device))
        gemm = f"{path}:fprop"
        yield Pair(f"{path}.weight", gemm, "w", layer.weight, codes)
        yield Pair(f"{path}.{layer.scale_name}", gemm, "w", layer.scales, scales)
    for name, stored in rollout.named_parameters():
        wanted = _master(masters, name).to(stored.device, stored.dtype)
        yield Pair(name, name, "", stored.detach(), wanted)


def _master(masters: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in masters:
        raise ModelError(
            f"the trainer has no parameter {name}, which the rollout model stores; "
            "audit the model that the rollout model was made from"
        )
    return masters[name].detach()


def compare_pair(pair: Pair, where: str = "rollout") -> tuple[Difference | None, int]:
    """Return the difference of a pair, and how many of its elements differ.

    Args:
        pair: The pair.
        where: What holds the stored tensor, as messages name it.
    """
    stored, wanted = pair.stored, pair.wanted
    facts = [
        ("dtype", str(stored.dtype), str(wanted.dtype)),
        ("shape", str(tuple(stored.shape)), str(tuple(wanted.shape))),
    ]
    if stored.shape == wanted.shape:
        facts.append(("memory order", str(stored.stride()), str(wanted.stride())))
    for attribute, found, needed in facts:
        if found != needed:
            what = f"{attribute} is {found} in {where}, {needed} in training"
            return _difference(pair, attribute, found, needed, what), stored.numel()
    differ = _bits(stored) != _bits(wanted)
    count = int(differ.sum())
    if not count:
        return None, 0
    first = tuple(int(i) for i in differ.nonzero()[0])
    values = (tensor[first].float().item() for tensor in (stored, wanted))
    found, needed = (f"{value:g}" for value in values)
    what = (
        f"{count} of {differ.numel()} elements ({count / differ.numel():.2%}) differ, "
        f"first {list(first)}: {found} in {where}, {needed} in training"
    )
    return _difference(pair, "bytes", None, None, what), count


def _difference(
    pair: Pair, attribute: str, found: str | None, needed: str | None, what: str
) -> Difference:
    message = f"{pair.name}: {what}"
    return Difference(
        3, pair.operator, attribute, found, needed, message, operand=pair.operand
    )


def _bits(tensor: Tensor) -> Tensor:
    """The tensor as integers of its width, so that NaN and -0 compare by bits."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(width[tensor.element_size()])
