import json
import re
from html.parser import HTMLParser

import pytest
from hostile import NAMES, hostile_graph
from sample_graphs import decoder_graph

from jetrl_compile.show.page import Picture, page, safe_json
from jetrl_compile.show.paired import pair_graphs
from jetrl_compile.show.view import View, make_view


class Reader(HTMLParser):
    """Collects elements, their attributes and the texts of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    return reader


def view_of(tag: str = "") -> View:
    graphs = [hostile_graph(), hostile_graph(tag)] if tag else [hostile_graph()]
    return make_view(pair_graphs(graphs, NAMES[: len(graphs)]))


def test_the_page_needs_nothing_else() -> None:
    view = make_view(pair_graphs([decoder_graph("train", 8)], ["train.json"]))
    text = page(view)
    reader = read(text)
    for tag, attributes in reader.tags:
        assert "src" not in attributes, tag
        assert tag != "link"
        assert not any(name.startswith("on") for name in attributes), tag
    assert "url(" not in text.split("</style>")[0]
    policy = next(
        attributes["content"]
        for tag, attributes in reader.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert "'unsafe-inline'" not in policy.split("style-src")[0]


@pytest.mark.parametrize("tag", ["", "</script>"])
def test_hostile_names_stay_data(tag: str) -> None:
    plain = make_view(pair_graphs([decoder_graph("train", 2)], ["train.json"]))
    wanted, text = read(page(plain)), page(view_of(tag))
    found = read(text)
    # The same elements, whatever the graph says; titles are attributes of none.
    assert [name for name, _ in found.tags] == [name for name, _ in wanted.tags]
    assert [*found.scripts[1:]] == [*wanted.scripts[1:]]
    data = json.loads(found.scripts[0])
    names = [node["name"] for node in data["view"]["nodes"]]
    for number, name in enumerate(NAMES):
        assert any(name in node for node in names), number
    for text_of_json in (found.scripts[0],):
        assert not re.search("[<>&\u2028\u2029]", text_of_json)


def test_the_title_is_escaped() -> None:
    title = "</title><script>window.owned=1</script>"
    view = make_view(pair_graphs([decoder_graph("train", 2)], [title]))
    assert "<title>Precision flow of &lt;/title&gt;&lt;script&gt;" in page(view)


def test_safe_json_is_the_same_json() -> None:
    value = {name: [name, 1, None, True] for name in NAMES}
    text = safe_json(value)
    assert json.loads(text) == value
    assert text.isascii()


def test_pictures_are_in_the_page() -> None:
    view = make_view(pair_graphs([decoder_graph("train", 2)], ["train.json"]))
    text = page(view, [Picture("a gap", b"\x89PNG")])
    assert '"data":"data:image/png;base64,iVBORw=="' in text


def test_a_page_is_the_same_every_time() -> None:
    texts = {page(view_of("x")) for _ in range(2)}
    assert len(texts) == 1
