"""What must be reached, as data; `jetrl bench ... --check` compares.

Ratios hold on one H200. A target is checked where its case was measured.
"""

from dataclasses import dataclass

from jetrl_compile.bench.models import BUILT_IN
from jetrl_compile.bench.results import PEAK_OVER, Results
from jetrl_compile.bench.steps import FORWARD, TRAIN
from jetrl_compile.errors import ProviderError

AT_LEAST, AT_MOST = "at least", "at most"


@dataclass(frozen=True)
class Target:
    """A number that must be reached.

    Attributes:
        kind: Of `Results`.
        model: A built-in shape's name.
        case: Of a row.
        way: Of a row.
        value: A name in the row's values.
        bound: "at least" or "at most".
        number: The bound.
    """

    kind: str
    model: str
    case: str
    way: str
    value: str
    bound: str
    number: float


@dataclass(frozen=True)
class Verdict:
    """A target and what was measured.

    Attributes:
        target: The target.
        measured: The number; None where its row or its value is missing.
        reason: Why it is missing.
    """

    target: Target
    measured: float | None
    reason: str = ""

    @property
    def reached(self) -> bool:
        """Whether the target is reached; a missing number does not reach it."""
        if self.measured is None:
            return False
        if self.target.bound == AT_LEAST:
            return self.measured >= self.target.number
        return self.measured <= self.target.number


def _over(model: str, case: str, *bounds: tuple[str, float]) -> list[Target]:
    return [
        Target("stack", model, case, "jetrl", f"over {base}", AT_LEAST, number)
        for base, number in bounds
    ]


_8B = "qwen3-8b"
# Checked where it is asked for: --way saved_e4m3:saved_gate_up=e4m3
SMALL = "saved_e4m3"
EXACT = "exact"  # the same: --way exact:exact=true
OPTIONAL: dict[str, dict[str, object]] = {
    SMALL: {"saved_gate_up": "e4m3"},
    EXACT: {"exact": True},
}
_DEFAULT = ("recipe", "jetrl")
TARGETS: tuple[Target, ...] = (
    *_over(_8B, f"{TRAIN} 4x2048", ("compile", 1.40), ("eager", 1.86)),
    *_over(_8B, f"{FORWARD} 4x2048", ("compile", 1.40), ("eager", 1.87)),
    *_over(_8B, f"{TRAIN} 1x8192", ("compile", 1.35), ("eager", 1.72)),
    *_over("llama3.1-8b", f"{TRAIN} 4x2048", ("compile", 1.40)),
    *_over("qwen2.5-7b", f"{TRAIN} 4x2048", ("compile", 1.40)),
    *_over("qwen3-32b", f"{FORWARD} 4x2048", ("compile", 1.45)),
    Target("stack", _8B, f"{TRAIN} 4x2048", "jetrl", PEAK_OVER, AT_MOST, 1.0),
    Target("stack", _8B, f"{TRAIN} 4x2048", SMALL, PEAK_OVER, AT_MOST, 0.88),
    # At most 5% slower.
    Target("stack", _8B, f"{TRAIN} 4x2048", EXACT, "over jetrl", AT_LEAST, 1 / 1.05),
    *(
        Target(
            "layer", model, f"{TRAIN} 4x2048", "jetrl", "over torchao", AT_LEAST, 1.25
        )
        for model in (_8B, "llama3.1-8b", "qwen2.5-7b", "qwen3-32b")
    ),
    Target(
        "kernels",
        _8B,
        "wgrad all M=8192, recipe jetrl",
        "deep_gemm",
        "TFLOP/s",
        AT_LEAST,
        1250,
    ),
)
# Each measured kernel at 8192 tokens must reach this part of the copy's bandwidth.
OF_COPY, OF_COPY_AT_LEAST, OF_COPY_TOKENS = "of copy", 0.80, "8192x"
# Of these as many layers are measured as fit; of all others every layer.
CUT = ("qwen3-32b",)


def check_model(kind: str, model: str) -> None:
    """Check that a model has targets, before minutes are spent on measuring it.

    Args:
        kind: Of `Results`.
        model: A built-in shape's name, or a config folder.

    Raises:
        ProviderError: It has none.
    """
    models = dict.fromkeys(target.model for target in TARGETS if target.kind == kind)
    if model not in models:
        raise ProviderError(
            f"no target of jetrl bench {kind} is set for {model}; leave --check out, "
            f"or measure one of {', '.join(models)}"
        )


def verdicts(results: Results) -> list[Verdict]:
    """Return what became of each target of a run's kind and model.

    A target whose case was not asked for (another shape) is left out; one whose way
    failed is not reached.
    """
    cases = {row.case for row in results.rows}
    found = []
    for target in (*TARGETS, *_copy_targets(results)):
        if (target.kind, target.model) != (results.kind, results.model):
            continue
        if target.case not in cases:
            continue
        why = _not_comparable(target, results)
        row = results.find(target.case, target.way)
        if row is None and target.way in OPTIONAL:
            continue
        if why:
            found.append(Verdict(target, None, why))
        elif row is None:
            found.append(Verdict(target, None, f"{target.way} was not measured"))
        elif row.failed:
            found.append(Verdict(target, None, row.note))
        else:
            measured = row.values.get(target.value)
            reason = "" if measured is not None else f"no {target.value}"
            found.append(Verdict(target, measured, reason))
    return found


def _not_comparable(target: Target, results: Results) -> str:
    """Return why a run is not what a target is about, or ""."""
    layers = results.settings.get("layers")
    if target.kind == "stack" and layers is not None and target.model not in CUT:
        every = BUILT_IN[target.model]["num_hidden_layers"]
        if layers != every:
            return f"{layers} of {every} layers were measured"
    compared = {target.way, target.value.rpartition("over ")[2]}
    for way in results.settings.get("ways", ()):
        options = {k: v for k, v in way["options"].items() if (k, v) != _DEFAULT}
        wanted = OPTIONAL.get(way["name"], {})
        if way["name"] in compared and options != wanted:
            return f"{way['name']} was measured with other options"
    return ""


def _copy_targets(results: Results) -> list[Target]:
    return [
        Target(
            results.kind,
            results.model,
            row.case,
            row.way,
            OF_COPY,
            AT_LEAST,
            OF_COPY_AT_LEAST,
        )
        for row in results.rows
        if results.kind == "kernels"
        and row.case.startswith(OF_COPY_TOKENS)
        and row.way not in ("copy", "reference")
        and (OF_COPY in row.values or row.failed)
    ]
