"""Timing of alternatives in turns, by events on a GPU or by the clock on a CPU."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any

import torch

Work = Callable[[], object]
_CUDA: Any = torch.cuda  # typed differently from one torch to the next
SLEEP_CYCLES_PER_MS = 2_000_000  # a little more than the clock of a Hopper GPU


@dataclass(frozen=True)
class Timing:
    """Times of one piece of work, in milliseconds.

    Attributes:
        median: The number to compare.
        low: The shortest.
        high: The longest.
        spread: Distance between the quartiles, as a part of the median.
        samples: How many times were taken.
    """

    median: float
    low: float
    high: float
    spread: float
    samples: int

    def divided(self, by: int) -> "Timing":
        """Return the times of one of some equal parts."""
        return replace(
            self, median=self.median / by, low=self.low / by, high=self.high / by
        )


def summarize(times: Sequence[float]) -> Timing:
    """Return median and spread of times in milliseconds; at least one is needed."""
    middle = median(times)
    quartiles = quantiles(times, n=4) if len(times) > 1 else [middle] * 3
    spread = (quartiles[2] - quartiles[0]) / middle if middle else 0.0
    return Timing(middle, min(times), max(times), spread, len(times))


class Clock:
    """Measures work on one device.

    Attributes:
        device: Where the work runs.
        run_ahead: Whether a GPU is kept busy until all calls of a sample are queued, so
            that the time Python takes to queue them is not measured. For single
            kernels and layers; a whole stack is measured as it is called.
    """

    def __init__(self, device: torch.device, run_ahead: bool = False) -> None:
        self.device = device
        self.run_ahead = run_ahead and device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until the device has nothing to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def queue_ms(self, work: Work, calls: int) -> float:
        """Return how long it takes to queue calls; the device works on afterwards."""
        start = time.perf_counter()
        for _ in range(calls):
            work()
        return 1e3 * (time.perf_counter() - start)

    def sample(self, work: Work, calls: int = 1, ahead_ms: float = 0.0) -> float:
        """Return the time of a call in milliseconds, the mean of some calls in a row.

        Args:
            work: What is timed.
            calls: How often it is called between start and end.
            ahead_ms: How long the GPU sleeps first, where `run_ahead` is set.
        """
        if self.device.type != "cuda":
            return self.queue_ms(work, calls) / calls
        start = _CUDA.Event(enable_timing=True)
        end = _CUDA.Event(enable_timing=True)
        self.synchronize()
        if self.run_ahead and ahead_ms:
            _CUDA._sleep(int(ahead_ms * SLEEP_CYCLES_PER_MS))
        start.record()
        for _ in range(calls):
            work()
        end.record()
        self.synchronize()
        elapsed: float = start.elapsed_time(end)
        return elapsed / calls

    def calls_for(self, work: Work, sample_ms: float, most: int = 50) -> int:
        """Return how many calls make a sample of about a length, 1 at least."""
        once = self.sample(work, 1)
        return max(1, min(most, round(sample_ms / max(once, 1e-3))))


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's cyclic garbage collector out of what is timed.

    With the graphs of several compiled ways alive, a pass takes longer than a step.
    """
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def in_turns(
    works: Mapping[str, Work],
    clock: Clock,
    rounds: int,
    *,
    sample_ms: float = 0.0,
    before: Callable[[str], object] | None = None,
) -> dict[str, Timing]:
    """Time alternatives in turns: each once, then each again, ...

    Args:
        works: What is timed, by name; all are warmed up already.
        clock: How.
        rounds: Samples of each.
        sample_ms: Calls are repeated within a sample until it lasts about this long;
            0: one call a sample.
        before: Called with a name before each of its samples, not timed.

    Returns:
        Milliseconds a call, by name.
    """
    calls: dict[str, int] = {}
    ahead: dict[str, float] = {}
    for name, work in works.items():
        if before is not None:
            before(name)
        calls[name] = clock.calls_for(work, sample_ms) if sample_ms else 1
        if clock.run_ahead:
            clock.synchronize()
            ahead[name] = 1.5 * clock.queue_ms(work, calls[name]) + 0.1
            clock.synchronize()
    times: dict[str, list[float]] = {name: [] for name in works}
    with _no_collection():
        for _ in range(rounds):
            for name, work in works.items():
                if before is not None:
                    before(name)
                took = clock.sample(work, calls[name], ahead.get(name, 0.0))
                times[name].append(took)
    return {name: summarize(values) for name, values in times.items()}
