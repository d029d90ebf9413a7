"""A view as DOT and SVG, by Graphviz.

Why Graphviz through pygraphviz: `dot` is the layered layout that others are measured
by, people who want a DOT file want to run it themselves, and pygraphviz's wheel brings
the library along, so that nothing needs to be installed beside it and no program is
started. The page's dagre has no home in Python, and the layered layout in pure Python
(grandalf) is no longer kept up.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jetrl_compile.errors import OutputError
from jetrl_compile.show import styles
from jetrl_compile.show.view import View
from jetrl_compile.show.visible import (
    Arrow,
    Box,
    Switches,
    flows_differ,
    has_findings,
    visible,
)
from jetrl_compile.show.words import DIFFERS, arrow_text, box_lines

if TYPE_CHECKING:
    import pygraphviz

MOST = 400  # boxes: a few seconds
_LARGE = 100  # boxes above which dot is told to search less
# 390 boxes with 3 random edges each: 67 s without these, 3 s with them.
_QUICK = {"nslimit": "1", "nslimit1": "1", "mclimit": "0.2"}
_FONT = "DejaVu Sans"
_ARROWS = {"triangle": "normal", "square": "box", "diamond": "diamond", "vee": "vee"}
_ENDS = ("input", "output", "parameter", "constant")
_ESCAPES = {ord("\\"): "\\\\", ord("&"): "&amp;"}
_ESCAPES |= dict.fromkeys((n for n in range(32) if n != 10), "\ufffd")


def dot_text(view: View, switches: Switches | None = None) -> str:
    """Return a view as a DOT file.

    Args:
        view: What is drawn.
        switches: What of it is shown.

    Raises:
        OutputError: pygraphviz is not installed.
    """
    return str(_graph(view, switches or Switches()).to_string())


def svg_text(view: View, switches: Switches | None = None) -> str:
    """Return a view as an SVG picture.

    Args:
        view: What is drawn.
        switches: What of it is shown.

    Raises:
        OutputError: pygraphviz is not installed, or too much is shown at once.
    """
    graph = _graph(view, switches or Switches())
    if graph.number_of_nodes() > MOST:
        raise OutputError(
            f"the SVG would have {graph.number_of_nodes():,} boxes; up to {MOST} can "
            "be laid out and read. Use --closed, fewer --phase, or --module PATH"
        )
    data: bytes = graph.draw(format="svg", prog="dot")
    return data.decode()


def _graph(view: View, switches: Switches) -> "pygraphviz.AGraph":
    try:
        import pygraphviz
    except ImportError as error:
        raise OutputError(
            "DOT and SVG need pygraphviz, which is not installed: pip install "
            "'jetrl-compile[show]'; HTML works without it"
        ) from error
    graph = pygraphviz.AGraph(directed=True, strict=False, name="precision_flow")
    title = (
        f" {DIFFERS} ".join(view.titles) if view.findings else ", ".join(view.titles)
    )
    graph.graph_attr.update(
        label=_text([title, *filter(None, [view.verdict]), *_legend(view)]),
        labelloc="t", fontname=_FONT, fontsize="12", rankdir="TB", compound="true",
    )  # fmt: skip
    graph.node_attr.update(
        shape="box", style="rounded,filled", fillcolor="white", fontname=_FONT,
        fontsize="11",
    )  # fmt: skip
    graph.edge_attr.update(fontname=_FONT, fontsize="9")
    boxes, arrows = visible(view, switches)
    if len(boxes) > _LARGE:
        graph.graph_attr.update(**_QUICK)
    clusters: dict[str, Any] = {"": graph}
    for box in boxes.values():
        differs = has_findings(view, box, switches)
        lines = _marked(box_lines(view, box), differs)
        if box.is_open:
            clusters[box.id] = clusters[box.parent].add_subgraph(
                name=f"cluster_{box.id}",
                label=_text(lines[:1]), style="filled", fillcolor=styles.BLOCK_FILL,
                color="#7a6a3a", fontname=_FONT,
            )  # fmt: skip
        else:
            clusters[box.parent].add_node(
                box.id, label=_text(lines), **_node_look(view, box, differs)
            )
    for number, arrow in enumerate(arrows):
        look = _edge_look(view, arrow)
        graph.add_edge(arrow.source, arrow.target, key=f"e{number}", **look)
    return graph


def _node_look(view: View, box: Box, differs: bool) -> dict[str, str]:
    look = {}
    if box.is_block:
        look = {"shape": "octagon", "style": "filled", "fillcolor": styles.BLOCK_FILL}
    else:
        node = view.nodes[box.number]
        known = [flag for flag in node.fp8 if flag is not None]
        if known and all(known):
            look = {"fillcolor": styles.FP8_FILL, "color": "#0072b2", "penwidth": "2"}
        elif known:
            look = {"penwidth": "3"}
        elif node.kind in _ENDS:
            look = {"shape": "ellipse", "style": "filled"}
    if len(view.titles) == 2 and box.sides != 3:
        look["style"] = f"{look.get('style', 'rounded,filled')},dashed"
    if differs:
        look |= {"color": styles.DIFFERENCE, "fontcolor": styles.DIFFERENCE}
        look |= {"peripheries": "2", "penwidth": "2"}
    return look


def _edge_look(view: View, arrow: Arrow) -> dict[str, str]:
    edges = [view.edges[number] for number in arrow.members]
    used = {view.flows[f].style for edge in edges for f in edge.flows if f is not None}
    style = styles.STYLES[used.pop() if len(used) == 1 else styles.MIXED]
    differs = any(edge.found or flows_differ(view, edge) for edge in edges)
    color = styles.DIFFERENCE if differs else style.color
    sizes = [edge.size for edge in edges if edge.size is not None]
    width = thickness(sum(sizes) if sizes else None, largest_bytes(view))
    return {
        "label": _text(_marked([arrow_text(view, arrow)], differs)),
        "color": color,
        "fontcolor": color,
        "style": style.line,
        "arrowhead": _ARROWS[style.arrow],
        "penwidth": f"{width + 2 * differs:.2f}",
    }


def largest_bytes(view: View) -> int:
    """Return the bytes of the thickest edge, weights apart."""
    sizes = (
        edge.size or 0
        for edge in view.edges
        if view.nodes[edge.source].role != "weight"
    )
    return max(sizes, default=0) or 1


def thickness(size: int | None, largest: int) -> float:
    """Return an edge's thickness in pixels: one more for each doubling of the bytes.

    Args:
        size: Bytes, None where they are not known.
        largest: Bytes of the thickest edge.
    """
    if not size:
        return 1.0
    return min(styles.WIDEST, max(1.0, styles.WIDEST + math.log2(size / largest)))


def _legend(view: View) -> list[str]:
    used = sorted({flow.style for flow in view.flows})
    words = [
        f"{styles.STYLES[n].label}: {styles.STYLES[n].line}, {styles.STYLES[n].arrow}"
        for n in used
    ]
    lines = ["; ".join(words[i : i + 2]) for i in range(0, len(words), 2)]
    return [
        *lines,
        f"thickness: bytes at {view.tokens:,} tokens, 1 pixel for each doubling",
        "blue frame: FP8 GEMM; thick black frame: GEMM in high precision",
    ]


def _marked(lines: Sequence[str], differs: bool) -> list[str]:
    return [f"{DIFFERS} {lines[0]}", *lines[1:]] if differs else list(lines)


def _text(lines: Sequence[str]) -> str:
    """Return a label as Graphviz reads it, whatever names are in it."""
    text = "\n".join(line.replace("\n", " ").translate(_ESCAPES) for line in lines)
    text = text.encode(errors="replace").decode()
    # "<...>" would be read as HTML.
    return f" {text}" if text.startswith("<") else text
