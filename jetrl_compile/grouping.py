"""Differences merged over repeated layers, the cause first."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jetrl_compile.containment_report import (
    WORDING,
    ContainmentReport,
    Listed,
    Wording,
)
from jetrl_compile.differences import Difference, attribute_label, remedy

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a path component that is a number
_LAYER_WORDS = ("layers", "layer", "blocks", "block", "h")
_NAMED = ("source", "edge")  # attributes whose values are operator names
# Within a level, what makes other differences comes before what follows from it: the
# quantizer and dtypes before formulas, these before kernels.
_RANKS = {"operator": 1, "edge": 1, "formula": 2, "provider": 3, "batch_invariant": 4}
_LAST = ("saved_dtype",)
_OF_SCALES = (
    *("granularity", "direction", "scale_format", "amax_floor", "scale_apply"),
    *("source_dtype", "scale_layout"),
)


@dataclass(frozen=True, slots=True)
class DifferenceGroup:
    """Equal differences at one place of repeated layers.

    Attributes:
        level: As of each difference.
        attribute: As of each difference.
        rollout: The value, with layer numbers as "*" where it is a name.
        train: The same of the training graph.
        place: The name with layer numbers as "*":
            "model.layers.*.mlp.up_proj:fprop.x".
        where: The same for people:
            "36 layers (model.layers.0-35), mlp.up_proj:fprop.x".
        differences: In execution order; never empty.
    """

    level: int
    attribute: str
    rollout: str | None
    train: str | None
    place: str
    where: str
    differences: tuple[Difference, ...]

    @property
    def message(self) -> str:
        """The first difference's message, its name replaced by `where`."""
        first = self.differences[0]
        if len(self.differences) == 1:
            return first.message
        text = first.message.replace(subject(first), self.where, 1)
        if text != first.message and first.rollout is None and first.train is None:
            text += " (the first of them)"
        for value, pattern in (
            (first.rollout, self.rollout),
            (first.train, self.train),
        ):
            if value and pattern and value != pattern:
                text = text.replace(value, pattern)
        return text

    def __str__(self) -> str:
        return self.message


def group_differences(
    report: ContainmentReport | Iterable[Difference],
) -> tuple[DifferenceGroup, ...]:
    """Merge differences that are equal but for the numbers of their layers.

    Args:
        report: A report, for its differences, or differences.

    Returns:
        Groups: each difference in exactly one. The lowest level first, then what other
        differences follow from, then the most frequent, then the earliest.
    """
    found = report.differences if isinstance(report, ContainmentReport) else report
    groups: dict[tuple[object, ...], list[Difference]] = {}
    for item in found:
        key: tuple[object, ...] = (
            item.level,
            item.attribute,
            _value(item, item.rollout),
            _value(item, item.train),
            pattern(item.name),
            pattern(subject(item)),
        )
        groups.setdefault(key, []).append(item)
    ordered = sorted(groups.values(), key=lambda items: (*_rank(items[0]), -len(items)))
    return tuple(_group(items) for items in ordered)


def subject(item: Difference) -> str:
    """Return what a difference is about: its name, or the stored tensor that differs.

    A stored tensor (codes and scales of one operand are two) begins its message.
    """
    if item.rollout is None and item.train is None:
        first, colon, _ = item.message.partition(": ")
        if colon and first and not any(map(str.isspace, first)):
            return first
    return item.name


def _rank(item: "Difference | Cause") -> tuple[int, int]:
    last = 5 if item.attribute in _LAST else 0
    return (item.level, _RANKS.get(item.attribute, last))


