"""The exact audit: a rollout model that decodes token by token, against the trainer.

Log-probs are compared bit by bit. For the first token, in the order of positions, whose
log-prob is not the trainer's, the operators' recorded values tell where bits part.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_compile.pipeline import CompileReport
from jetrl_compile.precision_graph import PrecisionGraph
from jetrl_compile.recorder import Recorder


@dataclass(frozen=True)
class Call:
    """One call of a rollout model.

    Attributes:
        start: The first token that it was given.
        end: Behind the last one.
        values: What its operators computed, by name.
    """

    start: int
    end: int
    values: Mapping[str, Tensor]


@dataclass(frozen=True)
class Decoded:
    """What a rollout model computed, decoding.

    Attributes:
        logits: (B, L, V), of all calls.
        calls: In order.
    """

    logits: Tensor
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Parting:
    """Where the bits of a token's log-prob part.

    Attributes:
        row: Of the batch.
        token: Whose logits differ, counted from 0.
        operator: The first operator whose value for it differs; None where none of the
            recorded ones does.
    """

    row: int
    token: int
    operator: str | None


@torch.no_grad()
def decode(
    rollout: nn.Module, inputs: Mapping[str, Tensor], options: Mapping[str, Any]
) -> Decoded:
    """Run a rollout model with a cache: half of the tokens, then one a call.

    Args:
        rollout: From `make_rollout_model`.
        inputs: `input_ids`, (B, L), and perhaps `attention_mask` and `position_ids`.
        options: Of the backend.
    """
    from transformers import DynamicCache

    recorder = Recorder()
    reports: list[CompileReport] = []
    own = {"recorder": recorder, "report": reports.append}
    given = {**options, **own, "lowering": "aot", "fuse": False, "phase": "rollout"}
    called: Any = torch.compile(
        rollout, backend="jetrl", fullgraph=True, dynamic=True, options=given
    )
    model: Any = rollout
    parameters = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    kept = {name: DynamicCache(config=model.config), "use_cache": True}
    length = inputs["input_ids"].shape[1]
    first = max(1, length // 2)
    ends = [first, *range(first + 1, length + 1)]
    calls, logits, start = [], [], 0
    config: Any = torch._dynamo.config
    torch._dynamo.reset()
    try:
        with config.patch(specialize_float=True, recompile_limit=64):
            for end in ends:
                recorder.clear()
                cut = {k: v[:, start:end] for k, v in inputs.items()}
                if "attention_mask" in inputs:
                    cut["attention_mask"] = inputs["attention_mask"][:, :end]
                logits.append(called(**cut, **kept).logits)
                calls.append(Call(start, end, dict(recorder.values)))
                start = end
    finally:
        torch._dynamo.reset()
    return Decoded(torch.cat(logits, 1), tuple(calls))


def parting(
    decoded: Decoded,
    graph: PrecisionGraph,
    train: Mapping[str, Tensor],
    differs: Tensor,
) -> Parting | None:
    """Return where the bits of the first token that differs part, or None.

    Args:
        decoded: Of the rollout model.
        graph: The trainer's graph; it says in which order operators run.
        train: The trainer's values by operator.
        differs: (B, L - 1), bool: of which next tokens the log-probs differ.
    """
    places = differs.t().nonzero()
    if not len(places):
        return None
    token, row = (int(number) for number in places[0])
    call = next(c for c in decoded.calls if c.start <= token < c.end)
    sizes = tuple(decoded.logits.shape[:2])
    own = (sizes[0], call.end - call.start)
    for op in graph.operators:
        if op.phase != "forward" or op.name not in train or op.name not in call.values:
            continue
        left = _of_token(train[op.name], sizes, row, token, op.kind)
        value = call.values[op.name]
        right = _of_token(value, own, row, token - call.start, op.kind)
        if left is None or right is None:
            continue
        alike = (left.shape, left.dtype) == (right.shape, right.dtype)
        if not alike or not torch.equal(left, right):
            return Parting(row, token, op.name)
    return Parting(row, token, None)


def _of_token(
    value: Tensor, sizes: Sequence[int], row: int, token: int, kind: str
) -> Tensor | None:
    """The part of a value that belongs to one token of a batch, None if unknown.

    Args:
        value: (B L, ...), (B or 1, L, ...), or of rotations and some attentions
            (B, heads, L, ...).
        sizes: B and L.
        row: Of the batch.
        token: In the row.
        kind: Of the operator.
    """
    batch, length = sizes
    shape = tuple(value.shape)
    by_head = kind == "rope" or (kind == "attention" and shape[1] != length)
    if by_head and len(shape) == 4 and shape[0] == batch:
        return value[row, :, token] if shape[2] == length else None
    if len(shape) > 2 and shape[0] in (1, batch) and shape[1] == length:
        return value[row if shape[0] == batch else 0, token]
    if len(shape) >= 2 and shape[0] == batch * length:
        return value[row * length + token]
    return None
