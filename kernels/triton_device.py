"""The GPU that a kernel runs on."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

_ALREADY = nullcontext()


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return the context in which a kernel that reads a tensor is launched."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return _ALREADY
    return torch.cuda.device(tensor.device)


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return a GPU's compute capability."""
    return torch.cuda.get_device_capability(device)


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has; 1 for a CPU."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