@dataclass(frozen=True, slots=True)
class Cause:
    """Groups that differ in nothing but their place: probably one cause.

    A tensor that has scales on one side only differs in every attribute of its scales;
    such groups are behind those of its dtype.

    Attributes:
        groups: The most frequent first; never empty.
        wording: What its texts call the two graphs.
    """

    groups: tuple[DifferenceGroup, ...]
    wording: Wording = WORDING

    @property
    def level(self) -> int:
        """The level of all of them."""
        return self.groups[0].level

    @property
    def attribute(self) -> str:
        """The attribute of all of them."""
        return self.groups[0].attribute

    @property
    def size(self) -> int:
        """How many differences they hold in all."""
        return sum(len(group.differences) for group in self.groups)

    @property
    def title(self) -> str:
        """What differs, without the places."""
        group = self.groups[0]
        before, after = self.wording.sides
        if group.attribute == "bytes":
            tensors = {each.place.rpartition(".")[2] for each in self.groups}
            scales = sum("scale" in tensor for tensor in tensors)
            what = {0: "weights", len(tensors): "scales"}.get(scales, "bytes")
            return f"stored {what} are not those that the trainer's weights give"
        if group.attribute == "values":
            return "the same tokens give other log-probs"
        there, absent = (after, before) if group.rollout is None else (before, after)
        if group.attribute == "operator":
            kinds = {each.rollout or each.train for each in self.groups}
            if len(kinds) == 1:
                return f"operator of kind {kinds.pop()} is in {there}, not in {absent}"
            return f"operators of {len(kinds)} kinds are in {there}, not in {absent}"
        if group.attribute == "edge":
            return f"operand is read in {there}, not in {absent}"
        if group.attribute == "source":
            return "operand is read from another operator"
        if group.attribute == "params.straddles" and None in (
            group.rollout,
            group.train,
        ):
            return f"{group.rollout or group.train} in {there}, not in {absent}"
        if group.rollout is None and group.train is None:
            return f"difference in {attribute_label(group.attribute)}"
        first, second = (
            "not set" if value is None else value or "not known"
            for value in (group.rollout, group.train)
        )
        label = attribute_label(group.attribute)
        if self.wording.is_change:
            return f"{label} {first} -> {second}"
        return f"{label} is {first} in {before}, {second} in {after}"

    @property
    def remedy(self) -> str:
        """What to do about it, "" where nothing is known to help."""
        return remedy(self.attribute)

    def places(self) -> list[str]:
        """Return one line for each group: where, and what only this place tells."""
        lines = []
        for group in self.groups:
            first = group.differences[0]
            if first.rollout is None and first.train is None:
                lines.append(group.message)
            elif group.attribute != self.attribute:
                label = attribute_label(group.attribute)
                lines.append(f"{group.where}: so does {label}")
            elif self.attribute == "source":
                after = self.wording.sides[1]
                values = f"{group.rollout}, in {after} {group.train}"
                lines.append(f"{group.where}: {values}")
            elif self.attribute == "operator":
                kinds = {each.rollout or each.train for each in self.groups}
                kind = f" ({group.rollout or group.train})" if len(kinds) > 1 else ""
                lines.append(f"{group.where}{kind}")
            elif self.attribute == "edge":
                lines.append(f"{group.where}: {group.rollout or group.train}")
            else:
                lines.append(group.where)
        return lines


def group_causes(
    found: ContainmentReport | Iterable[Difference],
    sides: tuple[str, str] | None = None,
) -> tuple[Cause, ...]:
    """Merge differences as `group_differences` does, then equal ones at other places.

    Args:
        found: A report, for its differences, or differences.
        sides: What the two graphs are called; default: as the report has it, or
            "rollout" and "train".

    Returns:
        Causes: the lowest level first, then what other differences follow from, then
        the one with the most differences.
    """
    wording = found.wording if isinstance(found, ContainmentReport) else WORDING
    if sides is not None:
        wording = replace(wording, sides=sides)
    causes: dict[tuple[object, ...], list[DifferenceGroup]] = {}
    groups = group_differences(found)
    keys = [(group.level, group.attribute, *_cause_values(group)) for group in groups]
    dtypes = {
        (group.level, group.place, _layers(group)): key
        for group, key in zip(groups, keys, strict=True)
        if group.attribute == "dtype"
    }
    follow: dict[tuple[object, ...], list[DifferenceGroup]] = {}
    for group, key in zip(groups, keys, strict=True):
        leader = None
        if group.attribute in _OF_SCALES and None in (group.rollout, group.train):
            leader = dtypes.get((group.level, group.place, _layers(group)))
        if leader is None:
            causes.setdefault(key, []).append(group)
        else:
            follow.setdefault(leader, []).append(group)
    for key, behind in follow.items():
        causes[key] += behind
    merged = [Cause(tuple(groups), wording) for groups in causes.values()]
    return tuple(sorted(merged, key=lambda cause: (*_rank(cause), -cause.size)))


