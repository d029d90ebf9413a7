"""How far a trainer and a rollout model are apart, tensor by tensor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorGap:
    """How many elements of one tensor are not the same on both sides.

    Attributes:
        name: Of a stored tensor ("model.layers.0.mlp.up_proj.weight"), or of the
            operator that made it.
        differ: Elements whose bits differ; all where shape or dtype do.
        total: Elements in all.
        deviation: The largest absolute difference over the largest absolute value of
            the trainer's tensor; None where it was not computed.
    """

    name: str
    differ: int
    total: int
    deviation: float | None = None

    @property
    def share(self) -> float:
        """The share of elements that differ, 0 to 1."""
        return self.differ / self.total if self.total else 0.0


def operator_gaps(
    order: Sequence[str], train: Mapping[str, Tensor], rollout: Mapping[str, Tensor]
) -> tuple[TensorGap, ...]:
    """Compare the recorded value of each operator.

    Args:
        order: Operator names in execution order; those recorded on both sides count.
        train: The trainer's values.
        rollout: The rollout model's.
    """
    found = []
    for name in order:
        if name not in train or name not in rollout:
            continue
        left, right = train[name], rollout[name]
        if left.shape != right.shape or left.dtype != right.dtype:
            found.append(TensorGap(name, left.numel(), left.numel()))
            continue
        differ = ~((left == right) | (left.isnan() & right.isnan()))
        count = int(differ.sum())
        deviation = _deviation(left, right) if count else 0.0
        found.append(TensorGap(name, count, left.numel(), deviation))
    return tuple(found)


def _deviation(left: Tensor, right: Tensor) -> float:
    a, b = left.double(), right.double()
    largest = float(a.abs().max())
    return float((a - b).abs().max()) / largest if largest else float("inf")
