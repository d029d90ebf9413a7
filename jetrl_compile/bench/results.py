"""What a benchmark found, as data."""

import datetime
import math
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from types import MappingProxyType
from typing import Any

import torch

from jetrl_compile.bench.timing import Timing
from jetrl_compile.doctor import PACKAGES, package_version

FORMAT = "jetrl.bench"
VERSION = 1
PEAK, PEAK_OVER, PEAK_BASE = "peak GiB", "peak over compile", "compile"


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        case: What was measured, such as "forward+backward 4x2048".
        way: Which alternative, such as "compile" or a provider's name.
        timing: Its times; None where nothing was timed.
        values: Numbers by name, such as "over compile" (how many times as fast) or
            "peak GiB".
        note: Why it failed, or what is to be known.
        failed: Whether it could not be measured.
        table: Which table it belongs to, where a run has several.
    """

    case: str
    way: str
    timing: Timing | None = None
    values: dict[str, float] = field(default_factory=dict)
    note: str = ""
    failed: bool = False
    table: str = ""


@dataclass(frozen=True)
class Environment:
    """Where and how a benchmark ran.

    Attributes:
        device: The GPU's name, or the processor's.
        driver: Version of the GPU's driver; "" without one.
        cuda: The CUDA version of this torch; "" without one.
        python: Version of Python.
        versions: By package; "" where it is not installed.
        command: The command line.
        date: When it began, in UTC.
    """

    device: str
    driver: str
    cuda: str
    python: str
    versions: dict[str, str]
    command: str
    date: str


@dataclass(frozen=True)
class Results:
    """All of one run.

    Attributes:
        kind: "kernels", "layer", "stack" or "gradients".
        model: What was measured.
        rows: In order.
        environment: Where and how.
        settings: Such as the number of layers, by name.
    """

    kind: str
    model: str
    rows: tuple[Row, ...]
    environment: Environment
    settings: dict[str, Any] = field(default_factory=dict)

    def find(self, case: str, way: str) -> Row | None:
        """Return the row of a case and a way."""
        for row in self.rows:
            if (row.case, row.way) == (case, way):
                return row
        return None

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` writes; JSON has no infinity, so those are words."""
        table = {"format": FORMAT, "version": VERSION, **asdict(self)}
        for row in table["rows"]:
            row["values"] = {
                name: value if math.isfinite(value) else str(value)
                for name, value in row["values"].items()
            }
        return table


def compare(
    rows: list[Row],
    baselines: tuple[str, ...],
    more: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> list[Row]:
    """Add to each row what it is against each baseline of its case.

    "over NAME": how many times as fast; "peak over compile": the part of its memory.

    Args:
        rows: Of all cases.
        baselines: Ways that every way is compared with.
        more: By way: others that it alone is compared with.
    """
    by_key = {(row.case, row.way): row for row in rows}
    compared = []
    for row in rows:
        values = dict(row.values)
        for name in (*baselines, *more.get(row.way, ())):
            base = by_key.get((row.case, name))
            if row.timing and base and base.timing and name != row.way:
                values[f"over {name}"] = base.timing.median / row.timing.median
        base = by_key.get((row.case, PEAK_BASE))
        if base and base.values.get(PEAK) and PEAK in values and row is not base:
            values[PEAK_OVER] = values[PEAK] / base.values[PEAK]
        compared.append(replace(row, values=values))
    return compared


def environment(device: torch.device) -> Environment:
    """Describe this process and its device."""
    versions = {name: package_version(name) for name in PACKAGES}
    try:
        versions["torchao"] = metadata.version("torchao")
    except metadata.PackageNotFoundError:
        versions["torchao"] = ""
    versions["torch"] = torch.__version__  # with the CUDA version that it is built for
    is_gpu = device.type == "cuda"
    now = datetime.datetime.now(datetime.timezone.utc)
    return Environment(
        torch.cuda.get_device_name(device) if is_gpu else platform.machine(),
        _driver() if is_gpu else "",
        torch.version.cuda or "",
        platform.python_version(),
        versions,
        " ".join(["jetrl", *sys.argv[1:]]),
        now.isoformat(timespec="seconds"),
    )


def _driver() -> str:
    """Return the driver's version, "" where it cannot be told."""
    import subprocess

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return told.stdout.partition("\n")[0].strip()
