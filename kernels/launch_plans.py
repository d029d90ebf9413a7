"""What an operator does on a GPU, remembered, so that Python does it only once.

A decoder layer runs a dozen of the project's operators, and Python needs longer to
check arguments, choose kernels and lay out results (50 to 130 us a launch) than the
GPU needs for the work of a small batch. What it decides depends only on the arguments'
sizes, strides, dtypes, alignment and device. So the first call of a kind is recorded:
the tensors that it allocates, and what it launches on which of them. Later calls
allocate the same and launch the same, and decide nothing.

A call is recorded only if that tells all: it ran no PyTorch operator but allocations
and views, every pointer that it launched on is that of an argument or lies in a result,
and no two arguments begin at one address. Else (a copy of a misaligned matrix, the
reference on a CPU) later calls do as the first did.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jetrl_compile.kernels.launch_recorder import Plan, record, recording

MOST_PLANS = 4096
"""More kinds of calls than this are forgotten, all at once."""

_PLANS: dict[tuple[Any, ...], "Plan | None"] = {}
_COUNTS = {"recorded": 0, "refused": 0, "repeated": 0}


def plan_counts() -> dict[str, int]:
    """Return how many calls were recorded, refused, and repeated from a record."""
    return dict(_COUNTS)


def forget_plans() -> None:
    """Forget all records: the next calls decide anew."""
    _PLANS.clear()


def planned(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function on tensors repeat what was recorded of a call of the same kind.

    The function takes tensors, lists of tensors and scalars by position, and returns
    one new tensor or a tuple of them. What it does may not depend on values of tensors
    or on anything that changes from call to call.

    Args:
        name: Another one for each function.
    """

    def decorate(kernel: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def call(*args: Any) -> Any:
            if recording():  # inside of another operator, whose record has it all
                return kernel(*args)
            tensors: list[Tensor] = []
            key = _kind(name, args, tensors)
            if key is None:
                return kernel(*args)
            plan = _PLANS.get(key, _UNKNOWN)
            if plan is None:
                return kernel(*args)
            if plan is not _UNKNOWN:
                _COUNTS["repeated"] += 1
                return plan.run(tensors)
            made, plan = record(kernel, args, tensors, distinct=key[-1])
            _COUNTS["recorded" if plan is not None else "refused"] += 1
            if len(_PLANS) >= MOST_PLANS:
                _PLANS.clear()
            _PLANS[key] = plan
            return made

        return call

    return decorate


_UNKNOWN = Plan([], torch.device("cpu"), [], [], False)


def _kind(
    name: str, args: tuple[Any, ...], tensors: list[Tensor]
) -> tuple[Any, ...] | None:
    """Return what a call's decisions depend on, and list its tensors; None: not on GPU.

    A kernel is launched on the current GPU, so a call for another one has no kind.
    """
    key: list[Any] = [name]
    for arg in args:
        if isinstance(arg, Tensor):
            tensors.append(arg)
        elif type(arg) is list:
            key.append(len(arg))
            tensors += arg
        elif arg is None:
            key.append((None, len(tensors)))  # which of the optional ones it is
        else:
            key.append(arg)
    device = _device(tensors)
    if device is None:
        return None
    starts = []
    for tensor in tensors:
        start = tensor.data_ptr()
        starts.append(start)
        key += (tensor.shape, tensor.stride(), tensor.dtype, start & 15)
    # In a call whose arguments are one tensor, none of them can be told from another.
    key += (device, len(set(starts)) == len(starts))
    return tuple(key)


def _device(tensors: list[Tensor]) -> int | None:
    """Return the current GPU if all tensors are there."""
    if not tensors or not tensors[0].is_cuda:
        return None
    current = torch.cuda.current_device()
    for tensor in tensors:
        if tensor.get_device() != current:  # -1 on a CPU
            return None
    return current
