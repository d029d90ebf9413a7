"""How much memory a step takes."""

from collections.abc import Callable

import torch

GIB = 2**30


def held_bytes(device: torch.device) -> int:
    """Return the bytes of live tensors on a GPU; 0 on a CPU, where torch has no count.

    Cycles of objects may hold tensors; collect garbage first.
    """
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """Return the most bytes of live tensors during work, all of the process's.

    Args:
        work: What runs, once.
        device: None is returned for a CPU.
    """
    if device.type != "cuda":
        work()
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)
