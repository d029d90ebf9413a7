"""One difference between two precision graphs, and what to do about it."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from jetrl_compile.formats import Flow
from jetrl_compile.precision_graph import Edge, Operator

LEVELS = {1: "structure", 2: "flow", 3: "bytes", 4: "logits"}
FLOW_ATTRIBUTES = tuple(field.name for field in fields(Flow))
COMPARED_ATTRIBUTES = tuple(name for name in FLOW_ATTRIBUTES if name != "saved_dtype")

_REMEDIES = {
    "operator": "run the same model code and the same passes on both sides",
    "edge": "run the same model code and the same passes on both sides",
    "kind": "run the same model code and the same passes on both sides",
    "fp8": "name the module in both recipes or in neither, by its exact path",
    "dtype": "round to one dtype before this operator on both sides",
    "granularity": "use one recipe on both sides",
    "direction": "use one recipe on both sides",
    "scale_format": "use one scale format: UE8M0 against FP32 changes 87-100% of the "
    "codes (vLLM: VLLM_USE_DEEP_GEMM_E8M0=0 keeps FP32)",
    "amax_floor": "use one floor on both sides; the contract's is 1e-10",
    "scale_apply": "divide on both sides: multiplying by the reciprocal is another "
    "quantizer",
    "source_dtype": "round the master weight to BF16 before it is quantized, on both "
    "sides",
    "scale_layout": "write the scales in one memory order",
    "source": "run the same passes on both sides, so that it reads the same tensor",
    "compute_dtype": "compute in one dtype on both sides",
    "params.straddles": "quantize each part of the fused layer by blocks of its own",
    "formula": "run the same model code and the same passes on both sides",
    "provider": "run providers of one numerics class on both sides",
    "batch_invariant": "run kernels that are independent of the batch on both sides",
    "bytes": "refit the rollout model from the trainer's BF16-rounded weights",
    "memory order": "copy into the storage that the rollout model made",
}
_LABELS = {
    "fp8": "GEMM precision",
    "compute_dtype": "compute dtype",
    "batch_invariant": "batch invariance",
    "scale_format": "scale format",
    "amax_floor": "amax floor",
    "scale_apply": "scale application",
    "source_dtype": "dtype of what is quantized",
    "scale_layout": "scale layout",
    "saved_dtype": "dtype saved for backward",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One attribute of one operator or edge that is not the same on both sides.

    Attributes:
        level: 1 structure, 2 flow, 3 bytes, 4 logits.
        operator: Name of the operator, or the target of the edge.
        attribute: "operator" or "edge" where it is missing; "kind" or "fp8" (level 1);
            an attribute of `Flow`, "source", "compute_dtype", "formula",
            "provider", "batch_invariant" or "params.<key>" (level 2).
        rollout: The value in the rollout graph, None where it has none.
        train: The value in the training graph, None where it has none.
        message: One line: what, both values, and the remedy where there is one.
        operand: Which operand of the operator the edge is; "" for the operator itself.
    """

    level: int
    operator: str
    attribute: str
    rollout: str | None
    train: str | None
    message: str
    operand: str = ""

    @property
    def name(self) -> str:
        """The operator's name, for an edge with ".<operand>" behind it."""
        return f"{self.operator}.{self.operand}" if self.operand else self.operator

    @property
    def label(self) -> str:
        """What the attribute is called in sentences."""
        return attribute_label(self.attribute)

    def __str__(self) -> str:
        return self.message


def attribute_label(attribute: str) -> str:
    """Return what an attribute is called in sentences: "scale format", "param eps"."""
    if attribute.startswith("params."):
        return f"param {attribute.removeprefix('params.')}"
    return _LABELS.get(attribute, attribute)


def remedy(attribute: str) -> str:
    """Return what to do about a difference in an attribute, "" where nothing helps."""
    return _REMEDIES.get(attribute, "")


def value_text(value: object, other: object = None) -> str | None:
    """Return a value as text; by its repr where it else looked like the other one."""
    if value is None:
        return None
    return str(value) if str(value) != str(other) else repr(value)


