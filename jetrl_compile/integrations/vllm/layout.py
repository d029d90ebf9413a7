"""Where the parts of an engine's linear layer lie: in its weight, in the checkpoint.

A fused layer (qkv_proj, gate_up_proj) holds several layers of Hugging Face's model
below each other; with tensor parallelism each of them is a shard. Blocks are those of
the whole checkpoint weight, so a shard must begin and end at one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jetrl_compile.errors import ModelError
from jetrl_compile.formats import Flow
from jetrl_compile.gemm_sites import FUSED_LAYERS

QKV_KEYS = ("q", "k", "v")


@dataclass(frozen=True, slots=True)
class Part:
    """One Hugging Face layer, or this rank's shard of it.

    Attributes:
        name: Its module path, such as "model.layers.0.self_attn.q_proj".
        key: What vLLM's weight loaders call it: "q", 0, or None for a whole layer.
        low: The first row of it in the engine's weight.
        rows: Its rows.
        source: Rows and columns of the checkpoint weight that it is.
        shape: Of the checkpoint weight, (N, K).
        scale_low: The first row of its scales.
        scale_rows: Rows of its scales.
    """

    name: str
    key: str | int | None
    low: int
    rows: int
    source: tuple[slice, slice]
    shape: tuple[int, int]
    scale_low: int
    scale_rows: int


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """The parts of one linear layer of the engine.

    Attributes:
        name: Its module path in the engine ("model.layers.0.self_attn.qkv_proj").
        parts: Its parts, in order.
        cols: Columns of its weight.
        flow: How its weight is quantized.
    """

    name: str
    parts: tuple[Part, ...]
    cols: int
    flow: Flow

    @property
    def rows(self) -> int:
        """Rows of the weight."""
        return self.parts[-1].low + self.parts[-1].rows

    @property
    def scale_shape(self) -> tuple[int, int]:
        """The shape of the scales: each part has blocks of its own."""
        assert self.flow.granularity is not None
        last = self.parts[-1]
        blocks = self.flow.granularity.scale_shape((last.rows, self.cols))
        return (last.scale_low + last.scale_rows, int(blocks[1]))

    @property
    def is_one_matrix(self) -> bool:
        """Whether its blocks are those of the whole weight: no seam cuts one."""
        assert self.flow.granularity is not None
        rows = self.flow.granularity.rows
        return all(part.rows % rows == 0 for part in self.parts[:-1])

    def part(self, key: str | int | None) -> Part:
        """Return the part that vLLM's weight loaders call so.

        Raises:
            ModelError: There is none.
        """
        for part in self.parts:
            if part.key == key:
                return part
        keys = ", ".join(str(part.key) for part in self.parts)
        raise ModelError(f"{self.name} has no part {key!r}; its parts are {keys}")


def kind_of(layer: Any) -> str:
    """Return how vLLM shards a linear layer: "row", "qkv", "column" or "replicated".

    Raises:
        ModelError: It is none of vLLM's linear layers.
    """
    names = {base.__name__ for base in type(layer).__mro__}
    for kind, name in (
        ("row", "RowParallelLinear"),
        ("qkv", "QKVParallelLinear"),
        ("column", "ColumnParallelLinear"),
        ("replicated", "ReplicatedLinear"),
    ):
        if name in names:
            return kind
    raise ModelError(
        f"{type(layer).__name__} is none of vLLM's linear layers; exclude it from the "
        "recipe"
    )


def part_names(
    prefix: str, count: int, packed: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return Hugging Face's module paths of a layer's parts.

    Args:
        prefix: The layer's module path in the engine.
        count: The number of its parts.
        packed: The model's `packed_modules_mapping`.

    Raises:
        ModelError: The layer has several parts, and nothing says what they are.
    """
    base, dot, leaf = prefix.rpartition(".")
    if count == 1:
        return [prefix]
    names = packed.get(leaf) or FUSED_LAYERS.get(leaf, ())
    if len(names) != count:
        raise ModelError(
            f"{prefix} holds {count} layers, and the model names {len(names)} in "
            "packed_modules_mapping; exclude it from the recipe"
        )
    return [f"{base}{dot}{name}" for name in names]


def make_layout(
    layer: Any,
    prefix: str,
    sizes: Sequence[int],
    cols: int,
    packed: Mapping[str, Sequence[str]],
    flow: Flow,
) -> LayerLayout:
    """Return the layout of a linear layer of vLLM.

    Args:
        layer: The layer; `tp_rank` and `tp_size` say which shard it is.
        prefix: Its module path.
        sizes: Rows of its parts on this rank.
        cols: Columns of its weight on this rank.
        packed: The model's `packed_modules_mapping`.
        flow: How its weight is quantized.

    Raises:
        ModelError: A shard does not begin and end at a block.
    """
    kind = kind_of(layer)
    ranks = 1 if kind == "replicated" else int(layer.tp_size)
    rank = 0 if kind == "replicated" else int(layer.tp_rank)
    names = part_names(prefix, len(sizes), packed)
    assert flow.granularity is not None
    block = (flow.granularity.rows, flow.granularity.cols)
    parts = []
    low = scale_low = 0
    for index, (name, rows) in enumerate(zip(names, sizes, strict=True)):
        copies = int(layer.num_kv_head_replicas) if kind == "qkv" and index else 1
        along, across = (1, ranks) if kind == "row" else (ranks // copies, 1)
        at = (rank // copies if kind != "row" else 0, rank if kind == "row" else 0)
        key: str | int | None = index if len(sizes) > 1 else None
        if kind == "qkv":
            key = QKV_KEYS[index]
        if along > 1 and rows % block[0]:
            raise ModelError(_straddles(name, "rows", rows, block[0], ranks))
        if across > 1 and cols % block[1]:
            raise ModelError(_straddles(name, "columns", cols, block[1], ranks))
        scale_rows = -(-rows // block[0])
        parts.append(
            Part(
                name,
                key,
                low,
                rows,
                (_range(at[0], rows), _range(at[1], cols)),
                (rows * along, cols * across),
                scale_low,
                scale_rows,
            )
        )
        low += rows
        scale_low += scale_rows
    return LayerLayout(prefix, tuple(parts), cols, flow)


def _range(index: int, size: int) -> slice:
    return slice(index * size, (index + 1) * size)


def _straddles(name: str, what: str, size: int, block: int, ranks: int) -> str:
    return (
        f"with tensor parallel size {ranks} a shard of {name} has {size} {what}, no "
        f"multiple of {block}: a block would lie on two GPUs, and its scale would not "
        "be the trainer's; use fewer GPUs, or exclude the layer from the recipe"
    )
