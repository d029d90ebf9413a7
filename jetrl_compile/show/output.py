"""A view as a file, whose ending says the format."""

from collections.abc import Sequence
from pathlib import Path

from jetrl_compile.errors import OutputError
from jetrl_compile.files import write_text
from jetrl_compile.show.page import Picture, page
from jetrl_compile.show.view import View
from jetrl_compile.show.visible import Switches

FORMATS = {".html": "a page", ".svg": "an SVG picture", ".dot": "a Graphviz graph"}


def check_ending(path: Path) -> None:
    """Check that a path says which format is wanted.

    Raises:
        OutputError: Its ending is none of `FORMATS`.
    """
    if path.suffix.lower() not in FORMATS:
        raise OutputError(
            f"cannot tell the format of {path}; end the name with {', '.join(FORMATS)}"
        )


def write_picture(
    view: View,
    path: Path,
    pictures: Sequence[Picture] = (),
    switches: Switches | None = None,
) -> None:
    """Write a view as HTML, SVG or DOT, whole or not at all.

    Args:
        view: What is drawn.
        path: Its ending is the format.
        pictures: For HTML: shown beside the graph.
        switches: What is shown, in HTML at first.

    Raises:
        OutputError: The ending is unknown, the file cannot be written, or SVG and DOT
            need a package that is not installed.
    """
    check_ending(path)
    if path.suffix.lower() == ".html":
        text = page(view, pictures, switches)
    else:
        from jetrl_compile.show.graphviz import dot_text, svg_text

        make = dot_text if path.suffix.lower() == ".dot" else svg_text
        text = make(view, switches)
    write_text(path, text)
