"""Files that are read whole, and written whole or not at all."""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from jetrl_compile.errors import OutputError


def write_text(path: Path | str, text: str) -> None:
    """Write a file in UTF-8 so that readers see the old content or the new one.

    The text goes to a temporary file in the same folder, is flushed to the disk and
    then renamed. On an error the temporary file is removed and an old file at `path`
    stays as it was. A link is followed; a pipe or a device is written directly.

    Args:
        path: Where to write; its folder must exist.
        text: The whole content.

    Raises:
        OutputError: The folder does not exist, is read-only or full, or the text has
            lone surrogates, which UTF-8 cannot hold.
    """
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise OutputError(
            f"cannot write {path}: its text has {error.object[error.start]!r}, which "
            "UTF-8 cannot hold; rename what holds it"
        ) from error
    write_bytes(path, data)


def refuse_inputs(
    outputs: Iterable[Path | None], inputs: Iterable[Path | None]
) -> None:
    """Check that no file to be written is one that is read.

    Args:
        outputs: Files that will be written; None for standard output.
        inputs: Files that are read.

    Raises:
        OutputError: A file is both.
    """
    read = {os.path.realpath(path): path for path in inputs if path is not None}
    for path in outputs:
        if path is not None and os.path.realpath(path) in read:
            raise OutputError(
                f"cannot write {path}: it is read by the same command and would be "
                "lost; name another file"
            )


def write_bytes(path: Path | str, data: bytes) -> None:
    """Write a file as `write_text` does.

    Args:
        path: Where to write; its folder must exist.
        data: The whole content.

    Raises:
        OutputError: The folder does not exist, is read-only or full.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file() and not target.is_dir():
            target.write_bytes(data)
            return
        _replace(target, data)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(
            f"cannot write {path}: {reason}; name a file in a folder that exists and "
            "can be written"
        ) from error


def _replace(target: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), _mode(target))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    with contextlib.suppress(OSError):  # not every file system can sync a folder
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _mode(target: Path) -> int:
    """Return the permissions that an ordinary write would leave."""
    with contextlib.suppress(FileNotFoundError):
        return stat.S_IMODE(target.stat().st_mode)
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask
