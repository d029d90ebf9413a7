"""Graphs whose names try to become markup, code or something else."""

from jetrl_compile.formats import Flow
from jetrl_compile.precision_graph import Edge, Operator, PrecisionGraph, make_graph

NAMES = (
    "</script><script>window.owned=1</script>",
    "<!--<script>",
    '"><img src=x onerror="window.owned=1">',
    "<b>bold</b>",
    "]]>&lt;b&gt;&amp;",
    "{{scripts}} {{data}} ${window.owned=1} `${window.owned=1}`",
    "a\u2028b\u2029c\x00d\ud800e",
    'back\\N\\nslash\\" -> "x"; evil [label="y"]',
    "__proto__",
    "constructor.prototype",
    "[*] , node#x > .y",
)


def hostile_graph(tag: str = "") -> PrecisionGraph:
    """Return a graph with hostile names in each field that is a string."""
    operators = [Operator("input.0", "input")]
    edges = []
    for number, name in enumerate(NAMES):
        operators.append(
            Operator(
                f"model.layers.{number}.{name}:fprop",
                "gemm",
                name,
                ((name, name), ("K", 8), ("N", 8)),
                name,
                name + tag,
                True,
                reason=name,
                formula=name,
            )
        )
        target = operators[-1].name
        edges.append(Edge(operators[-2].name, target, name, Flow(name)))
        edges.append(
            Edge("input.0", target, f"{name}.2", Flow(name, scale_format=name))
        )
    return make_graph(operators, edges, **{name: name for name in NAMES})
