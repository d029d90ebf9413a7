"""The GPU that a kernel runs on, and whether kernels on it overlap.

On Hopper, a kernel that is launched for it (programmatic dependent launch) gets ready
while the last programs of the kernel before it still run: kernels of a decoded layer
that take 95 us in sum are over after 87 (docs/log.md, 2026-11-30). It waits by itself
before it reads anything. `JETRL_OVERLAP=0` turns that off.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from jetrl_compile.errors import ProviderError

OVERLAP_VARIABLE = "JETRL_OVERLAP"
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


def overlap_wanted() -> bool:
    """Whether kernels are to overlap where they can.

    Raises:
        ProviderError: The variable is neither 0 nor 1.
    """
    wanted = os.environ.get(OVERLAP_VARIABLE) or "1"
    if wanted not in ("0", "1"):
        raise ProviderError(f"{OVERLAP_VARIABLE} is {wanted!r}; set it to 0 or 1")
    return wanted == "1"


@cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels on a device are launched before the one before them is over."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return overlap_wanted() and capability(device) >= (9, 0)