class Comparison:
    """Makes the differences of a pair of graphs.

    Attributes:
        sides: What messages call the two graphs.
        remedies: Whether messages say what to do.
    """

    def __init__(
        self, sides: tuple[str, str] = ("rollout", "train"), *, remedies: bool = True
    ) -> None:
        self.sides = sides
        self.remedies = remedies

    def values(
        self,
        level: int,
        operator: str,
        attribute: str,
        rollout: object,
        train: object,
        operand: str = "",
        why: str = "",
    ) -> Difference:
        """Return the difference between two values, None for one that is not there.

        Args:
            level: 1 to 4.
            operator: Name of the operator, or the target of the edge.
            attribute: As `Difference.attribute`.
            rollout: The value in the first graph.
            train: The value in the second graph.
            operand: Of an edge.
            why: What explains the difference, for the message.
        """
        left, right = value_text(rollout, train), value_text(train, rollout)
        where = f"{operator}.{operand}" if operand else operator
        first, second = (
            f"{'not set' if text is None else text or 'not known'} in {side}"
            for text, side in zip((left, right), self.sides, strict=True)
        )
        message = f"{where}: {attribute_label(attribute)} is {first}, {second}"
        message += f" ({why})" if why else ""
        message += self._remedy(attribute)
        return Difference(level, operator, attribute, left, right, message, operand)

    def missing_operator(
        self, operator: Operator, *, absent: int = 1, why: str = ""
    ) -> Difference:
        """Return the difference of an operator that one graph lacks.

        Args:
            operator: What the other graph has.
            absent: Which graph lacks it, 0 or 1.
            why: What explains it, for the message.
        """
        kind = operator.kind
        what = "of unknown kind" if kind == "unknown" else kind.replace("_", " ")
        message = (
            f"{operator.name} ({what}) is in {self.sides[1 - absent]} but not in "
            f"{self.sides[absent]}"
        )
        message += f": {why}" if why else ""
        message += self._remedy("operator")
        left, right = (None, kind) if absent == 0 else (kind, None)
        return Difference(1, operator.name, "operator", left, right, message)

    def missing_edge(self, edge: Edge, *, absent: int = 1) -> Difference:
        """Return the difference of an edge that one graph lacks.

        Args:
            edge: What the other graph has.
            absent: Which graph lacks it, 0 or 1.
        """
        message = (
            f"{edge.target}.{edge.operand} (from {edge.source}) is read in "
            f"{self.sides[1 - absent]} but not in {self.sides[absent]}"
            f"{self._remedy('edge')}"
        )
        left, right = (None, edge.source) if absent == 0 else (edge.source, None)
        return Difference(1, edge.target, "edge", left, right, message, edge.operand)

    def flows(
        self,
        left: Edge,
        right: Edge,
        attributes: tuple[str, ...] = COMPARED_ATTRIBUTES,
    ) -> Iterator[Difference]:
        """Yield the differences between the flows of two matched edges."""
        if left.flow is right.flow or left.flow == right.flow:
            return
        for name in attributes:
            a, b = getattr(left.flow, name), getattr(right.flow, name)
            if a != b:
                yield self.values(2, left.target, name, a, b, left.operand)

    def params(self, left: Operator, right: Operator) -> Iterator[Difference]:
        """Yield the differences between the parameters of two matched operators."""
        if left.params == right.params:
            return
        a: dict[str, Any] = dict(left.params)
        b: dict[str, Any] = dict(right.params)
        for key in dict.fromkeys((*a, *b)):
            if a.get(key) != b.get(key):
                attribute = f"params.{key}"
                yield self.values(2, left.name, attribute, a.get(key), b.get(key))

    def formula(self, left: Operator, right: Operator) -> Difference | None:
        """Return the difference of two formulas of one level, None where there is none.

        A formula that one graph does not have, or has of another level, says nothing.
        """
        a, b = left.formula, right.formula
        if not a or not b or a == b or a.partition(":")[0] != b.partition(":")[0]:
            return None
        first, second = self.sides
        message = (
            f"{left.name}: {first} and {second} compute another formula here ({a} and "
            f"{b}){self._remedy('formula')}"
        )
        return Difference(2, left.name, "formula", a, b, message)

    def _remedy(self, attribute: str) -> str:
        hint = remedy(attribute) if self.remedies else ""
        return f"; {hint}" if hint else ""
