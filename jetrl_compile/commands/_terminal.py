"""What the commands share: progress and output."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 160  # columns where standard output is no terminal


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """Show what is going on, on a terminal's standard error, while the body runs.

    Args:
        text: What is done first.

    Yields:
        A function that shows what is done next.
    """
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(f"{escape(text)} ...") as status:
        yield lambda step: status.update(f"{escape(step)} ...")


def console() -> "Console":
    """Return a console on standard output that shows names as they are."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(markup=False, highlight=False, emoji=False, width=width)


def write_output(text: str, path: Path | None) -> None:
    """Write text to a file, whole or not at all, or to standard output.

    Raises:
        OutputError: The file cannot be written.
    """
    if path is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    from jetrl_compile.files import write_text

    write_text(path, text)
