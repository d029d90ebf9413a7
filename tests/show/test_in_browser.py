"""The page in a headless Chromium, from file://, without a network."""

from dataclasses import replace

import page_in_browser
import pytest
from page_in_browser import (
    Opener,
    block,
    click,
    count_of,
    details,
    ids,
    mismatched,
    node,
    screenshot,
    view_of,
)
from sample_graphs import decoder_graph, with_edges

from jetrl_compile.precision_graph import make_graph
from jetrl_compile.show import styles
from jetrl_compile.show.paired import pair_graphs
from jetrl_compile.show.view import make_view
from jetrl_compile.show.visible import Switches, visible

browser, opened = page_in_browser.browser, page_in_browser.opened


def test_opens_folded(opened: Opener) -> None:
    view = view_of(decoder_graph("train", 36))
    tab = opened(view)
    boxes, _ = visible(view, Switches(view.phases()))
    assert ids(tab) == set(boxes)
    assert "model.layers.0-35" in tab.evaluate(
        "jetrl.cy.nodes().map((n) => n.data('label')).join()"
    )
    assert tab.title() == "Precision flow of a"
    assert int(tab.evaluate("document.documentElement.dataset.ready")) < 3000


@pytest.mark.parametrize("phases", [("forward",), ("forward", "dgrad"), ("wgrad",)])
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("more", [False, True])
def test_python_and_page_show_the_same(
    opened: Opener, phases: tuple[str, ...], is_open: bool, more: bool
) -> None:
    view = mismatched() if more else view_of(decoder_graph("train", 6))
    switches = Switches(phases, is_open, weights=more, saved=more, integers=more)
    tab = opened(view, switches)
    boxes, arrows = visible(view, switches)
    assert ids(tab) == set(boxes)
    found = tab.evaluate(
        "[...jetrl.seen.edges.values()].map((e) => [e.source, e.target, e.members])"
    )
    assert found == [[arrow.source, arrow.target, arrow.members] for arrow in arrows]


def test_a_click_opens_a_block_and_a_double_click_closes_it(opened: Opener) -> None:
    view = view_of(decoder_graph("rollout", 36))
    tab = opened(view)
    before = ids(tab)
    name = block(view, "model.layers.0-35")
    click(tab, name)
    inside = f"n{node(view, 'model.layers.0.mlp.up_proj:fprop')}"
    assert inside in ids(tab)
    assert "36 times the same; drawn: model.layers.0" in details(tab)
    assert "model.layers.0:residual_add.1 -> model.layers.0.input_layernorm" in details(
        tab
    )
    assert tab.inner_text("#status") == "model.layers.0-35 opened"
    tab.wait_for_timeout(700)
    click(tab, name)  # selects an open block
    assert inside in ids(tab)
    click(tab, name)
    assert ids(tab) == before
    click(tab, name)
    click(tab, name)  # a double click on a closed block opens it
    assert inside in ids(tab)
    tab.click("#details button:text('Close')")
    assert ids(tab) == before
    tab.click("#open-all")
    assert inside in ids(tab)
    tab.click("#close-all")
    assert ids(tab) == before


def test_boxes_do_not_overlap_and_layers_flow_down(opened: Opener) -> None:
    view = view_of(decoder_graph("rollout", 8))
    tab = opened(view, Switches(("forward",), opened=True, weights=True))
    boxes = tab.evaluate(
        """jetrl.cy.nodes().filter((n) => !n.hasClass("open")).map((n) =>
             n.boundingBox({ includeLabels: true, includeOverlays: false }))"""
    )
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            apart = (
                a["x2"] <= b["x1"]
                or b["x2"] <= a["x1"]
                or a["y2"] <= b["y1"]
                or b["y2"] <= a["y1"]
            )
            assert apart, (a, b)
    falls = tab.evaluate(
        "jetrl.cy.edges().map((e) => e.target().position().y - e.source().position().y)"
    )
    assert falls
    assert min(falls) > 0


