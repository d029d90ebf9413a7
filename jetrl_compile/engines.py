"""Inference engines that commands know by name: the entry points of a group.

An integration names its module under `jetrl_compile.engines`. It has `graph(folder,
recipe=..., progress=...)`, which returns the precision graph of the engine's model, and
`audit(trainer, recipe=..., ...)`, which returns an `EngineAudit`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from torch import Tensor

from jetrl_compile.containment_report import ContainmentReport
from jetrl_compile.errors import ModelError, one_line

GROUP = "jetrl_compile.engines"


@dataclass(frozen=True)
class EngineAudit:
    """What the audit of a live engine found.

    Attributes:
        report: Containment at all four levels.
        log_prob_gap: |rollout - train| of each sampled token, (B, T), FP32, nats; NaN
            where a sequence is shorter.
        metrics: Mismatch metrics under verl's names.
        equal: The share of sampled tokens, 0 to 1, whose log-probs are equal in bits.
    """

    report: ContainmentReport
    log_prob_gap: Tensor
    metrics: Mapping[str, float]
    equal: float = 0.0


def engine_names() -> Sequence[str]:
    """Return the engines that are known."""
    return sorted({point.name for point in metadata.entry_points(group=GROUP)})


def load_engine(name: str) -> Any:
    """Return the module of an engine.

    Raises:
        ModelError: No engine has that name, or it cannot be imported here.
    """
    for point in metadata.entry_points(group=GROUP):
        if point.name != name:
            continue
        try:
            return point.load()
        except ImportError as error:
            raise ModelError(
                f"engine {name!r} cannot be used here: {one_line(error)}; install it "
                f"with pip install 'jetrl-compile[{name}]'"
            ) from error
    raise ModelError(
        f"engine {name!r} is unknown; known: {', '.join(engine_names()) or 'none'}"
    )
