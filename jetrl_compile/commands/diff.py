"""`jetrl diff`: what differs between any two precision graphs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jetrl_compile.commands._terminal import progress, write_output
from jetrl_compile.files import refuse_inputs

if TYPE_CHECKING:
    from jetrl_compile.differences import Difference


def command(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="A precision graph.")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="Another one.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every difference as JSON.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the result here."),
    ] = None,
) -> None:
    """Compare two precision graphs in every attribute, backward part included.

    Exit status: 0 equal, 1 different, 2 an error.
    """
    refuse_inputs([output], [a, b])
    with progress("loading"):
        from jetrl_compile.graph_diff import diff_graphs
        from jetrl_compile.graph_json import read_graph
        from jetrl_compile.grouping import group_differences
    sides = (a.name, b.name) if a.name != b.name else (str(a), str(b))
    with progress(f"reading {a}") as step:
        left = read_graph(a)
        step(f"reading {b}")
        right = read_graph(b)
        step(f"comparing {len(left.operators)} operators")
        found = diff_graphs(left, right, sides=sides)
    if as_json:
        text = _json(a, b, found)
    else:
        text = "".join(f"{group}\n" for group in group_differences(found))
        plural = "" if len(found) == 1 else "s"
        text += f"{len(found)} difference{plural}\n" if found else "no differences\n"
    write_output(text, output)
    raise typer.Exit(1 if found else 0)


def _json(a: Path, b: Path, found: "list[Difference]") -> str:
    table: dict[str, Any] = {
        "format": "jetrl.graph_diff",
        "version": 1,
        "a": str(a),
        "b": str(b),
        "differences": [
            {
                "level": item.level,
                "operator": item.operator,
                "operand": item.operand,
                "attribute": item.attribute,
                "a": item.rollout,
                "b": item.train,
                "message": item.message,
            }
            for item in found
        ],
    }
    return json.dumps(table, indent=1) + "\n"