def _layers(group: DifferenceGroup) -> tuple[str, ...]:
    return tuple(item.name for item in group.differences)


def _cause_values(group: DifferenceGroup) -> tuple[object, ...]:
    """What groups of one cause have in common, beside level and attribute."""
    if group.attribute == "source":
        return ()
    if group.attribute in ("operator", "edge"):  # only which graph has it
        return (group.rollout is None, group.train is None)
    return (group.rollout, group.train)


def where(names: Sequence[str]) -> str:
    """Return one text for names that differ in nothing but the numbers of layers.

    Args:
        names: Operator or edge names, at least one.

    Returns:
        The name itself for a single one, else for example
        "36 layers (model.layers.0-35), mlp.up_proj:fprop".
    """
    if len(names) == 1:
        return names[0]
    split = [_split(name) for name in names]
    rows = [[int(number) for number in _NUMBER.findall(path)] for path, _ in split]
    columns = list(zip(*rows, strict=True))
    if not columns:
        return f"{len(names)} times {names[0]}"
    path, role = split[0]
    first, *rest = _NUMBER.split(path)
    numbers = [ranges(column) for column in columns]
    tail = "".join(
        number + piece for number, piece in zip(["", *numbers[1:]], rest, strict=True)
    )
    tail = (tail + role).removeprefix(".")
    count = len(set(columns[0]))
    is_layer = first.rstrip(".").rpartition(".")[2] in _LAYER_WORDS
    word = ("layer" if is_layer else "place") + ("" if count == 1 else "s")
    text = f"{count} {word} ({first}{numbers[0]})"
    if len(names) != count:
        text = f"{len(names)} places in {text}"
    return f"{text}, {tail}" if tail else text


def pattern(name: str) -> str:
    """Return a name with the numbers in its module path as "*"."""
    path, role = _split(name)
    return f"{_NUMBER.sub('*', path)}{role}"


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges: "0-35", "0,2-4,9", or shortened after eight."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    texts = [f"{low}-{high}" if low != high else f"{low}" for low, high in parts]
    if len(texts) > 8:
        texts = [*texts[:7], f"...,{texts[-1]}"]
    return ",".join(texts)


def _split(name: str) -> tuple[str, str]:
    """Return the module path and the role with its colon."""
    path, colon, role = name.rpartition(":")
    return (path, colon + role) if colon else (name, "")


def _value(item: Difference, value: str | None) -> str | None:
    if value is None or item.attribute not in _NAMED:
        return value
    return pattern(value)


def _group(items: list[Difference]) -> DifferenceGroup:
    first = items[0]
    return DifferenceGroup(
        first.level,
        first.attribute,
        _value(first, first.rollout),
        _value(first, first.train),
        pattern(subject(first)),
        where([subject(item) for item in items]),
        tuple(items),
    )


@dataclass(frozen=True, slots=True)
class ListedGroup:
    """Listed operators that differ in nothing but the numbers of their layers.

    Attributes:
        where: As `where` gives it.
        sides: The graphs that have them.
        reason: Why they are listed.
        count: How many they are.
    """

    where: str
    sides: tuple[str, ...]
    reason: str
    count: int

    def __str__(self) -> str:
        only = f" (in {self.sides[0]} only)" if len(self.sides) == 1 else ""
        return f"{self.where}{only}" + (f": {self.reason}" if self.reason else "")


def group_listed(listed: Iterable[Listed]) -> tuple[ListedGroup, ...]:
    """Merge listed operators over repeated layers, in order of appearance."""
    groups: dict[tuple[str, tuple[str, ...], str], list[str]] = {}
    for item in listed:
        key = (pattern(item.name), item.sides, item.reason)
        groups.setdefault(key, []).append(item.name)
    return tuple(
        ListedGroup(where(names), sides, reason, len(names))
        for (_, sides, reason), names in groups.items()
    )
