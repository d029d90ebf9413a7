"""Kernels that are launched before the one before them is over."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from jetrl_compile import doctor
from jetrl_compile.errors import ProviderError
from jetrl_compile.kernels import triton_device

KERNELS = Path(triton_device.__file__).parent
WAIT = "after_the_last_kernel"


def _waits() -> dict[str, bool]:
    """By name of a kernel: whether the first thing that it does is to wait."""
    found = {}
    for path in KERNELS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                found[node.name] = bool(body) and ast.unparse(body[0]) == f"{WAIT}()"
    return found


def _overlapped() -> set[str]:
    """Names of kernels that are launched with `overlapped`."""
    found = set()
    for path in KERNELS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) == "launch_kernel"
                and len(node.args) + len(node.keywords) > 2
            ):
                found.add(ast.unparse(node.args[0]))
    return found


def test_each_overlapped_kernel_waits_first() -> None:
    waits, overlapped = _waits(), _overlapped()
    some = {"rows_kernel", "norm_kernel", "backward_kernel", "decode_kernel"}
    assert some <= overlapped
    assert {name: waits[name] for name in overlapped} == dict.fromkeys(overlapped, True)


def test_nothing_overlaps_on_a_cpu() -> None:
    assert not triton_device.overlaps(torch.device("cpu"))


@pytest.mark.parametrize(
    ("value", "wanted"), [(None, True), ("", True), ("1", True), ("0", False)]
)
def test_overlap_by_environment(
    value: str | None, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(triton_device.OVERLAP_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(triton_device.OVERLAP_VARIABLE, value)
    assert triton_device.overlap_wanted() is wanted


@pytest.mark.parametrize("value", ["off", "false", "2", " 0"])
def test_other_values_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(triton_device.OVERLAP_VARIABLE, value)
    with pytest.raises(ProviderError, match="set it to 0 or 1"):
        triton_device.overlap_wanted()


@pytest.mark.gpu
def test_overlap_changes_no_bit() -> None:
    script = str(Path(__file__).with_name("run_chain.py"))
    digests = []
    for wanted in ("0", "1", "1"):
        done = subprocess.run(
            [sys.executable, script],
            env={**os.environ, triton_device.OVERLAP_VARIABLE: wanted},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:] or "a graph gave other bits"
        digests.append(done.stdout.split()[-1])
    assert digests[0] == digests[1] == digests[2]


def test_doctor_tells_whether_kernels_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="H200", major=9, minor=0, total_memory=2**37)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(triton_device, "capability", lambda device: (9, 0))
    for wanted in ("1", "0"):
        triton_device.overlaps.cache_clear()
        monkeypatch.setenv(triton_device.OVERLAP_VARIABLE, wanted)
        (found,) = doctor._gpus()[1]
        assert found.overlap == (wanted == "1")
    triton_device.overlaps.cache_clear()
