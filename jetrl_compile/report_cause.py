"""Each cause in a few words: what differs, where, what follows, what to do."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jetrl_compile.containment_report import ContainmentReport
from jetrl_compile.differences import Difference
from jetrl_compile.grouping import Cause, group_causes, pattern, subject, where
from jetrl_compile.precision_graph import UNKNOWN
from jetrl_compile.recipe import GEMM_ROLES

MAX_PARTS = 4  # names of one layer's parts in a summary
_SHARE = re.compile(r"\b(\d+) of (\d+) elements\b")  # as level 3 writes it
_STORED = re.compile(r": (\S+) in rollout, \S+ in training$")
_WORST = 0.2  # a share of codes that no second rounding changes
_QUANTIZER = (
    *("granularity", "direction", "scale_format", "amax_floor", "scale_apply"),
    *("source_dtype", "scale_layout"),
)
_MEANINGS = {
    "granularity": "one side shares a scale among other elements than the other",
    "direction": "scales run along another dimension: shapes may agree, values do not",
    "scale_apply": "one side multiplies by the reciprocal of the scale, the other "
    "divides: 1.4e-4 to 5.4e-4 of the codes differ",
    "amax_floor": "a larger floor flattens blocks of small values: their codes become "
    "coarse or zero",
    "source_dtype": "one side quantizes the FP32 master weight, the other its BF16 "
    "rounding: equal at step 0, 1-3% of the codes differ after an optimizer step",
    "scale_layout": "scales are read in another memory order: shapes agree, values do "
    "not",
    "formula": "the same operator is made of other steps, constants or dimensions",
    "provider": "two kernels that need not give the same bits",
    "batch_invariant": "one side's result depends on what else is in the batch",
    "params.straddles": "a quantization block spans two parts of a fused layer, "
    "which share scales on one side only",
    "params.eps": "the norms compute other values",
    "values": "what the trainer learns from is not what the rollout sampled",
    "memory order": "equal bytes in another order are other weights",
}
_OPERANDS = (  # role of the operator, its operand, what reading another dtype means
    ("norm", "x", "{wide} normalizes the sum without rounding it to {low} first"),
    ("rope", "", "{wide} rotates in {high}, {narrow} in {low}"),
    ("activation", "", "{wide} computes the activation in {high}, {narrow} in {low}"),
    ("residual_add", "", "{wide} adds the residual in {high}, {narrow} in {low}"),
    ("bias_add", "", "{wide} adds the bias in {high}, {narrow} in {low}"),
    ("fprop", "bias", "{wide} adds the bias in {high}, {narrow} in {low}"),
    ("embedding", "weight", "{narrow} stores the embedding in {low}, {wide} in {high}"),
)
_FIXES = {  # where `differences.remedy` has none
    "params.rounded": "round to one dtype inside this operator on both sides",
    "params.eps": "give both models one config",
    "params.N": "compare models of one size; cut padding off before it is compared",
    "params.K": "compare models of one size; cut padding off before it is compared",
    "values": "look at the levels above; if they pass, at kernels that depend on the "
    "batch, and at masks and positions, which no graph shows",
    "shape": "refit the rollout model from the trainer's weights",
}
_WIDTHS = {"e4m3": 8, "e5m2": 8, "bf16": 16, "fp16": 16, "fp32": 32, "fp64": 64}


@dataclass(frozen=True, slots=True)
class Explanation:
    """A cause, for people.

    Attributes:
        cause: What it explains.
        summary: All its places in one line.
        meaning: What it does or comes from, one sentence without a full stop, or "".
        fix: What to do about it, or "".
    """

    cause: Cause
    summary: str
    meaning: str
    fix: str

    @property
    def headline(self) -> str:
        """What differs and where, in one line."""
        return f"{self.cause.title}: {self.summary}"


def explain(report: ContainmentReport) -> tuple[Explanation, ...]:
    """Return the causes of a report with their explanations, in order."""
    fp8 = report.counts.get(f"FP8 GEMMs in {report.wording.sides[0]}", 0)
    reasons = {item.name: item.reason for item in report.high_precision}
    return tuple(
        Explanation(
            cause,
            summary(cause, fp8),
            meaning(cause, reasons),
            report.wording.fix or fix(cause, reasons),
        )
        for cause in group_causes(report)
    )


def fix(cause: Cause, reasons: Mapping[str, str] | None = None) -> str:
    """Return what to do about a cause, "" where nothing is known to help.

    Args:
        cause: The cause.
        reasons: Why operators are in high precision, by name.
    """
    if cause.attribute == "bytes":
        return _bytes_finding(cause)[1]
    values = {cause.groups[0].rollout, cause.groups[0].train}
    if cause.attribute == "dtype" and values & {"e4m3", "e5m2"}:
        return "quantize this operand on both sides or on neither"
    known = _reasons(cause, reasons or {}) if cause.attribute == "fp8" else []
    if known and not any(text.startswith("recipe ") for text in known):
        return "run the passes over these layers too: compile each with fullgraph=True"
    return cause.remedy or _FIXES.get(cause.attribute, "")


def summary(cause: Cause, fp8_gemms: int = 0) -> str:
    """Return all places of a cause in one line.

    Args:
        cause: The cause.
        fp8_gemms: How many FP8 GEMMs the graph has, to say "all"; 0: not known.
    """
    own = [group for group in cause.groups if group.attribute == cause.attribute]
    cause = Cause(tuple(own), cause.wording)
    found = [item for group in own for item in group.differences]
    operators = {item.operator for item in found}
    operands = list(dict.fromkeys(item.operand for item in found))
    if (
        cause.attribute in _QUANTIZER
        and fp8_gemms == len(operators) > 1
        and all(name.rpartition(":")[2] in GEMM_ROLES for name in operators)
    ):
        reads = f" ({listed(operands)})" if all(operands) else ""
        return f"all {fp8_gemms} FP8 GEMMs{reads}, {_layers(operators)}".rstrip(", ")
    if len(cause.groups) == 1:
        return cause.groups[0].where
    rows = {_place(group.place) for group in cause.groups}
    heads = {where_head(group.where) for group in cause.groups}
    if len(heads) == 1 and len(rows) == 1 and (head := heads.pop()):
        tails = [group.where.removeprefix(f"{head}, ") for group in cause.groups]
        return f"{head}, {listed(tails)}"
    if shared := _shared(found):
        tails = [item.name.removeprefix(shared).lstrip(".:") for item in found]
        return f"{len(found)} places in {shared}: {listed(tails)}"
    places = list(dict.fromkeys(group.where for group in cause.groups))
    more = f"; and {len(places) - 2} more" if len(places) > 2 else ""
    return f"{len(found)} places: {'; '.join(places[:2])}{more}"


def meaning(cause: Cause, reasons: Mapping[str, str] | None = None) -> str:
    """Return what a cause does or comes from, "" where nothing more is known.

    Args:
        cause: The cause.
        reasons: Why operators are in high precision, by name.
    """
    group = cause.groups[0]
    before, after = cause.wording.sides
    if cause.attribute == "fp8" and cause.wording.is_change:
        return f"they are {'no longer' if group.rollout == 'e4m3' else 'now'} FP8"
    if cause.attribute == "fp8":
        side = after if group.rollout == "e4m3" else before
        known = _reasons(cause, reasons or {})
        why = f": {'; '.join(known)}" if 0 < len(known) < 3 else ""
        return f"{side} leaves them in high precision{why}"
    if cause.attribute == "scale_format":
        if "ue8m0" not in (group.rollout, group.train):
            return ""
        side = before if group.rollout == "ue8m0" else after
        return (
            f"{side} rounds scales to powers of two, which changes 87-100% of the codes"
        )
    if cause.wording.is_change:
        return ""
    if cause.attribute != "operator" and UNKNOWN in (group.rollout, group.train):
        side = before if group.rollout == UNKNOWN else after
        return f"the graph of {side} does not show it"
    if cause.attribute == "params.rounded":
        return _dtype_meaning(cause)
    if cause.attribute in ("dtype", "compute_dtype"):
        return _dtype_meaning(cause)
    if cause.attribute == "bytes":
        return _bytes_finding(cause)[0]
    if cause.attribute in ("params.N", "params.K"):
        return (
            "the two GEMMs have other sizes (N: outputs, K: inputs): a padded or "
            "sharded weight on one side"
        )
    return _MEANINGS.get(cause.attribute, "")


def where_head(text: str) -> str:
    """Return "36 layers (model.layers.0-35)" of a text that `where` made, or ""."""
    match = re.match(r"(?:\d+ places in )?\d+ (?:layer|place)s? \([^()\s]*\)", text)
    return match.group() if match else ""


def listed(parts: Iterable[str], most: int = MAX_PARTS) -> str:
    """Return "a, b and c", or "a, b and 5 more"."""
    items = list(dict.fromkeys(parts))
    if len(items) > most:
        return f"{', '.join(items[: most - 1])} and {len(items) - most + 1} more"
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def _reasons(cause: Cause, reasons: Mapping[str, str]) -> list[str]:
    """Why the operators of a cause are in high precision, each reason once."""
    names = [item.operator for group in cause.groups for item in group.differences]
    return sorted({reasons.get(name, "") for name in names} - {""})


def _layers(names: Iterable[str]) -> str:
    """Return the layers that operators are in, without the parts: "2 layers (...)"."""
    numbered = [name for name in names if "*" in pattern(name)]
    prefixes: dict[str, list[str]] = {}
    for name in numbered:
        place = pattern(name).partition("*")[0]
        number = name[len(place) :].partition(".")[0].partition(":")[0]
        prefixes.setdefault(place, []).append(place + number)
    texts = [where(sorted(set(found), key=_number)) for found in prefixes.values()]
    return ", ".join(texts)


def _shared(found: Sequence[Difference]) -> str:
    """The innermost layer that all are in ("model.layers.3"), or ""."""
    paths = [item.operator.rpartition(":")[0].split(".") for item in found]
    columns = itertools.takewhile(lambda x: len({*x}) == 1, zip(*paths, strict=False))
    parts = [column[0] for column in columns]
    return ".".join(parts) if any(part.isdecimal() for part in parts) else ""


def _number(name: str) -> int:
    last = name.rpartition(".")[2]
    return int(last) if last.isdecimal() else 0


def _place(place: str) -> str:
    return place.partition("*")[0]


def _dtype_meaning(cause: Cause) -> str:
    """What reading or computing in another dtype means at all places."""
    before, after = cause.wording.sides
    values = cause.groups[0].rollout or "", cause.groups[0].train or ""
    if not all(value in _WIDTHS for value in values):
        return ""
    pairs = zip(values, (before, after), strict=True)
    (low, narrow), (high, wide) = sorted(pairs, key=lambda pair: _WIDTHS[pair[0]])
    words = {"low": low.upper(), "high": high.upper(), "narrow": narrow, "wide": wide}
    if cause.attribute == "params.rounded":
        return (
            "inside (a norm before its weight, SiLU before the product) {wide} keeps "
            "{high} where {narrow} rounds to {low}"
        ).format(**words)
    meanings = set()
    for group in cause.groups:
        first = group.differences[0]
        role = first.operator.rpartition(":")[2].partition(".")[0]
        for kind, operand, text in _OPERANDS:
            if role == kind and (operand == first.operand or not operand):
                meanings.add(text.format(**words))
                break
        else:
            meanings.add("")
    if len(meanings) == 1:
        return meanings.pop()
    first = cause.groups[0].differences[0]
    return f"the first in execution order is {first.name}"


def _bytes_finding(cause: Cause) -> tuple[str, str]:
    """What stored bytes that differ come from, codes, scales or both; what to do."""
    codes: dict[str, float] = {}
    scales: dict[str, float] = {}
    plain = 0  # tensors that are not quantized
    bad = ""  # a scale that no floor allows
    for group in cause.groups:
        for item in group.differences:
            module, _, tensor = subject(item).rpartition(".")
            match = _SHARE.search(item.message)
            share = int(match[1]) / max(int(match[2]), 1) if match else 0.0
            value = _STORED.search(item.message)
            if "scale" not in tensor:
                codes[module] = share
                plain += not item.operand
                continue
            scales[module] = share
            if value and value[1] in ("0", "-0", "nan", "inf", "-inf"):
                bad = value[1]
    sync = "refit the rollout model from the trainer's weights, rounded to BF16"
    if bad:
        return (
            f"a scale is {bad}, where the floor of 1e-10 (of an all-zero block) gives "
            "a finite one",
            "make scales as max(amax, 1e-10) / 448 on both sides",
        )
    if plain == len(codes) and not scales:
        return "parameters that are not quantized are not the trainer's", sync
    if plain:
        return (
            "codes and other parameters differ, as with weights of another step",
            sync,
        )
    if scales and not codes:
        return (
            "scales differ while the codes agree, as when scales are rounded to powers "
            "of two after the codes were made",
            f"make codes and scales in one step: {sync}",
        )
    if codes and not scales and max(codes.values()) > _WORST:
        return (
            "codes differ while the scales agree, as after a copy in another memory "
            "layout",
            f"copy into the storage that the rollout model made: {sync}",
        )
    if codes and max(codes.values()) <= _WORST:
        if len(codes) == 1:
            return "a few codes of one tensor differ, as after a flipped bit", sync
        return (
            "a small share of the codes differs, as when one side quantizes FP32 "
            "masters, the other their BF16 rounding",
            "round the master weight to BF16 before it is quantized, on both sides",
        )
    return (
        "codes and scales differ, as with weights of another step",
        sync,
    )
