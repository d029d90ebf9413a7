import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hostile import NAMES, hostile_graph
from sample_graphs import decoder_graph, one_edge

from jetrl_compile.errors import OutputError
from jetrl_compile.precision_graph import PrecisionGraph
from jetrl_compile.show import styles
from jetrl_compile.show.graphviz import MOST, dot_text, svg_text, thickness
from jetrl_compile.show.paired import pair_graphs
from jetrl_compile.show.view import View, make_view
from jetrl_compile.show.visible import Switches, visible

pygraphviz = pytest.importorskip("pygraphviz")
SVG = "{http://www.w3.org/2000/svg}"
OPEN = Switches(("forward",), opened=True)


def view_of(*graphs: PrecisionGraph) -> View:
    return make_view(pair_graphs(graphs, ["a", "b"][: len(graphs)]))


def test_dot_is_read_back() -> None:
    view = view_of(decoder_graph("train", 12))
    boxes, arrows = visible(view, OPEN)
    graph = pygraphviz.AGraph(dot_text(view, OPEN))
    assert graph.number_of_nodes() == sum(not box.is_open for box in boxes.values())
    assert graph.number_of_edges() == len(arrows)
    labels = [node.attr["label"] for node in graph.nodes()]
    assert "mlp.up_proj\nfprop: x e4m3 1x128, w e4m3 128x128" in labels
    (cluster,) = graph.subgraphs()
    assert cluster.graph_attr["label"].startswith("model.layers.0-11")


def test_svg_has_every_box_and_words() -> None:
    view = view_of(decoder_graph("train", 12))
    root = ET.fromstring(svg_text(view, OPEN))
    boxes, arrows = visible(view, OPEN)
    kinds = [group.get("class") for group in root.iter(f"{SVG}g")]
    assert kinds.count("node") == sum(not box.is_open for box in boxes.values())
    assert kinds.count("edge") == len(arrows)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "mlp.down_proj" in texts
    assert "x: e4m3 1x128" in texts
    assert not [element for element in root.iter() if element.tag == f"{SVG}script"]


def test_differences_have_their_colour_and_a_sign() -> None:
    train, rollout = decoder_graph("train", 3), decoder_graph("rollout", 3)
    edge = rollout.by_key[("model.layers.1.mlp.up_proj:fprop", "x")]
    flow = replace(edge.flow, amax_floor=1e-4)
    text = svg_text(view_of(one_edge(rollout, edge, flow=flow), train), OPEN)
    assert text.count(f'stroke="{styles.DIFFERENCE}"') == 2  # a line and its head
    assert "\u2260 x: e4m3 1x128" in text
    equal = svg_text(view_of(rollout, train), OPEN)
    assert styles.DIFFERENCE not in equal


def test_hostile_names_stay_labels() -> None:
    for switches in (Switches(opened=True), Switches()):
        view = view_of(hostile_graph(), hostile_graph("</text>"))
        root = ET.fromstring(svg_text(view, switches))
        tags = {element.tag.removeprefix(SVG) for element in root.iter()}
        assert tags <= {"svg", "g", "title", "polygon", "ellipse", "path", "text",
                        "polyline", "a"}  # fmt: skip
    graph = pygraphviz.AGraph(dot_text(view_of(hostile_graph()), Switches(opened=True)))
    names = [node for node in graph.nodes() if node != "n0"]
    assert len(names) == len(NAMES)
    labels = "".join(node.attr["label"] for node in graph.nodes())
    assert "<b>bold</b>" in labels
    assert "evil [label=" in labels


@pytest.mark.parametrize(
    ("size", "wanted"),
    [(None, 1.0), (0, 1.0), (64, 6.0), (32, 5.0), (1, 1.0), (99, 6.0)],
)
def test_thickness(size: int | None, wanted: float) -> None:
    assert thickness(size, 64) == wanted


def test_too_much_for_an_svg_is_refused() -> None:
    graph = decoder_graph("rollout", 40)
    edges = []
    for edge in graph.edges:  # every layer another eps of its flows: nothing folds
        layer = edge.target.split(".")[2] if ".layers." in edge.target else "0"
        number = float(layer.partition(":")[0])
        flow = replace(edge.flow, amax_floor=number)
        edges.append(replace(edge, flow=flow) if edge.flow.is_quantized else edge)
    view = view_of(replace(graph, edges=tuple(edges)))
    with pytest.raises(OutputError, match=rf"up to {MOST}.*--closed"):
        svg_text(view, OPEN)
    assert "<svg" in svg_text(view, Switches())


def test_without_pygraphviz(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygraphviz", None)
    with pytest.raises(OutputError, match=r"pip install 'jetrl-compile\[show\]'"):
        dot_text(view_of(decoder_graph("train", 2)))
