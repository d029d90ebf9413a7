"""What a precision lock holds of a graph: its facts, and how they changed.

Left out is what says nothing of precision or varies with versions of torch: masks and
positions, parameters and inputs (edges name them), formulas and reasons, and of the
backward part all but the GEMMs and the flows that they read.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from jetrl_compile.differences import FLOW_ATTRIBUTES, Comparison, Difference
from jetrl_compile.formats import Flow
from jetrl_compile.precision_graph import GEMM_KINDS, Edge, Operator, PrecisionGraph

_NO_FACT = ("index", "parameter", "input", "constant", "backward")
_OPERATOR = ("compute_dtype", "provider", "batch_invariant")
SIDES = ("the lock", "the graph")


@dataclass(frozen=True)
class Facts:
    """A graph's facts.

    Attributes:
        operators: By name, in execution order where it is known. Without modules,
            reasons and formulas.
        reads: For each operator, its edges by operand. In the backward part their
            source is "".
    """

    operators: Mapping[str, Operator]
    reads: Mapping[str, Mapping[str, Edge]]

    def is_fp8(self, name: str) -> bool:
        """Return whether every operand of a GEMM (but its bias) is quantized."""
        flows = [edge.flow for key, edge in self.reads[name].items() if key != "bias"]
        return bool(flows) and all(flow.is_quantized for flow in flows)

    def gemms(self) -> dict[str, tuple[int, int]]:
        """Return for each GEMM role how many are FP8 and how many there are."""
        found: dict[str, tuple[int, int]] = {}
        for op in self.operators.values():
            if op.kind in GEMM_KINDS:
                fp8, every = found.get(op.role, (0, 0))
                found[op.role] = (fp8 + self.is_fp8(op.name), every + 1)
        return dict(sorted(found.items()))


def facts_of(graph: PrecisionGraph) -> Facts:
    """Return the facts of a graph."""
    operators: dict[str, Operator] = {}
    reads: dict[str, dict[str, Edge]] = {}
    for op in graph.operators:
        backward = op.phase != "forward"
        if op.kind in _NO_FACT or (backward and op.kind not in GEMM_KINDS):
            continue
        params = tuple(sorted(op.params, key=lambda pair: pair[0]))
        operators[op.name] = replace(
            op, module="", params=params, reason="", formula=""
        )
        reads[op.name] = {
            edge.operand: replace(edge, source="") if backward else edge
            for edge in graph.operands[op.name].values()
            if not _is_integer(edge.flow)
            and (backward or graph.by_name[edge.source].kind != "index")
        }
    return Facts(operators, reads)


def changed_facts(lock: Facts, now: Facts) -> list[Difference]:
    """Compare the facts of a lock with those of a graph.

    What follows from a difference is not told again: a new or missing operator stands
    for its edges, a GEMM that became or is no longer FP8 for its operands' flows and
    its kernel.

    Returns:
        Differences in the execution order of the graph, then what the lock alone has.
        `Difference.rollout` is the lock's value, `Difference.train` the graph's.
    """
    compare = Comparison(SIDES, remedies=False)
    found: list[Difference] = []
    for name, op in now.operators.items():
        old = lock.operators.get(name)
        if old is None:
            found.append(compare.missing_operator(op, absent=0))
        else:
            found += _changed(compare, lock, now, old, op)
    found += [
        compare.missing_operator(op, absent=1)
        for name, op in lock.operators.items()
        if name not in now.operators
    ]
    return found


def _changed(
    compare: Comparison, lock: Facts, now: Facts, old: Operator, op: Operator
) -> Iterator[Difference]:
    name = op.name
    if op.kind != old.kind:
        yield compare.values(1, name, "kind", old.kind, op.kind)
    if op.phase != old.phase:
        yield compare.values(1, name, "phase", old.phase, op.phase)
    moved = (
        op.kind in GEMM_KINDS
        and old.kind in GEMM_KINDS
        and lock.is_fp8(name) != now.is_fp8(name)
    )
    if moved:
        dtypes = (_dtypes(facts.reads[name]) for facts in (lock, now))
        yield compare.values(1, name, "fp8", *dtypes)
    yield from compare.params(old, op)
    for attribute in _OPERATOR:
        left, right = getattr(old, attribute), getattr(op, attribute)
        if left != right and not (moved and attribute != "compute_dtype"):
            yield compare.values(2, name, attribute, left, right)
    before, after = lock.reads[name], now.reads[name]
    for operand, edge in after.items():
        match = before.get(operand)
        if match is None:
            yield compare.missing_edge(edge, absent=0)
            continue
        if edge.source != match.source:
            sources = match.source, edge.source
            yield compare.values(2, name, "source", *sources, operand)
        if not moved or operand == "bias":
            yield from compare.flows(match, edge, FLOW_ATTRIBUTES)
    for operand, edge in before.items():
        if operand not in after:
            yield compare.missing_edge(edge, absent=1)


def compared(lock: Facts, now: Facts) -> dict[str, int]:
    """Return how much of two sets of facts has a counterpart, by name."""
    shared = [name for name in now.operators if name in lock.operators]
    counts: Counter[str] = Counter(operators=len(shared), edges=0)
    for name in shared:
        counts["edges"] += len(now.reads[name].keys() & lock.reads[name].keys())
    return dict(counts)


def _dtypes(reads: Mapping[str, Edge]) -> str:
    """Return "e4m3" where a GEMM's operands have one dtype, else "x e4m3, w bf16"."""
    dtypes = {key: edge.flow.dtype for key, edge in reads.items() if key != "bias"}
    if len(set(dtypes.values())) == 1:
        return next(iter(dtypes.values()))
    return ", ".join(f"{key} {dtype}" for key, dtype in dtypes.items())


def _is_integer(flow: Flow) -> bool:
    return flow.dtype.startswith(("int", "uint", "bool"))
