"""Where the sequences of a padded or packed batch begin and end, for attention.

A batch of B rows is read as B L tokens one after the other. A sequence begins with each
row, with each change of the mask (padding is sequences of its own, whose results nobody
reads), and where a position does not follow on the one before it.
"""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from jetrl_compile.errors import ProviderError


@dataclass(frozen=True)
class Sequences:
    """The sequences of a batch.

    Attributes:
        starts_q: (N + 1,), int32: where each sequence's queries begin, and the end.
        starts_k: The same of its keys.
        longest_q: The most queries of a sequence.
        longest_k: The most keys of a sequence.
        are_rows: Whether each row is one sequence, with as many queries as keys.
    """

    starts_q: Tensor
    starts_k: Tensor
    longest_q: int
    longest_k: int
    are_rows: bool = False


# What the layers of a forward ask for again and again, and those of its backward, which
# runs in a thread of its own and gets other views of the tensors. Finding sequences
# waits for the GPU. The newest is last.
_MOST_KEPT = 8
_kept: OrderedDict[Hashable, tuple[list[Any], Sequences]] = OrderedDict()
_weak: Any = StorageWeakRef  # untyped
_lock = threading.Lock()


def find_sequences(
    rows: int,
    queries: int,
    keys: int,
    mask: Tensor | None,
    positions: Tensor | None,
    device: torch.device,
) -> Sequences:
    """Return the sequences of a batch; answers are kept while their tensors live.

    Writes that PyTorch does not count, into `.data` or through NumPy, are not seen.

    Args:
        rows: B.
        queries: L, queries a row.
        keys: S, keys a row; S > L: the queries are the last L, and tokens.
        mask: (B, S), bool: which keys are tokens; None: all.
        positions: (B, L), integer, read where S = L; None: a row is one sequence.
        device: Of the result.

    Raises:
        ProviderError: A CUDA graph is being captured, which would replay this answer.
    """
    find = _of_batch if queries == keys else _of_cache
    capturing = device.type == "cuda" and _is_capturing()
    if capturing and find is _of_batch:
        raise ProviderError(
            "exact attention cannot be captured in a CUDA graph: it finds the "
            "sequences of a batch on the CPU; run the model without CUDA graphs"
        )
    if capturing or any(t is not None and t.is_inference() for t in (mask, positions)):
        # Whether an inference tensor was written to is not known.
        return find(rows, queries, keys, mask, positions, device)
    # Another stream might read an answer before it is written, or after it is freed.
    size = (rows, queries, keys)
    key = (*size, device, _stream(device), _contents(mask), _contents(positions))
    with _lock:
        kept = _kept.get(key)
        if kept is not None and not any(one.expired() for one in kept[0]):
            _kept.move_to_end(key)
            return kept[1]
    found = find(rows, queries, keys, mask, positions, device)
    alive = [_weak(t.untyped_storage()) for t in (mask, positions) if t is not None]
    with _lock:
        _kept[key] = (alive, found)
        _kept.move_to_end(key)
        while len(_kept) > _MOST_KEPT:
            _kept.popitem(last=False)
    return found


def _is_capturing() -> bool:
    return bool(torch.cuda.is_current_stream_capturing())


def _stream(device: torch.device) -> int:
    """Return the current stream of a device."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.current_stream(device).cuda_stream)


def _contents(tensor: Tensor | None) -> Hashable:
    """Return what tells a tensor's numbers from others' while its storage lives."""
    if tensor is None:
        return None
    where = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor._version)
    return (*where, tensor.dtype, tensor.shape, tensor.stride())


def _of_batch(
    rows: int,
    queries: int,
    keys: int,
    mask: Tensor | None,
    positions: Tensor | None,
    device: torch.device,
) -> Sequences:
    begins = torch.zeros(rows, queries, dtype=torch.bool, device=device)
    begins[:, 0] = True
    if mask is not None:
        begins[:, 1:] |= mask[:, 1:] != mask[:, :-1]
    if positions is not None:
        positions = positions.expand(rows, queries)
        begins[:, 1:] |= positions[:, 1:] != positions[:, :-1] + 1
    (found,) = begins.flatten().nonzero(as_tuple=True)
    starts = torch.nn.functional.pad(found, (0, 1), value=rows * queries)
    longest = int(starts.diff().max())
    starts = starts.to(torch.int32)
    are_rows = len(starts) == rows + 1 and longest == queries
    return Sequences(starts, starts, longest, longest, are_rows)


def _of_cache(
    rows: int,
    queries: int,
    keys: int,
    mask: Tensor | None,
    positions: Tensor | None,
    device: torch.device,
) -> Sequences:
    """Two sequences a row: padding on the left, which has no queries, and the tokens.

    Padding elsewhere among the keys is not told from tokens.
    """
    ends = torch.arange(1, rows + 1, device=device)
    padding = torch.zeros(rows, dtype=torch.int64, device=device)
    if mask is not None:
        padding = mask.long().argmax(-1)
    first = (ends - 1) * queries
    starts_q = torch.stack((first, first), 1).flatten()
    starts_k = torch.stack(((ends - 1) * keys, (ends - 1) * keys + padding), 1)
    starts_q = torch.nn.functional.pad(starts_q, (0, 1), value=rows * queries)
    starts_k = torch.nn.functional.pad(starts_k.flatten(), (0, 1), value=rows * keys)
    return Sequences(starts_q.to(torch.int32), starts_k.to(torch.int32), queries, keys)
