"""Run steps under CUDA graphs."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetrl_compile.bench.steps import Steps

_CUDA: Any = torch.cuda  # typed differently from one torch to the next
_COMPILER: Any = torch.compiler
GRAPHS = ("none", "inductor", "step")


@dataclass(frozen=True)
class Captured:
    """Whole steps as CUDA graphs.

    Attributes:
        replay: By name of the step: runs its graph and returns the graph's result,
            which stays in the same memory.
        same_bits: By name: whether the result has the bits that it has without graph.
    """

    replay: dict[str, Callable[[], Tensor]]
    same_bits: dict[str, bool]


def capture(steps: Steps, forward_only: bool) -> Captured:
    """Capture each step as one CUDA graph; everything must be compiled already.

    All share one memory pool, so they must not run at the same time, and what one
    returned is gone when another has run.

    Args:
        steps: What to capture, on a GPU.
        forward_only: Whether the step with backward is left out.
    """
    replay: dict[str, Callable[[], Tensor]] = {}
    same_bits: dict[str, bool] = {}
    for name, work in steps.named(forward_only).items():
        wanted = work().clone()
        steps.drop()
        # A capture takes new memory and cannot free what the allocator keeps.
        gc.collect()
        _CUDA.synchronize()
        _CUDA.empty_cache()
        graph = _CUDA.CUDAGraph()
        with _CUDA.graph(graph, pool=_pool()):
            result = work()

        def run(graph: Any = graph, result: Tensor = result) -> Tensor:
            graph.replay()
            return result

        same_bits[name] = torch.equal(run(), wanted)
        replay[name] = run
        steps.drop()
    return Captured(replay, same_bits)


_POOLS: list[object] = []


def _pool() -> object:
    """The memory that all captured steps share."""
    if not _POOLS:
        _POOLS.append(_CUDA.graph_pool_handle())
    return _POOLS[0]


def marked(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return work that tells Inductor's CUDA graphs where a step begins.

    They may overwrite what the step before returned.
    """

    def run() -> Tensor:
        _COMPILER.cudagraph_mark_step_begin()
        return work()

    return run
