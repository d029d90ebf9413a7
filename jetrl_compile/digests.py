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
_MASK = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """How the rollout stores the weight of a linear layer.

    Attributes:
        flow: How it is quantized.
        transposed: Whether the trainer keeps it as (K, N).
    """

    flow: Flow
    transposed: bool

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes (N, K) and FP32 scales of a BF16 weight."""
        flow = self.flow
        assert flow.granularity is not None
        codes, scales = ops.quantize(
            weight.t() if self.transposed else weight,
            flow.granularity.rows,
            flow.granularity.cols,
            False,
            flow.scale_format,
            flow.amax_floor,
            None,
        )
        return codes, scales

    @property
    def scale_leaf(self) -> str:
        """What the scales of the layer are called."""
        tail = "_ue8m0" if self.flow.scale_format == "ue8m0" else ""
        return f"weight_scale_inv{tail}"


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a tensor.

    Attributes:
        name: The tensor's.
        bounds: First and last but one of each dimension that is cut; none if it is all
            of the tensor.
    """

    name: str
    bounds: tuple[tuple[int, int], ...] = ()

    @property
    def key(self) -> str:
        """The name by which its digest is found, such as "lm_head.weight[0:128]"."""
        if not self.bounds:
            return self.name
        return f"{self.name}[{','.join(f'{a}:{b}' for a, b in self.bounds)}]"

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of the whole tensor."""
        return tensor[tuple(slice(a, b) for a, b in self.bounds)]


class Digests:
    """Digests that are being made; the device is waited for once, at the end."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[str, Tensor]] = {}

    def add(self, key: str, tensor: Tensor) -> None:
        """Note the bytes that a tensor has now.

        Args:
            key: The name of its digest.
            tensor: Any shape and dtype, on any device.
        """
        label = f"{short_name(tensor.dtype)} {tuple(tensor.shape)}"
        self._made[key] = (label, word_sum(tensor))

    def result(self) -> dict[str, str]:
        """Return all digests by key: dtype, shape and 64 bits each."""
        by_device: dict[torch.device, list[str]] = {}
        for key, (_, total) in self._made.items():
            by_device.setdefault(total.device, []).append(key)
        bits: dict[str, int] = {}
        for keys in by_device.values():
            values = torch.stack([self._made[key][1] for key in keys]).tolist()
            bits |= dict(zip(keys, values, strict=True))
        return {
            key: f"{label} {bits[key] & _MASK:016x}"
            for key, (label, _) in self._made.items()
        }


def word_sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's mixed 8-byte words in row-major order, int64 ()."""
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
    return total


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return what each tensor is and 64 bits of its bytes, by the same keys."""
    made = Digests()
    for key, tensor in tensors.items():
        made.add(key, tensor)
    return made.result()


def digest(tensor: Tensor) -> str:
    """Return what a tensor is and 64 bits of its bytes, in row-major order.

    Args:
        tensor: Any shape and dtype, on any device.
    """
    return digests({"": tensor})[""]


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


def stored_digests(rollout: nn.Module) -> dict[str, str]:
    """Return the digest of every weight that a rollout model stores.

    Args:
        rollout: From `make_rollout_model`.
    """
    made = Digests()
    for path, layer in rollout.named_modules():
        if isinstance(layer, QuantizedLinear):
            made.add(f"{path}.weight", layer.weight)
            made.add(f"{path}.{layer.scale_name}", layer.scales)
    for name, parameter in rollout.named_parameters(remove_duplicate=False):
        made.add(name, parameter)
    return made.result()


def merge_ranks(
    ranks: Iterable[Mapping[str, str]], wanted: Mapping[str, str]
) -> dict[str, str]:
    """Return the digests of all ranks of a rollout as one.

    Where ranks store the same tensor, a wrong one is kept.

    Args:
        ranks: The digests of each rank.
        wanted: Of the trainer.
    """
    stored: dict[str, str] = {}
    for rank in ranks:
        for key, found in rank.items():
            if stored.get(key) in (None, wanted.get(key)):
                stored[key] = found
    return stored


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
