"""What mkdocs needs to show pages that are written for a repository's web view.

README.md and CONTRIBUTING.md become pages, so that nothing is written twice. Lists of
CommonMark are indented by two columns, those of Python-Markdown by four.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}


LINKS = ("passes", "kernels", "examples")
# Where mkdocs.yml says too; two builds at once, as in tests, each need their own.
API = Path(os.environ.get("JETRL_DOCS_API", ROOT / "build" / "api"))


def on_startup(**_: Any) -> None:
    """Lay out the package as mkdocstrings reads it: folders that are packages.

    The linked folders have no `__init__.py` (CONTRIBUTING.md says why), and griffe
    takes a folder without one, inside a package, for data.
    """
    shutil.rmtree(API, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "assets")
    shutil.copytree(ROOT / "jetrl_compile", API / "jetrl_compile", ignore=ignored)
    for name in LINKS:
        (API / "jetrl_compile" / name / "__init__.py").touch()


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that lie outside this folder."""
    for source, page in PAGES.items():
        text = as_page((ROOT / source).read_text())
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Indent as Python-Markdown wants it, and let links to README.md lead home."""
    markdown = re.sub(r"\]\(\.\./(README|CONTRIBUTING)\.md", _to_page, markdown)
    return indented(markdown)


def as_page(text: str) -> str:
    """Return a text of the repository's root with links as of a page in docs/."""
    text = re.sub(r'(\]\(|src="|href=")docs/', r"\1", text)
    for source, page in PAGES.items():
        text = text.replace(f"]({source}", f"]({page}")
    # Files that are no pages are named, not linked.
    return re.sub(
        r"\[([^]]+)\]\((?!https?:|#)(?![^)]*\.(?:md|svg|png))[^)]+\)", r"\1", text
    )


def indented(text: str) -> str:
    """Return a text as Python-Markdown reads lists, outside of fenced code.

    The indentation is doubled, and an item that follows a later paragraph of the item
    before it gets a blank line, without which it would be a part of that paragraph.
    """
    lines = list[str]()
    fence, parted = "", False
    for line in text.split("\n"):
        opens = re.match(r" *(```+)", line)
        if not fence and re.match(r" *(?:[-*]|\d+\.) ", line):
            lines += [""] if parted and lines[-1] else []
            parted = False
        parted |= not line
        blank = len(line) - len(line.lstrip(" "))
        lines.append(" " * blank + line if not fence or opens else line)
        if opens and not fence:
            fence = opens[1]
        elif opens and opens[1] == fence:
            fence = ""
    return "\n".join(lines)


def _to_page(match: re.Match[str]) -> str:
    return f"]({PAGES[match[1] + '.md']}"
