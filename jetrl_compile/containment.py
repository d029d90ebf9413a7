"""Whether the rollout graph is contained in the training forward graph, by name.

Level 1 (structure) and level 2 (flow) need the two graphs alone. The cost is linear:
canonical names fix the counterpart of every operator and edge, so nothing is searched.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from jetrl_compile.collection import collection_paused
from jetrl_compile.containment_report import (
    NEEDS_A_LIVE_PAIR,
    ContainmentReport,
    LevelResult,
    Listed,
)
from jetrl_compile.differences import (
    COMPARED_ATTRIBUTES,
    LEVELS,
    Comparison,
    Difference,
)
from jetrl_compile.exact_difference import exact_difference
from jetrl_compile.formats import Flow
from jetrl_compile.graph_diff import diff_graphs
from jetrl_compile.grouping import group_differences
from jetrl_compile.precision_graph import (
    GEMM_KINDS,
    UNKNOWN,
    Edge,
    Operator,
    PrecisionGraph,
)

__all__ = [
    "EQUAL_BITS",
    "ContainmentReport",
    "Difference",
    "LevelResult",
    "Listed",
    "check_containment",
    "diff_graphs",
    "group_differences",
]

EQUAL_BITS: tuple[frozenset[str], ...] = (frozenset({"deep_gemm", "scaled_mm"}),)
"""Numerics classes: GEMM providers whose results agree bit for bit."""
_GEMM_SIZES = ("params.N", "params.K")


def check_containment(
    rollout: PrecisionGraph,
    train: PrecisionGraph,
    *,
    strict: bool = False,
    exact: bool = False,
) -> ContainmentReport:
    """Check that every operator and edge of a rollout graph is in a training graph.

    Counterparts are found by name; kinds and the set of FP8 GEMMs must agree (level
    1), then every attribute of every edge but `saved_dtype`, and each operator's
    parameters, formula, compute dtype and GEMM numerics class (level 2). What carries
    integers and booleans only (operators of kind "index", integer inputs, and the edges
    at them) has no precision: it is counted and not compared. Nor are parameters that
    one graph does not show, and tensors that one graph alone returns. What follows from
    a difference is not reported again: an operator that is missing stands for its
    edges, a GEMM that is FP8 on one side for its operands' flows.

    Args:
        rollout: The rollout graph; only its forward part counts.
        train: The training graph; only its forward part counts.
        strict: Also compare which kernel runs each operator, whether its result is
            independent of the batch, and parameters that one graph alone shows, as
            bitwise equality needs; else these are notes.
        exact: What equal bits need beyond that: each operator that a logit depends on
            is run by a kernel that is proved to be independent of the batch
            (`jetrl_compile.kernel_claims`), of one numerics class on both sides.

    Returns:
        The report. It tells neither True nor False where a graph is empty, has no
        GEMM, or says in its meta key "incomplete" what was not captured, nor where the
        meta key "phase" of both says that they are swapped.
    """
    with collection_paused():
        return _Check(rollout, train, strict or exact, exact).run()


def same_bits(provider: str, other: str) -> bool:
    """Return whether two GEMM providers are of one numerics class."""
    return provider == other or any({provider, other} <= same for same in EQUAL_BITS)


def is_integer(dtype: str) -> bool:
    """Return whether a dtype's short name is one of integers or booleans."""
    return dtype.startswith(("int", "uint", "bool"))


