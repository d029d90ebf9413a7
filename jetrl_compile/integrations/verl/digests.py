"""Level 3 by digests: 64 bits say of a tensor what its bytes are, wherever it lies.

Two sides compare what they store without sending it. A digest is a sum over 8-byte
words, each mixed with its position, so it is the same on every device.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from jetrl_compile.containment import Difference, LevelResult
from jetrl_compile.formats import Flow, short_name
from jetrl_compile.kernels import ops
from jetrl_compile.precision_graph import PrecisionGraph
from jetrl_compile.rollout import QuantizedLinear

# Odd constants below 2^63: the finalizer of MurmurHash3 and the golden ratio.
_STEP, _FIRST, _SECOND = 0x1E3779B97F4A7C15, 0x7F51AFD7ED558CCD, 0x44CEB9FE1A85EC53
_CHUNK = 1 << 24  # words, so that what is computed in between stays small


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """How the rollout stores the weight of a linear layer.

    Attributes:
        flow: How it is quantized.
        transposed: Whether the trainer keeps it as (K, N).
    """

    flow: Flow
    transposed: bool


def digest(tensor: Tensor) -> str:
    """Return what a tensor is and 64 bits of its bytes, in row-major order.

    Args:
        tensor: Any shape and dtype, on any device.
    """
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    if data.numel() % 8 or data.storage_offset() % 8:
        whole = data.new_zeros(-(-data.numel() // 8) * 8)
        whole[: data.numel()] = data
        data = whole
    words = data.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK]
        place = torch.arange(start, start + part.numel(), device=data.device)
        mixed = (part + (place + 1) * _STEP) * _FIRST
        mixed = (mixed ^ (mixed >> 33)) * _SECOND
        total += (mixed ^ (mixed >> 29)).sum()
    bits = int(total) & 0xFFFF_FFFF_FFFF_FFFF
    return f"{short_name(tensor.dtype)} {tuple(tensor.shape)} {bits:016x}"


def stored_layers(graph: PrecisionGraph, model: nn.Module) -> dict[str, StoredLayer]:
    """Return the linear layers that a rollout model stores in FP8, by path.

    Args:
        graph: Of the model, traced for the rollout.
        model: The trainer's model.
    """
    found = {}
    for op in graph.gemms("fprop"):
        flow = graph.operands[op.name]["w"].flow
        if flow.is_quantized:
            is_linear = isinstance(model.get_submodule(op.module), nn.Linear)
            found[op.module] = StoredLayer(flow, not is_linear)
    return found


def wanted_digests(
    name: str, weight: Tensor, layers: Mapping[str, StoredLayer]
) -> dict[str, str]:
    """Return the digests of what a rollout must store of a trainer's parameter.

    Args:
        name: The parameter's name.
        weight: BF16 or FP32, which is rounded to BF16 first.
        layers: From `stored_layers`.
    """
    source = weight.detach().to(torch.bfloat16)
    path, _, leaf = name.rpartition(".")
    layer = layers.get(path)
    if layer is None or leaf != "weight":
        return {name: digest(source)}
    flow = layer.flow
    assert flow.granularity is not None
    codes, scales = ops.quantize(
        source.t() if layer.transposed else source,
        flow.granularity.rows,
        flow.granularity.cols,
        False,
        flow.scale_format,
        flow.amax_floor,
        None,
    )
    tail = "_ue8m0" if flow.scale_format == "ue8m0" else ""
    scale_name = f"{path}.weight_scale_inv{tail}"
    return {name: digest(codes), scale_name: digest(scales)}


def stored_digests(rollout: nn.Module) -> dict[str, str]:
    """Return the digest of every weight that a rollout model stores.

    Args:
        rollout: From `make_rollout_model`.
    """
    found = {}
    for path, layer in rollout.named_modules():
        if isinstance(layer, QuantizedLinear):
            found[f"{path}.weight"] = digest(layer.weight)
            found[f"{path}.{layer.scale_name}"] = digest(layer.scales)
    for name, parameter in rollout.named_parameters(remove_duplicate=False):
        found[name] = digest(parameter)
    return found


def compare_digests(
    stored: Mapping[str, str], wanted: Mapping[str, str], layers: Iterable[str]
) -> tuple[LevelResult, list[Difference]]:
    """Return level 3 of a rollout, and a difference for each tensor.

    Args:
        stored: Of the rollout.
        wanted: Of the trainer.
        layers: Paths of the layers that are stored in FP8.
    """
    fp8 = set(layers)
    differences = []
    for name in [*wanted, *(each for each in stored if each not in wanted)]:
        mine, theirs = stored.get(name), wanted.get(name)
        if mine == theirs:
            continue
        path = name.rpartition(".")[0]
        is_gemm = path in fp8
        differences.append(
            Difference(
                3,
                f"{path}:fprop" if is_gemm else name,
                "bytes",
                mine,
                theirs,
                f"{name}: bytes differ: {mine or 'nothing'} in rollout, "
                f"{theirs or 'nothing'} in training (dtype, shape, digest)",
                operand="w" if is_gemm else "",
            )
        )
    status = "failed" if differences else "passed"
    return LevelResult(3, status, counts={"tensors": len(wanted)}), differences
