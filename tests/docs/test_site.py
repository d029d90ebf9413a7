"""The site builds without a warning, and its pages look as CommonMark means them."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from browser import launched
from pages import PAGES, PARSER, ROOT
from playwright.sync_api import Page

import jetrl_compile

HOMES = {"README.md": "index.html", "CONTRIBUTING.md": "contributing.html"}
TAGS = ("li", "table", "tr", "pre", "img", "h2", "h3", "blockquote")
WRITTEN = [page for page in PAGES if "/api/" not in page]


def html_name(page: str) -> str:
    return HOMES.get(page, page.removeprefix("docs/").replace(".md", ".html"))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; a warning of mkdocs, of griffe or of a link fails it."""
    folder = tmp_path_factory.mktemp("site")
    api = tmp_path_factory.mktemp("api")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "JETRL_DOCS_API": str(api)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert not re.search("WARNING|ERROR|Warning:", said), said
    return folder


class Elements(HTMLParser):
    """Counts the elements of a page's article, less what the theme adds."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.counts = Counter[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in TAGS:
            self.counts[tag] += 1


def article(site: Path, page: str) -> str:
    text = (site / html_name(page)).read_text()
    return text[text.index("<article") : text.index("</article>")]


@pytest.mark.parametrize("page", WRITTEN)
def test_structure_is_that_of_the_source(site: Path, page: str) -> None:
    """Lists within lists, tables in lists and fences are what CommonMark makes."""
    wanted = Elements(PARSER.render((ROOT / page).read_text())).counts
    found = Elements(article(site, page)).counts
    assert found == wanted


def test_every_page_is_in_the_menu(site: Path) -> None:
    menu = (site / "index.html").read_text()
    for page in PAGES:
        assert f'href="{html_name(page)}"' in menu, f"add {page} to nav of mkdocs.yml"


def test_the_api_shows_docstrings(site: Path) -> None:
    text = (site / "api" / "compiling.html").read_text()
    assert 'id="jetrl_compile.options.CompileOptions"' in text
    assert "jetrl_compile.errors.RefitError" in text
    kernels = (site / "api" / "kernels.html").read_text()
    assert 'id="jetrl_compile.kernels.reference.quantize"' in kernels  # a linked folder


def test_the_api_has_what_the_package_exports() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    for module in sorted(set(jetrl_compile._HOMES.values())):
        assert f"::: jetrl_compile.{module}\n" in pages, module


def test_nothing_is_fetched(site: Path) -> None:
    for path in site.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img)\b[^>]*>", path.read_text()):
            outside = re.search(r'(?:src|href)="(?:https?:)?//', tag)
            assert not outside or 'rel="canonical"' in tag, (path.name, tag)


def open_page(tab: Page, site: Path, name: str) -> list[str]:
    """Open a page from its file; return what the browser complained of."""
    complaints: list[str] = []
    tab.on("console", lambda message: complaints.append(f"console: {message.text}"))
    tab.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    tab.on("requestfailed", lambda request: complaints.append(f"lost: {request.url}"))
    tab.goto((site / name).as_uri())
    tab.wait_for_load_state("networkidle")
    return complaints


def test_in_a_browser(site: Path) -> None:
    """No complaint, no broken picture, and nothing is wider than the page."""
    with launched() as browser:
        for name in ("index.html", "reading.html", "api/graphs.html", "log.html"):
            tab = browser.new_page(viewport={"width": 1280, "height": 900})
            assert open_page(tab, site, name) == []
            assert tab.locator("article h1").count() == 1
            broken = "[...document.images].filter(i => !i.naturalWidth).map(i => i.src)"
            assert tab.evaluate(broken) == []
            wide = "document.documentElement.scrollWidth <= window.innerWidth"
            assert tab.evaluate(wide), name
            tab.close()


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    """The site at an address: the search runs in a worker, which no file may start."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = partial(Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_search_finds_a_message(served: str) -> None:
    with launched() as browser:
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        tab.goto(f"{served}/index.html")
        tab.keyboard.press("/")
        tab.keyboard.type("recompile_limit", delay=20)
        tab.wait_for_selector(".md-search-result__link")
        links = tab.locator(".md-search-result__link").all()
        assert any(
            "troubleshooting" in str(each.get_attribute("href")) for each in links
        )
