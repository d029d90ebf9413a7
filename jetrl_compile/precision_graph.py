"""The precision graph: which operator reads which tensor, and at which precision.

Operators and edges are data: they can be printed, written as JSON, committed, compared
and drawn. Names are canonical (the module path as Hugging Face spells it, then the
role), so that graphs of different engines are compared by name, without a search.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import networkx as nx

from jetrl_compile.errors import PrecisionFlowError
from jetrl_compile.formats import Flow

KINDS = (
    "input",  # of the graph: tokens, or activations where a part is compiled
    "parameter",
    "constant",
    "gemm",
    "grouped_gemm",
    "other_gemm",  # of weights that are computed, or parts of a parameter
    "norm",
    "activation",
    "rope",
    "rope_table",
    "attention",
    "residual_add",
    "bias_add",
    "embedding",
    "cast",
    "elementwise",
    "reduction",
    "softmax",
    "routing",
    "index",  # integers and booleans only: positions, masks, cache slots
    "backward",
    "output",
    "unknown",  # kept under its own aten name
)
GEMM_KINDS = ("gemm", "grouped_gemm", "other_gemm")
OPERATOR_PHASES = ("forward", "backward")
Scalar = str | int | float | bool
UNKNOWN = "unknown"  # a parameter that the graph does not show; it is not compared


@dataclass(frozen=True, slots=True)
class Operator:
    """One step of the computation.

    Attributes:
        name: Canonical and unique: "<module path>:<role>", such as
            "model.layers.0.mlp.gate_proj:fprop" or "model.layers.0:attention".
        kind: One of `KINDS`.
        module: The module path, "" where none is known.
        params: What else fixes its result, sorted by key: eps, N and K of a GEMM, ...
        compute_dtype: Short name of the dtype it computes in: "fp32" for a GEMM that
            accumulates in FP32 or a norm in FP32, "bf16", "int64", ...
        provider: The kernel that runs it: "reference", "deep_gemm", "aten", ...
        batch_invariant: Whether a row's result is independent of the batch; None if
            unknown.
        phase: "forward" or "backward".
        reason: Why a GEMM stays in high precision; "" for all else. Not compared.
        formula: Digest of the nodes that it was made of, "<level>:<hash>": their names,
            constants and order. Containment compares two of one level; "" and another
            level say nothing. Takes no part in `==`.
    """

    name: str
    kind: str
    module: str = ""
    params: tuple[tuple[str, Scalar], ...] = ()
    compute_dtype: str = ""
    provider: str = ""
    batch_invariant: bool | None = None
    phase: str = "forward"
    reason: str = field(default="", compare=False)
    formula: str = field(default="", compare=False)

    @property
    def role(self) -> str:
        """The part of the name after the module path: "fprop", "norm", "rope.q"."""
        return self.name.rpartition(":")[2]

    def __str__(self) -> str:
        params = "".join(f" {key}={value}" for key, value in self.params)
        compute = f" in {self.compute_dtype}" if self.compute_dtype else ""
        provider = f" by {self.provider}" if self.provider else ""
        if self.batch_invariant is not None:
            provider += " (batch-invariant)" if self.batch_invariant else " (by batch)"
        reason = f"  # {self.reason}" if self.reason else ""
        return f"{self.name}: {self.kind}{params}{compute}{provider}{reason}"


@dataclass(frozen=True, slots=True)
class Edge:
    """One use of a tensor.

    Attributes:
        source: Name of the operator that makes the tensor.
        target: Name of the operator that reads it.
        operand: Which operand of `target` it is: "x", "w", "dy", "residual", "q", ...
        flow: The precision at which `target` reads it.
    """

    source: str
    target: str
    operand: str
    flow: Flow

    @property
    def key(self) -> tuple[str, str]:
        """What identifies the edge in its graph: target and operand."""
        return (self.target, self.operand)

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}.{self.operand}: {self.flow}"


@dataclass(frozen=True)
class PrecisionGraph:
    """Operators in execution order, and the edges between them.

    Attributes:
        operators: In execution order; names are unique.
        edges: Ordered by target, in the order in which it reads its operands; an edge
            is unique by `Edge.key`.
        meta: Where it comes from: "phase", "recipe", "model", "engine", ... Strings
            only; never compared.
    """

    operators: tuple[Operator, ...]
    edges: tuple[Edge, ...]
    meta: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        """Check that names are unique and edges have both ends."""
        if len(self.by_name) != len(self.operators):
            counts = Counter(operator.name for operator in self.operators)
            twice = counts.most_common(1)[0][0]
            raise PrecisionFlowError(
                f"operator name {twice!r} occurs twice; each operator needs its own"
            )
        if len(self.by_key) != len(self.edges):
            raise PrecisionFlowError(
                "two edges have the same target and operand; number the operands"
            )
        known = self.by_name
        for edge in self.edges:
            if edge.source not in known or edge.target not in known:
                raise PrecisionFlowError(
                    f"edge '{edge}' has an end that is no operator of the graph"
                )

    @cached_property
    def by_name(self) -> Mapping[str, Operator]:
        """The operators by name."""
        return MappingProxyType({op.name: op for op in self.operators})

    @cached_property
    def by_key(self) -> Mapping[tuple[str, str], Edge]:
        """The edges by `Edge.key`."""
        return MappingProxyType({edge.key: edge for edge in self.edges})

    @cached_property
    def operands(self) -> Mapping[str, Mapping[str, Edge]]:
        """For each operator name, its incoming edges by operand."""
        table: dict[str, dict[str, Edge]] = {op.name: {} for op in self.operators}
        for edge in self.edges:
            table[edge.target][edge.operand] = edge
        return MappingProxyType(table)

    def forward(self) -> "PrecisionGraph":
        """Return the part that runs in forward, as an induced subgraph."""
        kept = tuple(op for op in self.operators if op.phase == "forward")
        names = {op.name for op in kept}
        edges = (e for e in self.edges if e.source in names and e.target in names)
        return PrecisionGraph(kept, tuple(edges), self.meta)

    def gemms(self, role: str | None = None) -> Iterator[Operator]:
        """Iterate over weight GEMMs, all or those of a role ("fprop", ...)."""
        for operator in self.operators:
            if operator.kind == "gemm" and role in (None, operator.role):
                yield operator

    def is_fp8(self, operator: Operator) -> bool:
        """Return whether every operand of a GEMM (but its bias) is quantized."""
        operands = self.operands[operator.name]
        flows = [edge.flow for name, edge in operands.items() if name != "bias"]
        return bool(flows) and all(flow.is_quantized for flow in flows)

    def high_precision_gemms(self) -> list[Operator]:
        """Return the GEMMs that stay in high precision, each with its reason."""
        return [
            op for op in self.operators if op.kind in GEMM_KINDS and not self.is_fp8(op)
        ]

    def unknown(self) -> list[Operator]:
        """Return the operators of unknown kind."""
        return [op for op in self.operators if op.kind == "unknown"]

    def networkx(self) -> "nx.MultiDiGraph[str]":
        """Return a networkx graph: nodes have `operator`, edges `edge`."""
        graph: nx.MultiDiGraph[str] = nx.MultiDiGraph()
        graph.add_nodes_from((op.name, {"operator": op}) for op in self.operators)
        for edge in self.edges:
            graph.add_edge(edge.source, edge.target, key=edge.operand, edge=edge)
        return graph

    def __str__(self) -> str:
        """The stable text form: each operator, then what it reads; the goldens."""
        lines = []
        for operator in self.operators:
            lines.append(str(operator))
            lines += [
                f"  {edge.operand} <- {edge.source}: {edge.flow}"
                for edge in self.operands[operator.name].values()
            ]
        return "".join(f"{line}\n" for line in lines)


def make_graph(
    operators: Iterable[Operator], edges: Iterable[Edge], **meta: Any
) -> PrecisionGraph:
    """Return a graph from iterables; `meta` values become strings, None is left out."""
    return PrecisionGraph(
        tuple(operators),
        tuple(edges),
        {key: str(value) for key, value in meta.items() if value is not None},
    )
