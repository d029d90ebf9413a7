"""Watches one call of an operator: what it allocates, what it launches on what.

See `launch_plans.py`, which repeats what was recorded. Here are also the two functions
through which everything is launched that can be recorded.
"""

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_VIEWS = {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.as_strided.default,
    _aten.alias.default,
    _aten.detach.default,
    _aten.t.default,
    _aten.transpose.int,
}
_thread = threading.local()  # autograd runs backward in another thread

Step = Callable[[list[Tensor], list[Tensor]], object]


@dataclass(slots=True)
class Plan:
    """What an operator did in one call of a kind.

    Attributes:
        new: Shape, strides and dtype of each tensor that it allocated.
        device: Where.
        steps: What it launched, each called with the arguments' tensors and the new.
        results: Which of the new tensors it returned.
        single: Whether it returned one, and no tuple.
    """

    new: list[tuple[torch.Size, tuple[int, ...], torch.dtype]]
    device: torch.device
    steps: list[Step]
    results: list[int]
    single: bool

    def run(self, tensors: list[Tensor]) -> Any:
        """Do the same on the tensors of another call of the kind."""
        new = [
            torch.empty_strided(shape, stride, dtype=dtype, device=self.device)
            for shape, stride, dtype in self.new
        ]
        for step in self.steps:
            step(tensors, new)
        if self.single:
            return new[self.results[0]]
        return tuple([new[index] for index in self.results])


def launch_kernel(
    kernel: Any, grid: tuple[int, ...], overlapped: bool = False
) -> Callable[..., None]:
    """Return what launches a Triton kernel as `kernel[grid]` does, recorded if need be.

    Args:
        kernel: What `triton.jit` made.
        grid: How many programs, up to three numbers.
        overlapped: Whether it is launched before the kernel before it is over: it
            begins with `after_the_last_kernel`, and the device can.
    """
    recorder: Recorder | None = getattr(_thread, "recorder", None)
    launch = kernel[grid]
    if overlapped:
        launch = partial(launch, launch_pdl=True)
    if recorder is None:
        return launch  # type: ignore[no-any-return]

    def run(*args: Any, **kwargs: Any) -> None:
        compiled = launch(*args, **kwargs)
        recorder.launched(kernel, compiled, grid, args, kwargs)

    return run


def call_library(
    function: Callable[..., object], tensors: tuple[Tensor | None, ...], *rest: Any
) -> None:
    """Call a library's kernel, recorded if need be.

    Args:
        function: Called with the tensors, then the rest. It writes results into tensors
            that it is given, and keeps none of them.
        tensors: Arguments or results of the operator.
        rest: Further arguments, the same in each call of this kind.
    """
    recorder: Recorder | None = getattr(_thread, "recorder", None)
    if recorder is None:
        function(*tensors, *rest)
        return
    with recorder.paused():
        function(*tensors, *rest)
    recorder.called(function, tensors, rest)


def recording() -> bool:
    """Return whether a call is being recorded in this thread."""
    return getattr(_thread, "recorder", None) is not None


def record(
    kernel: Callable[..., Any],
    args: tuple[Any, ...],
    tensors: list[Tensor],
    distinct: bool,
) -> tuple[Any, Plan | None]:
    """Run an operator and record what it does.

    Args:
        kernel: What runs.
        args: Its arguments.
        tensors: All tensors among them, in order.
        distinct: Whether no two of them begin at one address.

    Returns:
        What it returned, and the record, or None where that would not tell all.
    """
    recorder = Recorder(tensors)
    _thread.recorder = recorder
    try:
        with recorder:
            made = kernel(*args)
    finally:
        _thread.recorder = None
    if not distinct:
        recorder.why_not = "two arguments begin at one address"
    return made, recorder.plan(made)


@dataclass(slots=True)
class _Launched:
    """A launch: what is called with which arguments."""

    function: Callable[..., object]
    args: list[Any]
    pointers: bool  # whether the function takes addresses


