"""What a rank of a live model stores of each tensor of a checkpoint."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from jetrl_compile.errors import ModelError
from jetrl_compile.formats import blocks
from jetrl_compile.granularity import Granularity
from jetrl_compile.integrations.vllm.layout import (
    LayerLayout,
    Part,
    kind_of,
    make_layout,
)
from jetrl_compile.integrations.vllm.live_model import (
    parts_of,
    plain_parameters,
    vocabulary_rows,
)
from jetrl_compile.integrations.vllm.storage import LAYOUT, scale_name, scales_of

_EXPERTS = "w13_weight"  # of vLLM's fused experts, whose names no checkpoint has
_ANY = replace(blocks("K"), granularity=Granularity(1, 1))  # shards begin anywhere


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, or a rank's shard of it.

    Attributes:
        name: By Hugging Face's names; scales as "<module path>.weight_scale_inv".
        tensor: What is stored: a view, to be written in place.
        source: The range of the checkpoint's tensor in each dimension that is sharded.
        shape: Of the checkpoint's tensor.
        part: The FP8 layer, of codes and scales; None of what stays as it is.
    """

    name: str
    tensor: Tensor
    source: tuple[slice, ...]
    shape: tuple[int, ...]
    part: Part | None = None

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """First and last but one of each dimension; empty if it is the whole tensor."""
        found = tuple((one.start, one.stop) for one in self.source)
        sizes = self.shape[: len(found)]
        return () if found == tuple((0, size) for size in sizes) else found


def stored_tensors(model: nn.Module) -> Iterator[StoredTensor]:
    """Yield all that a loaded model stores, but fused experts.

    Args:
        model: A model that was loaded with `quantization="jetrl"`.
    """
    for layer, part in parts_of(model).values():
        yield from _fp8(layer, part)
    modules = dict(model.named_modules())
    packed: Any = getattr(model, "packed_modules_mapping", {})
    for name, parameter in plain_parameters(model).items():
        path, _, leaf = name.rpartition(".")
        module: Any = modules.get(path)
        if hasattr(module, _EXPERTS):
            continue
        data = parameter.data
        layout = _layout(module, path, packed)
        if layout is not None:
            for part in layout.parts:
                own = data[part.low : part.low + part.rows]
                size = data.dim()
                whole, source = part.shape[:size], part.source[:size]
                yield StoredTensor(f"{part.name}.{leaf}", own, source, whole)
            continue
        rows = vocabulary_rows(module)
        shape = tuple(data.shape)
        if rows is not None:  # the engine pads a vocabulary
            shape = (int(module.org_vocab_size), *shape[1:])
            data = data[: rows.stop - rows.start]
        yield StoredTensor(name, data, () if rows is None else (rows,), shape)


def expert_paths(model: nn.Module) -> tuple[str, ...]:
    """Return the module paths of fused experts, which are stored and not known here."""
    return tuple(
        name.partition(".experts")[0]
        for name, module in model.named_modules()
        if hasattr(module, _EXPERTS)
    )


def _layout(module: Any, path: str, packed: Any) -> LayerLayout | None:
    """Where the parts of a linear layer lie; None for other modules."""
    known: LayerLayout | None = getattr(module, LAYOUT, None)
    if known is not None:
        return known
    try:
        kind_of(module)
    except ModelError:
        return None
    rows, cols = module.weight.shape
    sizes = getattr(module, "output_partition_sizes", None) or [rows]
    return make_layout(module, path, sizes, cols, packed, _ANY)


def _fp8(layer: nn.Module, part: Part) -> Iterator[StoredTensor]:
    layout: LayerLayout = getattr(layer, LAYOUT)
    weight = layer.weight
    assert isinstance(weight, Tensor)
    codes = weight.data[part.low : part.low + part.rows]
    yield StoredTensor(f"{part.name}.weight", codes, part.source, part.shape, part)
    granularity = layout.flow.granularity
    assert granularity is not None
    sizes = (granularity.rows, granularity.cols)
    source = tuple(map(_blocks, part.source, sizes))
    high = part.scale_low + part.scale_rows
    scales = scales_of(layer).data[part.scale_low : high]
    name = f"{part.name}.{scale_name(layout.flow)}"
    shape = granularity.scale_shape(part.shape)
    yield StoredTensor(name, scales, source, shape, part)


def _blocks(elements: slice, size: int) -> slice:
    """The blocks that elements lie in; shards begin at blocks."""
    return slice(elements.start // size, -(-elements.stop // size))
