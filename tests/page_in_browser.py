"""Views for tests of the page, fixtures that open it, and what a browser shows."""

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browser import launched
from PIL import Image
from playwright.sync_api import Browser, Error, Page
from sample_graphs import decoder_graph, with_edges, without_fp8

from jetrl_compile.precision_graph import Edge, PrecisionGraph
from jetrl_compile.show.page import page
from jetrl_compile.show.paired import pair_graphs
from jetrl_compile.show.view import View, make_view
from jetrl_compile.show.visible import Switches, default_phases

Opener = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as found:
        yield found


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Opener]:
    """Opens a view; afterwards nothing was logged, thrown or fetched."""
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": 1400, "height": 900})

    def start(view: View, switches: Switches | None = None) -> Page:
        path = tmp_path / "flow.html"
        chosen = switches or Switches(default_phases(view))
        path.write_text(page(view, switches=chosen), encoding="utf-8")
        tab = context.new_page()
        tab.on("console", lambda message: wrong.append(f"console: {message.text}"))
        tab.on("pageerror", lambda error: wrong.append(f"thrown: {error}"))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(path.as_uri())
        tab.wait_for_selector("html[data-ready]", state="attached", timeout=20_000)
        return tab

    requests: list[str] = []
    yield start
    context.close()
    fetched = [
        url for url in requests if not url.startswith(("file:", "data:", "blob:"))
    ]
    assert not wrong, wrong
    assert not fetched, fetched
    assert sum(url.startswith("file:") for url in requests) <= 1


def view_of(*graphs: PrecisionGraph, titles: tuple[str, ...] = ("a", "b")) -> View:
    return make_view(pair_graphs(graphs, titles[: len(graphs)]))


def mismatched(layers: int = 12) -> View:
    """A rollout graph with a skipped projection in two layers, against training."""
    rollout = without_fp8(
        decoder_graph("rollout", layers),
        lambda name: any(f"layers.{n}.mlp.up_proj" in name for n in (3, 4)),
    )

    def change(edge: Edge) -> Edge:
        wrong = edge.target == "model.layers.7.mlp.down_proj:fprop"
        flow = replace(edge.flow, scale_format="ue8m0")
        return replace(edge, flow=flow) if wrong and edge.operand == "x" else edge

    train = decoder_graph("train", layers)
    return view_of(with_edges(rollout, change), train, titles=("rollout", "train"))


def ids(tab: Page) -> set[str]:
    found: list[str] = tab.evaluate("[...jetrl.seen.elements.keys()]")
    return set(found)


def click(tab: Page, item: str) -> None:
    """Click an element of the drawing with the mouse."""
    point = tab.evaluate(
        """(id) => {
          const element = jetrl.cy.elements().filter((x) => x.data("item") === id)[0];
          const open = element.hasClass("open");
          const box = element.renderedBoundingBox({ includeLabels: false });
          const at = element.isEdge() ? element.renderedMidpoint()
            : open ? { x: box.x1 + 6, y: box.y1 + 6 } : element.renderedPosition();
          const frame = document.getElementById("graph").getBoundingClientRect();
          return [at.x + frame.left, at.y + frame.top];
        }""",
        item,
    )
    tab.mouse.click(*point)


def details(tab: Page) -> str:
    return tab.inner_text("#details")


def block(view: View, title: str, phase: str = "forward") -> str:
    (number,) = [
        n
        for n, item in enumerate(view.blocks)
        if (item.title, item.phase) == (title, phase)
    ]
    return f"b{number}"


def node(view: View, name: str) -> int:
    return [item.name for item in view.nodes].index(name)


def screenshot(tab: Page) -> bytes:
    """Return a picture of a page; on busy cores a browser may fail once to make it."""
    try:
        return tab.screenshot()
    except Error:
        tab.wait_for_timeout(1000)
        return tab.screenshot()


def count_of(png: bytes, colour: str) -> int:
    """Count the pixels of a colour."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    found = image.getcolors(maxcolors=2**24) or []
    red, green, blue = bytes.fromhex(colour.removeprefix("#"))
    return sum(count for count, value in found if value == (red, green, blue))
