"""Where the time of a step goes: kernels, grouped, from torch.profiler."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetrl_compile.files import write_text

TOP = 40
# The first pattern that is found in a kernel's name tells its group.
GROUPS: tuple[tuple[str, str], ...] = (
    ("attention", r"flash|fmha|attention|attn|sdpa"),
    ("Inductor", r"^triton_(poi|red|per|tem|for|mm)_"),
    ("GEMM", r"gemm|nvjet|cutlass|cublas|splitk|wgmma|\bmm\b|addmm|matmul"),
    (
        "quantize + fused",
        r"quantize|amax|jetrl::|^(tile|rows|norm|scale|forward|backward)_\w*kernel",
    ),
    ("copies", r"mem(cpy|set)|copy_|fill"),
)
_SDPA = re.compile(
    r"_scaled_dot_product_(?:(\w+?)_attention(?:_for_cpu)?|attention_math)$"
)


@dataclass(frozen=True)
class KernelTime:
    """One kernel's part of a step.

    Attributes:
        name: As the profiler calls it.
        group: See `GROUPS`; "other".
        calls: How often it ran.
        ms: Its time, all calls together.
    """

    name: str
    group: str
    calls: int
    ms: float


def group_of(kernel: str) -> str:
    """Return the group of a kernel's name."""
    for group, pattern in GROUPS:
        if re.search(pattern, kernel, re.IGNORECASE):
            return group
    return "other"


def attention_kernels(work: Callable[[], Tensor]) -> tuple[str, Tensor]:
    """Run work once; return the names of the attention it calls, and its result.

    Names are those of PyTorch's backends: "flash", "cudnn", "efficient", "math";
    "exact" is that of exact mode; "" where it calls none of them.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        result = work()
    names = {event.name for event in seen.events() or ()}
    found = {
        (match.group(1) or "math").removeprefix("fused_")
        for name in names
        if (match := _SDPA.search(name))
    }
    if "jetrl::attention" in names:
        found.add("exact")
    return "+".join(sorted(found)), result


def profile_step(work: Callable[[], Tensor], on_gpu: bool) -> list[KernelTime]:
    """Run work once and return its kernels, the longest first.

    Args:
        work: A step that is warmed up.
        on_gpu: Whether GPU kernels are told; else PyTorch's operators on the CPU.
    """
    from torch.profiler import ProfilerActivity, profile

    kind = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[kind], acc_events=True) as seen:
        work()
        if on_gpu:
            torch.cuda.synchronize()
    times = []
    for event in seen.key_averages():
        entry: Any = event
        us = entry.self_device_time_total if on_gpu else entry.self_cpu_time_total
        if us > 0:
            times.append(
                KernelTime(entry.key, group_of(entry.key), entry.count, us / 1e3)
            )
    return sorted(times, key=lambda kernel: -kernel.ms)


def profile_text(kernels: list[KernelTime], title: str) -> str:
    """Return a table: the groups, then the longest kernels."""
    total = sum(kernel.ms for kernel in kernels) or 1.0
    groups: dict[str, list[KernelTime]] = {}
    for kernel in kernels:
        groups.setdefault(kernel.group, []).append(kernel)
    lines = [f"{title}: {total:.3f} ms in kernels", ""]
    lines.append(f"{'ms':>10} {'%':>6} {'calls':>7}  group")
    for name, members in sorted(
        groups.items(), key=lambda item: -sum(k.ms for k in item[1])
    ):
        ms = sum(kernel.ms for kernel in members)
        calls = sum(kernel.calls for kernel in members)
        lines.append(f"{ms:10.3f} {100 * ms / total:6.1f} {calls:7}  {name}")
    lines += ["", f"{'ms':>10} {'%':>6} {'calls':>7}  {'group':16}  kernel"]
    for kernel in kernels[:TOP]:
        lines.append(
            f"{kernel.ms:10.3f} {100 * kernel.ms / total:6.1f} {kernel.calls:7}  "
            f"{kernel.group:16}  {kernel.name[:140]}"
        )
    if len(kernels) > TOP:
        rest = sum(kernel.ms for kernel in kernels[TOP:])
        lines.append(
            f"{rest:10.3f} {100 * rest / total:6.1f} {'':7}  and "
            f"{len(kernels) - TOP} more"
        )
    return "\n".join(lines) + "\n"


def write_profile(
    works: Mapping[str, Callable[[], Tensor]], path: Path | str, title: str
) -> None:
    """Profile steps and write their tables to a file.

    Raises:
        OutputError: The file cannot be written.
    """
    on_gpu = torch.cuda.is_available()
    texts = [
        profile_text(profile_step(work, on_gpu), f"{title}, {name}")
        for name, work in works.items()
    ]
    write_text(path, "\n".join(texts))