class _Check:
    def __init__(
        self, rollout: PrecisionGraph, train: PrecisionGraph, strict: bool, exact: bool
    ) -> None:
        self.rollout, self.train, self.strict = rollout, train, strict
        self.exact = exact
        self.compare = Comparison()
        self.found: dict[int, list[Difference]] = {1: [], 2: []}
        self.notes: list[Difference] = []
        self.counts: Counter[str] = Counter()
        for side, graph in (("rollout", rollout), ("training", train)):
            forward = [op.kind for op in graph.operators if op.phase == "forward"]
            self.counts[f"operators in {side}"] = len(forward)
            self.counts[f"GEMMs in {side}"] = sum(
                kind in GEMM_KINDS for kind in forward
            )
        self.missing: set[str] = set()
        self.one_sided: set[str] = set()  # GEMMs that are FP8 on one side only
        self.others = {op.name: op for op in train.operators if op.phase == "forward"}
        self.no_precision = _no_precision(rollout), _no_precision(train)
        self.returned = {
            edge.source: edge
            for edge in train.edges
            if train.by_name[edge.target].kind == "output"
        }

    def run(self) -> ContainmentReport:
        if reason := self._nothing_to_compare():
            return self._report(reason)
        for op in self.rollout.operators:
            if op.phase == "forward":
                self._operator(op)
        for edge in self.rollout.edges:
            self._edge(edge)
        for side, graph in (("rollout", self.rollout), ("training", self.train)):
            if text := graph.meta.get("incomplete"):
                return self._report(f"the {side} graph is incomplete: {text}")
        return self._report("")

    def _nothing_to_compare(self) -> str:
        phases = self.rollout.meta.get("phase"), self.train.meta.get("phase")
        if phases == ("train", "rollout"):
            return (
                "the two graphs look swapped (the first says phase train, the second "
                "phase rollout); call it with the rollout graph first: jetrl check "
                "ROLLOUT TRAIN, check_containment(rollout, train)"
            )
        for side in ("rollout", "training"):
            number = self.counts[f"operators in {side}"]
            if not number:
                return f"the {side} graph has no forward operators"
            if not self.counts[f"GEMMs in {side}"]:
                return f"the {side} graph has no GEMM among its {number} operators"
        return ""

    def _operator(self, op: Operator) -> None:
        other = self.others.get(op.name)
        mine, theirs = self.no_precision
        if op.name in mine and (
            other is None or (op.name in theirs and op.kind == other.kind)
        ):
            self.counts["operators without precision, not compared"] += 1
            return
        if other is None:
            self.missing.add(op.name)
            backward = op.name in self.train.by_name
            why = "training has it in backward only" if backward else ""
            self.found[1].append(self.compare.missing_operator(op, why=why))
            return
        self.counts["operators compared"] += 1
        if op.kind != other.kind:
            self._add(1, op, "kind", op.kind, other.kind)
        is_gemm = op.kind in GEMM_KINDS and other.kind in GEMM_KINDS
        if is_gemm:
            self._fp8(op, other)
        before = len(self.found[2])
        self._params(op, other)
        if op.compute_dtype != other.compute_dtype:
            self._add(2, op, "compute_dtype", op.compute_dtype, other.compute_dtype)
        formula = self.compare.formula(op, other)
        if formula and len(self.found[2]) == before:  # else it is named already
            self.found[2].append(formula)
        if op.name in self.one_sided:
            return
        if self.exact:
            found = exact_difference(op, other)
            if found is not None:
                self.found[2].append(found)
            return
        if op.provider != other.provider and not (
            is_gemm and same_bits(op.provider, other.provider)
        ):
            note = not (is_gemm or self.strict)
            self._add(2, op, "provider", op.provider, other.provider, note=note)
        if op.batch_invariant != other.batch_invariant:
            values = op.batch_invariant, other.batch_invariant
            self._add(2, op, "batch_invariant", *values, note=not self.strict)

    def _params(self, op: Operator, other: Operator) -> None:
        """Compare parameters; what one graph does not show is a note unless strict.

        N and K of a GEMM are always known, so "unknown" there is a difference.
        Blocks that straddle the seam of a fused layer matter where a GEMM is FP8.
        """
        for found in self.compare.params(op, other):
            if found.attribute == "params.straddles" and not (
                self.rollout.is_fp8(op) or self.train.is_fp8(other)
            ):
                continue
            unknown = UNKNOWN in (found.rollout, found.train)
            size = op.kind in GEMM_KINDS and found.attribute in _GEMM_SIZES
            note = unknown and not size and not self.strict
            (self.notes if note else self.found[2]).append(found)

    def _add(
        self,
        level: int,
        op: Operator,
        attribute: str,
        left: object,
        right: object,
        *,
        note: bool = False,
        why: str = "",
    ) -> None:
        found = self.compare.values(level, op.name, attribute, left, right, why=why)
        (self.notes if note else self.found[level]).append(found)

    def _fp8(self, op: Operator, other: Operator) -> None:
        self.counts["GEMMs compared"] += 1
        mine, theirs = self.rollout.operands[op.name], self.train.operands[op.name]
        shared = [name for name in mine if name in theirs and name != "bias"]
        left = {name: mine[name].flow for name in shared}
        right = {name: theirs[name].flow for name in shared}
        fp8 = bool(left) and all(flow.is_quantized for flow in left.values())
        self.counts["FP8 GEMMs in rollout"] += fp8
        if left and fp8 != all(flow.is_quantized for flow in right.values()):
            self.one_sided.add(op.name)
            dtypes = _dtypes(left), _dtypes(right)
            self._add(1, op, "fp8", *dtypes, why=(other if fp8 else op).reason)

    def _edge(self, edge: Edge) -> None:
        target = self.rollout.by_name[edge.target]
        if target.phase != "forward":
            return
        match = self.others.get(edge.target)
        other = self.train.by_key.get(edge.key) if match else None
        mine, theirs = self.no_precision
        if "index" in (target.kind, match and match.kind) or (
            edge.source in mine and (other is None or other.source in theirs)
        ):
            self.counts["edges without precision, not compared"] += 1
            return
        missing_source = edge.source in self.missing
        if match is None or (other is None and missing_source):
            return  # the missing operator stands for its edges
        if target.kind == "output" and self.returned:
            other = self.returned.get(edge.source)
            if other is None:  # the caller chose to return something else
                self.counts["outputs of one graph only, not compared"] += 1
                return
        if other is None:
            self.found[1].append(self.compare.missing_edge(edge))
            return
        self.counts["edges compared"] += 1
        if edge.source != other.source and not missing_source:
            self.found[2].append(
                self.compare.values(
                    2, edge.target, "source", edge.source, other.source, edge.operand
                )
            )
        if edge.flow is other.flow or edge.flow == other.flow:
            return
        if edge.target in self.one_sided and edge.operand != "bias":
            return
        integers = is_integer(edge.flow.dtype) and is_integer(other.flow.dtype)
        # int32 and int64 carry the same values.
        names = COMPARED_ATTRIBUTES[1:] if integers else COMPARED_ATTRIBUTES
        self.found[2] += self.compare.flows(edge, other, names)

    def _report(self, undecided: str) -> ContainmentReport:
        differences = (*self.found[1], *self.found[2])
        levels = [self._level(number, undecided) for number in (1, 2)]
        levels += [
            LevelResult(n, "not run", NEEDS_A_LIVE_PAIR) for n in LEVELS if n > 2
        ]
        return ContainmentReport(
            tuple(levels),
            differences,
            tuple(self.notes),
            tuple(self._remarks()),
            dict(self.counts),
            _listed(
                self.rollout.high_precision_gemms(), self.train.high_precision_gemms()
            ),
            _listed(self.rollout.unknown(), self.train.unknown()),
            dict(self.rollout.meta),
            dict(self.train.meta),
            self.strict,
            undecided,
        )

    def _level(self, number: int, undecided: str) -> LevelResult:
        found = self.found[number]
        if self.train.meta.get("incomplete"):  # what is missing may be uncaptured
            found = [x for x in found if x.attribute not in ("operator", "edge")]
        if found:
            status, reason = "failed", ""
        elif undecided:
            status, reason = "not run", f"could not tell: {undecided}"
        else:
            status, reason = "passed", ""
        counts = {"differences": len(self.found[number])}
        for what in ("operators", "edges"):
            counts[what] = self.counts[f"{what} compared"]
        return LevelResult(number, status, reason, counts)

    def _remarks(self) -> Iterator[str]:
        for side, graph, other in (
            ("rollout", self.rollout, "train"),
            ("training", self.train, "rollout"),
        ):
            if graph.meta.get("phase") == other:
                yield f"the {side} graph says phase {other}: are the two swapped?"
        models = [graph.meta.get("model", "") for graph in (self.rollout, self.train)]
        if all(models) and models[0] != models[1]:
            yield f"the graphs name two models: {models[0]} and {models[1]}"
        gemms = self.counts["GEMMs in rollout"]
        if gemms and not self.counts["GEMMs compared"] and self.missing:
            first = next(
                op.name for op in self.rollout.operators if op.kind in GEMM_KINDS
            )
            other = next(
                op.name for op in self.train.operators if op.kind in GEMM_KINDS
            )
            yield (
                f"no GEMM has a counterpart (rollout begins with {first}, training "
                f"with {other}): are these graphs of one model?"
            )
        backward = sum(op.phase != "forward" for op in self.rollout.operators)
        if backward:
            yield f"{backward} backward operators of the rollout graph do not count"
        if self.strict:
            yield from self._batch_remark()

    def _batch_remark(self) -> Iterator[str]:
        mine = [
            op.name
            for op in self.rollout.operators
            if op.batch_invariant is False and op.name in self.others
        ]
        if mine:
            yield (
                f"the results of {len(mine)} operators depend on the batch (the first "
                f"is {mine[0]}): equal graphs then do not give equal bits"
            )


