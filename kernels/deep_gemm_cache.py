"""The folder in which DeepGEMM keeps its kernels, and what it was warmed up for.

A kernel that knows its contraction is 4 to 9% faster (H200, 2026-11-30), but one that
contracts over tokens (wgrad) would be compiled anew, in 5 to 14 seconds, for each
number of tokens. So only the numbers that a warm-up was given exactly are compiled in;
they are listed in this folder.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

from jetrl_compile.errors import ProviderError
from jetrl_compile.kernels.launch_plans import forget_plans

CACHE_VARIABLE = "DG_JIT_CACHE_DIR"
LIST = "jetrl_token_counts.json"
WARMED = "jetrl_warmed_up.json"
LOCK = "jetrl_warm_up.lock"


def cache_dir() -> Path:
    """Return the folder in which DeepGEMM keeps its kernels."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".deep_gemm")


@cache
def token_counts() -> frozenset[int]:
    """Return the numbers of tokens for which kernels of wgrad were compiled."""
    try:
        return frozenset(map(int, json.loads((cache_dir() / LIST).read_text())))
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError, TypeError) as error:
        raise ProviderError(
            f"{cache_dir() / LIST} cannot be read ({error}); delete it, and run "
            "jetrl warm-up again"
        ) from error


def add_token_counts(
    counts: Iterable[int], waits: Callable[[], object] = lambda: None
) -> None:
    """Note that kernels of wgrad are compiled for these numbers of tokens.

    Args:
        counts: Numbers of tokens; those that other processes noted stay.
        waits: As in `locked`.

    Raises:
        ProviderError: The folder cannot be written.
    """
    wanted = frozenset(counts)
    if wanted <= token_counts():
        return
    with locked(waits):
        token_counts.cache_clear()  # another process may have added some
        _write(cache_dir() / LIST, sorted(token_counts() | wanted))
    token_counts.cache_clear()
    forget_plans()  # which say what is compiled in


def kernels() -> set[str]:
    """Return the names of the kernels in the folder.

    Raises:
        ProviderError: The folder cannot be read.
    """
    folder = cache_dir() / "cache"
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise ProviderError(
            f"{folder} cannot be read: {error.strerror}; name another folder with "
            f"--cache-dir or {CACHE_VARIABLE}"
        ) from error


def warmed_up(identity: Sequence[object]) -> frozenset[str]:
    """Return the calls that were run before; none where kernels are gone since.

    Args:
        identity: What the kernels depend on beside the call: versions, paths.
    """
    try:
        kept = json.loads((cache_dir() / WARMED).read_text())
        same = kept["identity"] == list(map(str, identity))
        if same and kept["kernels"] <= len(kernels()):
            return frozenset(map(str, kept["calls"]))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, KeyError):
        return frozenset()  # it is written anew after the next warm-up
    return frozenset()


def add_warmed_up(identity: Sequence[object], calls: Iterable[str]) -> None:
    """Note that calls were run, so that another warm-up needs not to.

    Raises:
        ProviderError: The folder cannot be written.
    """
    names = sorted(warmed_up(identity) | frozenset(calls))
    kept = {
        "identity": list(map(str, identity)),
        "kernels": len(kernels()),
        "calls": names,
    }
    _write(cache_dir() / WARMED, kept)


@contextmanager
def locked(waits: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Let one process at a time warm up the folder; the others wait.

    Args:
        waits: Called once if another process has the folder.

    Raises:
        ProviderError: The folder cannot be written.
    """
    path = cache_dir() / LOCK
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            waits()
            lock.acquire()
    except (OSError, NotImplementedError) as error:
        raise ProviderError(
            f"{path} cannot be locked: {error}; name another folder with --cache-dir "
            f"or {CACHE_VARIABLE}"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _write(path: Path, content: object) -> None:
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(json.dumps(content))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise ProviderError(
            f"{path} cannot be written: {error.strerror}; name another folder with "
            f"--cache-dir or {CACHE_VARIABLE}"
        ) from error