def test_search_goes_to_a_folded_layer(opened: Opener) -> None:
    view = view_of(decoder_graph("train", 36))
    tab = opened(view)
    tab.fill("#search", "layers.17.mlp.up_proj")
    results = tab.locator("#results button").all_inner_texts()
    assert results[0].startswith("model.layers.0.mlp.up_proj.weight")
    assert len(results) == 4
    tab.fill("#search", "layers.17.mlp.up_proj:fprop")
    tab.press("#search", "Enter")
    number = node(view, "model.layers.0.mlp.up_proj:fprop")
    assert tab.evaluate("jetrl.state.selected") == f"n{number}"
    assert "stands for 36 equal operators" in details(tab)
    tab.fill("#search", "layers.36.mlp")
    assert tab.inner_text("#results") == "nothing has such a name"


def test_search_with_a_hostile_list_of_layers(opened: Opener) -> None:
    plain = decoder_graph("train", 6)
    graph = make_graph(
        [replace(op, name=_renamed(op.name)) for op in plain.operators],
        [
            replace(edge, source=_renamed(edge.source), target=_renamed(edge.target))
            for edge in plain.edges
        ],
        **plain.meta,
    )
    tab = opened(view_of(graph))
    tab.fill("#search", "LA(yers*.4.mlp.up_proj:fprop")
    assert len(tab.locator("#results button").all_inner_texts()) == 1


def _renamed(name: str) -> str:
    return name.replace(".layers.", ".la(yers*.")


def test_an_edge_shows_every_attribute(opened: Opener) -> None:
    view = view_of(decoder_graph("train", 4))
    tab = opened(view)
    click(tab, block(view, "model.layers.0-3"))
    number = next(
        n
        for n, edge in enumerate(view.edges)
        if view.nodes[edge.target].name == "model.layers.0.mlp.down_proj:fprop"
        and edge.operand == "x"
    )
    click(tab, f"e{number}")
    text = details(tab)
    assert (
        "model.layers.0.mlp:activation \u2192 model.layers.0.mlp.down_proj:fprop.x"
        in text
    )
    for wanted in (
        "e4m3",
        "1x128",
        "mn_major_tma",
        "divide",
        "1e-10",
        "saved for backward",
    ):
        assert wanted in text
    assert "26.0 MB at 4,096 tokens" in text  # 4096 x 6144 codes, 4096 x 48 scales


def test_switches_change_what_is_drawn(opened: Opener) -> None:
    view = view_of(decoder_graph("train", 4))
    tab = opened(view)
    tab.click("#open-all")

    def phases() -> set[str]:
        found: list[str] = tab.evaluate(
            "[...jetrl.seen.elements.values()].filter((x) => x.type === 'node')"
            ".map((x) => jetrl.view.nodes[x.number].phase)"
        )
        return set(found)

    assert phases() == {"forward", "dgrad", "wgrad"}
    tab.uncheck("#phases input[value=wgrad]")
    assert phases() == {"forward", "dgrad"}
    tab.uncheck("#phases input[value=dgrad]")
    assert phases() == {"forward"}
    weight = f"n{node(view, 'model.layers.0.mlp.up_proj.weight')}"
    assert weight not in ids(tab)
    tab.check("#weights")
    assert weight in ids(tab)


def test_differences_are_listed_marked_and_jumped_to(opened: Opener) -> None:
    view = mismatched()
    tab = opened(view)
    assert tab.inner_text("#verdict").startswith("not contained: 3 differences")
    assert tab.inner_text("#differences h2") == "Differences (3)"
    items = tab.locator("#differences li").all_inner_texts()
    assert items[0].startswith("GEMM precision is bf16 in rollout, e4m3 in train")
    assert "2 layers (model.layers.3-4), mlp.up_proj:fprop" in items[0]
    marked = tab.evaluate(
        "jetrl.cy.nodes('.differs').map((n) => n.data('label').split('  ')[0])"
    )
    assert marked == [
        "\u2260 model.layers.3-4",
        "\u2260 model.layers.7\nforward: 7 of 7 GEMMs in FP8",
    ]
    assert count_of(screenshot(tab), styles.DIFFERENCE) > 200
    tab.click("#differences li:nth-child(2) button")
    selected = tab.evaluate("jetrl.state.selected")
    assert view.nodes[view.edges[int(selected[1:])].target].name == (
        "model.layers.7.mlp.down_proj:fprop"
    )
    rows = tab.locator("#details tr.differs").all_inner_texts()
    assert [row.split("\t") for row in rows] == [
        ["\u2260 scale format", "ue8m0", "fp32"]
    ]
    tab.focus("#graph")
    tab.keyboard.press("n")
    assert "GEMM precision is bf16" in details(tab)


