"""In which order the norm adds up: the same in all its variants, seen without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")


def test_every_variant_of_the_norm_adds_in_one_order() -> None:
    script = Path(__file__).parent / "norm_layouts.py"
    own = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        env=own,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 4  # lengths of a row
    for line in lines:
        first, *others = json.loads(line)
        assert first, "no sum of squares was found"
        assert len(others) == 7  # variants
        assert all(other == first for other in others)
