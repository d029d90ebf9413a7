"""JSON schemas of the files that `jetrl` writes, one `NAME.schema.json` for each.

`jetrl check --schema NAME` prints one.
"""

from importlib.resources import files

NAMES = (
    "containment_report",
    "graph_diff",
    "graph_summary",
    "lock_report",
    "precision_graph",
    "precision_lock",
)


def schema_text(name: str) -> str:
    """Return the text of a schema (JSON Schema, draft 2020-12).

    Args:
        name: One of `NAMES`: the format "jetrl.NAME" that the file's field says.
    """
    return files(__name__).joinpath(f"{name}.schema.json").read_text("utf-8")
