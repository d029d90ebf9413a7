"""The pages of the documentation, read as CommonMark."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parent.parent
PARSER = MarkdownIt("commonmark").enable("table")
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))),
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: Path of the page, from the root.
        line: Of the first line of its text.
        language: The first word after the fence.
        text: What is in it.
        note: The HTML comment right before it, such as "needs: a GPU"; "" without.
    """

    page: str
    line: int
    language: str
    text: str
    note: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    note = ""
    for token in PARSER.parse((ROOT / page).read_text()):
        if token.type == "html_block" and token.content.startswith("<!--"):
            note = (
                token.content.strip().removeprefix("<!--").removesuffix("-->").strip()
            )
        elif token.type == "fence":
            assert token.map is not None
            yield Block(page, token.map[0] + 2, token.info.strip(), token.content, note)
            note = ""
        else:
            note = ""


def table_rows(text: str, first: str) -> Iterator[tuple[str, list[str]]]:
    """The rows of the tables whose first column is called `first`.

    Yields:
        The section that a row is in, and the Markdown of its cells.
    """
    section, cells, heading = "", list[str](), list[str]()
    tokens = PARSER.parse(text)
    for index, token in enumerate(tokens):
        if token.type == "heading_open" and token.tag in ("h1", "h2"):
            section = tokens[index + 1].content
        elif token.type == "tr_open":
            cells = []
        elif token.type == "inline" and _in_a_cell(tokens[index - 1]):
            cells.append(token.content)
        elif token.type == "tr_close":
            if tokens[index + 1].type == "thead_close":
                heading = cells
            elif heading[0] == first:
                yield section, cells


def _in_a_cell(opening: Token) -> bool:
    return opening.type in ("td_open", "th_open")
