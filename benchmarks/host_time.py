"""How long Python needs for one call of each operator, on a GPU.

    python benchmarks/host_time.py

Prints microseconds a call, the median of 21 times 50 calls while the GPU is busy with
something else: as it decides anew each time, and as it repeats what was recorded
(`kernels/launch_plans.py`).
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "kernels"))

from jetrl_compile.kernels import launch_plans, ops

CALLS, TIMES = 50, 21


def microseconds(work: Callable[[], object]) -> float:
    """Return the host time of a call."""
    times = []
    for _ in range(TIMES):
        torch.cuda.synchronize()
        torch.cuda._sleep(30_000_000)  # type: ignore[no-untyped-call, unused-ignore]
        start = time.perf_counter()
        for _ in range(CALLS):
            work()
        times.append(1e6 * (time.perf_counter() - start) / CALLS)
    return median(times)


def main() -> None:
    """Print a table."""
    from test_launch_plans_gpu import BLOCK, GROUP, R, codes_of
    from test_launch_plans_gpu import CALLS as CASES

    def gemm() -> tuple[Any, ...]:
        a, b = codes_of(R, GROUP), codes_of(R, BLOCK)
        return (*a, *b, *GROUP, *BLOCK, torch.bfloat16, "deep_gemm")

    print(f"{'us a call':16} {'anew':>8} {'repeated':>8}")
    for name, (op, arguments) in {**CASES, "gemm": (ops.gemm, gemm)}.items():
        args = arguments()
        op(*args)
        repeated = microseconds(lambda op=op, args=args: op(*args))
        launch_plans._PLANS.update(dict.fromkeys(launch_plans._PLANS))
        anew = microseconds(lambda op=op, args=args: op(*args))
        launch_plans.forget_plans()
        print(f"{name:16} {anew:8.1f} {repeated:8.1f}")


if __name__ == "__main__":
    main()