def _no_precision(graph: PrecisionGraph) -> frozenset[str]:
    """Return the operators that make integers or booleans only, or unread tensors."""
    found = {op.name for op in graph.operators if op.kind == "index"}
    candidates = {
        op.name: op.compute_dtype
        for op in graph.operators
        if op.kind in ("input", "constant")
    }
    dtypes: dict[str, list[str]] = {name: [] for name in candidates}
    for edge in graph.edges:
        if edge.source in dtypes:
            dtypes[edge.source].append(edge.flow.dtype)
    for name, dtype in candidates.items():
        if all(is_integer(each) for each in ([dtype] if dtype else dtypes[name])):
            found.add(name)
    return frozenset(found)


def _dtypes(flows: Mapping[str, Flow]) -> str:
    """Return "e4m3" where a GEMM's operands have one dtype, else "x e4m3, w bf16"."""
    dtypes = {flow.dtype for flow in flows.values()}
    if len(dtypes) == 1:
        return dtypes.pop()
    return ", ".join(f"{operand} {flow.dtype}" for operand, flow in flows.items())


def _listed(
    rollout: Iterable[Operator], train: Iterable[Operator]
) -> tuple[Listed, ...]:
    """Return forward operators of both graphs by name, with their sides and reasons."""
    found: dict[str, dict[str, str]] = {}
    for side, operators in (("rollout", rollout), ("train", train)):
        for op in operators:
            if op.phase == "forward":
                found.setdefault(op.name, {})[side] = op.reason
    listed = []
    for name, reasons in found.items():
        texts = {text for text in reasons.values() if text}
        reason = "".join(texts)
        if len(texts) > 1:
            reason = "; ".join(f"{side}: {text}" for side, text in reasons.items())
        listed.append(Listed(name, tuple(reasons), reason))
    return tuple(listed)
