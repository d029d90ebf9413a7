"""Pause Python's cyclic garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the collector for a step that makes many objects and drops few.

    The collector would look at all of them again and again: it doubles the time that a
    graph of 100,000 operators takes to build.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