def test_one_cause_at_many_places_is_said_once(opened: Opener) -> None:
    train = decoder_graph("train", 4)
    edges = [edge for edge in train.edges if edge.flow.scale_format == "fp32"]
    other = with_edges(
        train,
        lambda edge: (
            replace(edge, flow=replace(edge.flow, scale_format="ue8m0"))
            if edge in edges
            else edge
        ),
    )
    tab = opened(make_view(pair_graphs([other, train], ["a.json", "b.json"])))
    text = tab.inner_text("#differences ol")
    assert text.count("scale format is ue8m0 in a.json, fp32 in b.json") == 1
    assert tab.locator("#differences li").count() > 5


def test_side_by_side_keeps_matched_parts_level(opened: Opener) -> None:
    view = mismatched()
    tab = opened(view)
    tab.check("#modes input[value=side]")
    pairs = tab.evaluate(
        """[...jetrl.seen.elements.keys()].map((id) => [0, 1].map((side) => {
             const found = jetrl.cy.getElementById(`${side}:${id}`);
             return found.length ? [found.position().x, found.position().y] : null;
           }))"""
    )
    both = [pair for pair in pairs if all(pair)]
    assert len(both) > 8
    shifts = {round(right[0] - left[0], 3) for left, right in both}
    assert len(shifts) == 1
    assert shifts.pop() > 0
    assert all(left[1] == right[1] for left, right in both)
    labels = tab.evaluate("jetrl.cy.nodes('.heading').map((n) => n.data('label'))")
    assert labels == ["rollout", "train"]


def test_by_keyboard_alone(opened: Opener) -> None:
    view = view_of(decoder_graph("rollout", 36))
    tab = opened(view)
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.id") == "search"
    for _ in range(40):
        if tab.evaluate("document.activeElement.id") == "graph":
            break
        tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.id") == "graph"
    names = []
    for _ in range(12):
        tab.keyboard.press("ArrowDown")
        names.append(tab.inner_text("#status").removeprefix("selected: "))
        if names[-1] == "model.layers.0-35":
            break
    assert names[-1] == "model.layers.0-35"
    tab.keyboard.press("Enter")
    assert tab.inner_text("#status") == "model.layers.0-35 opened"
    tab.keyboard.press("Enter")
    assert tab.inner_text("#status") == "model.layers.0-35 closed"
    tab.keyboard.press("e")
    assert "\u2192" in tab.inner_text("#status") or "tensors" in tab.inner_text(
        "#status"
    )
    tab.evaluate("jetrl.toggle(0)")
    gate = node(view, "model.layers.0.mlp.gate_proj:fprop")
    tab.evaluate("(n) => jetrl.select(`n${n}`, true)", gate)
    sides = []
    for key in ("ArrowRight", "ArrowLeft"):
        tab.keyboard.press(key)
        sides.append(tab.inner_text("#status"))
        tab.evaluate("(n) => jetrl.select(`n${n}`, true)", gate)
    assert "selected: model.layers.0.mlp.up_proj:fprop" in sides
    tab.keyboard.press("ArrowUp")
    assert tab.inner_text("#status").endswith("post_attention_layernorm:norm")
    zoom = tab.evaluate("jetrl.cy.zoom()")
    tab.keyboard.press("+")
    assert tab.evaluate("jetrl.cy.zoom()") > zoom
    tab.keyboard.press("/")
    assert tab.evaluate("document.activeElement.id") == "search"
