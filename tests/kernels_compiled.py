"""Run a script that compiles kernels for Hopper, without Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def printed_by(script: Path) -> list[Any]:
    """Return what a script prints, a JSON value a line."""
    done = subprocess.run(
        [sys.executable, str(script)],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
