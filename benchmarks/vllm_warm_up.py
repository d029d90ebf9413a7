"""Compile DeepGEMM's kernels before engines load, for the batches that they will see.

Each takes 5 to 14 s, and would be compiled one after the other where it is first used.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple


class Wanted(NamedTuple):
    """The kernels of a model.

    Attributes:
        folder: With its config.json.
        tokens: Of batches.
        backward: Whether the trainer's backward is wanted, too.
        exact: Whether exact mode's output head is wanted, too.
    """

    folder: Path | str
    tokens: Iterable[int]
    backward: bool = False
    exact: bool = False


def use_one_cache() -> None:
    """Let vLLM, which has a folder of its own, keep kernels where `jetrl` does."""
    from jetrl_compile.kernels.deep_gemm_cache import CACHE_VARIABLE, cache_dir

    os.environ[CACHE_VARIABLE] = str(cache_dir())


def warm_up(
    *wanted: Wanted, say: Callable[[str], None] = print, jobs: int = 16
) -> None:
    """Run `jetrl warm-up` for models, one after the other; say what it printed.

    Args:
        *wanted: The models.
        say: Takes a text.
        jobs: Processes that compile.
    """
    use_one_cache()
    for each in wanted:
        command = [sys.executable, "-m", "jetrl_compile.cli", "warm-up"]
        command += [str(each.folder), "--jobs", str(jobs)]
        command += ["--backward" if each.backward else "--no-backward"]
        command += ["--exact"] if each.exact else []
        for count in sorted(set(each.tokens)):
            command += ["--tokens", str(count)]
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        say(done.stdout.strip())
