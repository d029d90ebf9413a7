"""The commands of `jetrl`, one file each.

A file `jetrl_compile/commands/NAME.py` with a function `command` is the command
`jetrl NAME`; its signature and docstring are its options and help. Where `command` is a
`typer.Typer`, its commands are `jetrl NAME SUBCOMMAND`. Files that begin with an
underscore are none. Other modules of this package are imported inside the
function, since torch would make `jetrl --help` slow.
"""

import importlib
import pkgutil
from collections.abc import Callable

import typer

Command = Callable[..., None] | typer.Typer


def load() -> dict[str, Command]:
    """Return the commands by name, in alphabetical order."""
    found: dict[str, Command] = {}
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda info: info.name):
        if not info.name.startswith("_"):
            module = importlib.import_module(f"{__name__}.{info.name}")
            found[info.name.replace("_", "-")] = module.command
    return found
