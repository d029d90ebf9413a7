"""`jetrl show`: a picture of the precision flow, or of how two graphs differ."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from jetrl_compile.commands._terminal import progress


class Phase(str, Enum):
    """Part of a step; dgrad stands for all of backward but wgrad."""

    FORWARD = "forward"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


def command(
    graph: Annotated[
        Path, typer.Argument(metavar="GRAPH.json", help="A precision graph.")
    ],
    other: Annotated[
        Path | None,
        typer.Argument(metavar="[OTHER.json]", help="Another one, to compare with."),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="flow.html, flow.svg or flow.dot: the ending says what is written.",
        ),
    ] = Path("flow.html"),
    module: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="Only this module, by its path or by a glob."
        ),
    ] = None,
    phase: Annotated[
        list[Phase] | None,
        typer.Option(help="Show only this, at first; repeat it for more."),
    ] = None,
    opened: Annotated[
        bool | None,
        typer.Option(
            "--open/--closed",
            help="Repeated layers open or closed; by default open in SVG and DOT.",
        ),
    ] = None,
    weights: Annotated[bool, typer.Option(help="Show weights as boxes.")] = False,
    tokens: Annotated[
        int, typer.Option(min=1, help="Of the batch, for the thickness of edges.")
    ] = 4096,
) -> None:
    """Draw one graph, or two with their differences.

    A rollout graph and a training graph are compared as `jetrl check` does, any other
    two as `jetrl diff` does. Repeated layers are drawn once. Exit status: 0 drawn, 2 an
    error; differences change nothing.
    """
    with progress("loading"):
        from jetrl_compile.graph_json import read_graph
        from jetrl_compile.show.output import FORMATS, check_ending, write_picture
        from jetrl_compile.show.paired import narrow, pair_graphs
        from jetrl_compile.show.view import make_view
        from jetrl_compile.show.visible import Switches, default_phases, visible
    check_ending(output)
    paths = [graph] if other is None else [graph, other]
    titles = [path.name for path in paths]
    if len(set(titles)) < len(titles):
        titles = [str(path) for path in paths]
    with progress(f"reading {graph}") as step:
        graphs = [read_graph(path) for path in paths]
        step("comparing" if other else "folding repeated layers")
        paired = pair_graphs(graphs, titles)
        if module is not None:
            paired = narrow(paired, module)
        view = make_view(paired, tokens=tokens)
        step(f"writing {output}")
        chosen = tuple(part.value for part in phase or ()) or default_phases(view)
        if opened is None:
            opened = output.suffix.lower() != ".html"
        switches = Switches(chosen, opened=opened, weights=weights)
        write_picture(view, output, switches=switches)
        drawn, _ = visible(view, switches)
    if not drawn:
        parts = ", ".join(chosen) or "forward, dgrad and wgrad"
        typer.echo(f"nothing is drawn: {graph} has no operator in {parts}", err=True)
    text = f"{FORMATS[output.suffix.lower()]} of {' and '.join(view.titles)}"
    text += f" ({view.verdict})" if view.verdict else ""
    typer.echo(f"{text} is in {output}")
