"""The `jetrl` command.

Each command is a file in `jetrl_compile/commands/`. Exit status: 0 yes, 1 no (not
contained, different), 2 could not tell, which also stands for every error.
"""

import os
import sys
import traceback
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from jetrl_compile import commands
from jetrl_compile.errors import JetRLError

COULD_NOT_TELL = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
NO_READER = 141  # 128 + SIGPIPE


class _Group(TyperGroup):
    """Turns errors into one message and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except JetRLError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(COULD_NOT_TELL) from error
        except KeyboardInterrupt as error:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from error
        except BrokenPipeError as error:
            # Python would complain again when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(NO_READER) from error


app = typer.Typer(
    cls=_Group,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def version() -> str:
    """Return the installed version of this package."""
    try:
        return metadata.version("jetrl-compile")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"jetrl-compile {version()}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Build, check and compare the FP8 precision flow of RL trainers and rollouts."""


for _name, _command in commands.load().items():
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_name)
    else:
        app.command(_name)(_command)


def main() -> None:
    """Run the command line; the entry point `jetrl`."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # names may not fit the terminal's encoding
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except Exception:  # a bug; status 1 would read as "not contained"
        traceback.print_exc()
        sys.exit(COULD_NOT_TELL)


if __name__ == "__main__":
    main()
