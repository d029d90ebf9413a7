"""The few numbers and lists that tell what a precision graph is."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from jetrl_compile.containment_report import Listed
from jetrl_compile.grouping import ListedGroup, group_listed
from jetrl_compile.precision_graph import GEMM_KINDS, PrecisionGraph


@dataclass(frozen=True)
class GraphSummary:
    """What `jetrl graph` prints.

    Attributes:
        meta: Where the graph comes from.
        operators: How many operators it has.
        edges: How many edges it has.
        kinds: How many operators of each kind, the most frequent first.
        gemms: For each GEMM role, how many are FP8 and how many there are.
        high_precision: GEMMs that stay in high precision, merged over layers.
        unknown: Operators of unknown kind, merged over layers.
    """

    meta: Mapping[str, str]
    operators: int
    edges: int
    kinds: Mapping[str, int]
    gemms: Mapping[str, tuple[int, int]]
    high_precision: tuple[ListedGroup, ...]
    unknown: tuple[ListedGroup, ...]


def summarize(graph: PrecisionGraph) -> GraphSummary:
    """Return the summary of a graph."""
    gemms: dict[str, tuple[int, int]] = {}
    for op in graph.operators:
        if op.kind in GEMM_KINDS:
            fp8, every = gemms.get(op.role, (0, 0))
            gemms[op.role] = (fp8 + graph.is_fp8(op), every + 1)
    kept = [Listed(op.name, (), op.reason) for op in graph.high_precision_gemms()]
    return GraphSummary(
        dict(graph.meta),
        len(graph.operators),
        len(graph.edges),
        dict(Counter(op.kind for op in graph.operators).most_common()),
        gemms,
        group_listed(kept),
        group_listed(Listed(op.name, ()) for op in graph.unknown()),
    )


def summary_json(summary: GraphSummary) -> str:
    """Return a summary as JSON text."""
    table = {"format": "jetrl.graph_summary", "version": 1, **asdict(summary)}
    table["gemms"] = {
        role: {"fp8": fp8, "all": every} for role, (fp8, every) in summary.gemms.items()
    }
    for name in ("high_precision", "unknown"):
        groups: tuple[ListedGroup, ...] = getattr(summary, name)
        table[name] = [
            {"where": group.where, "count": group.count, "reason": group.reason}
            for group in groups
        ]
    return json.dumps(table, indent=1) + "\n"