class Recorder(TorchDispatchMode):
    """Watches one call of an operator."""

    def __init__(self, arguments: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.arguments = arguments
        self.new: list[Tensor] = []
        self.launches: list[_Launched] = []
        self.why_not = ""
        self._paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if self._paused:
            return made
        if func in _ALLOCATIONS:
            self.new.append(made)
        elif func not in _VIEWS:
            self.why_not = f"it ran {func}"
        return made

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not look at what a library does in the body."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def launched(
        self,
        kernel: Any,
        compiled: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Note a Triton launch; `compiled` is None on its interpreter."""
        if compiled is None:
            self.why_not = "Triton's interpreter ran it"
            return
        signature = inspect.signature(kernel.fn)
        given = {k: v for k, v in kwargs.items() if k in signature.parameters}
        bound = signature.bind(*args, **given)
        bound.apply_defaults()
        size = (*grid, 1, 1)[:3]
        values = list(bound.arguments.values())
        self.launches.append(_Launched(compiled[size], values, True))

    def called(
        self,
        function: Callable[..., object],
        tensors: tuple[Tensor | None, ...],
        rest: tuple[Any, ...],
    ) -> None:
        """Note a call of a library."""
        self.launches.append(_Launched(function, [*tensors, *rest], False))

    def plan(self, made: Any) -> Plan | None:
        """Return the record of the call that made some tensors; None: `why_not`."""
        single = isinstance(made, Tensor)
        results = [self._index(result) for result in ([made] if single else made)]
        steps = [self._step(launched) for launched in self.launches]
        if self.why_not or None in results or not steps:
            return None
        new = [(t.shape, t.stride(), t.dtype) for t in self.new]
        device = self.arguments[0].device
        found = [index for index in results if index is not None]
        return Plan(new, device, steps, found, single)

    def _index(self, result: Tensor) -> int | None:
        return next((i for i, t in enumerate(self.new) if _is_same(t, result)), None)

    def _step(self, launched: _Launched) -> Step:
        places = []  # (position, whether it is new, which, bytes from its start)
        for position, arg in enumerate(launched.args):
            if isinstance(arg, Tensor):
                place = self._place(arg, launched.pointers)
                if place is None:
                    self.why_not = self.why_not or "it launched on a tensor of its own"
                    continue
                places.append((position, *place))
        template = [None if isinstance(a, Tensor) else a for a in launched.args]
        run = launched.function
        if launched.pointers:
            return _pointer_step(run, template, places)

        def step(arguments: list[Tensor], new: list[Tensor]) -> None:
            args = template.copy()
            for position, is_new, which, _ in places:
                args[position] = (new if is_new else arguments)[which]
            run(*args)

        return step

    def _place(self, arg: Tensor, by_address: bool) -> tuple[bool, int, int] | None:
        """Return where a tensor is to be found in a later call."""
        for which, tensor in enumerate(self.arguments):
            same = arg.data_ptr() == tensor.data_ptr() and tensor.numel()
            if same if by_address else arg is tensor:
                return False, which, 0
        for which, tensor in enumerate(self.new):
            if not by_address:
                if _is_same(arg, tensor):
                    return True, which, 0
            elif arg.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
                return True, which, arg.data_ptr() - tensor.data_ptr()
        if by_address and arg.numel() == 0:
            return _NOWHERE
        return None


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two are one tensor; dispatch may wrap it in a Python object twice."""
    return (
        a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and a.data_ptr() == b.data_ptr()
        and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    )


_NOWHERE = (True, -1, 0)


def _pointer_step(
    run: Callable[..., object],
    template: list[Any],
    places: list[tuple[int, bool, int, int]],
) -> Step:
    of_arguments = [(p, which) for p, is_new, which, _ in places if not is_new]
    of_new = [(p, i, at) for p, is_new, i, at in places if is_new and i >= 0]
    for position, _, which, _ in places:
        if which < 0:
            template[position] = 0  # the address of a tensor without elements

    def step(arguments: list[Tensor], new: list[Tensor]) -> None:
        args = template.copy()
        for position, which in of_arguments:
            args[position] = arguments[which].data_ptr()
        for position, which, offset in of_new:
            args[position] = new[which].data_ptr() + offset
        run(*args)

    return step
