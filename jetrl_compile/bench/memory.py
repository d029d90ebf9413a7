"""How much memory a step takes."""

from collections.abc import Callable

import torch

GIB = 2**30


def held_bytes(device: torch.device) -> int:
    """Return the bytes of live tensors on a GPU; 0 on a CPU, where torch has no count.

    Cycles of objects may hold tensors; collect garbage first.
    """
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def driver_allocations(device: torch.device) -> int:
    """Return how often the allocator asked the driver for memory, or gave some back.

    Each time stalls the GPU; 0 on a CPU.
    """
    if device.type != "cuda":
        return 0
    stats = torch.cuda.memory_stats(device)
    names = ("num_device_alloc", "num_device_free", "num_alloc_retries")
    return sum(int(stats.get(name, 0)) for name in names)


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
