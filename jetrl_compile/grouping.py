"""Differences merged over repeated layers, the cause first."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from jetrl_compile.containment_report import ContainmentReport
from jetrl_compile.differences import Difference

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a path component that is a number
_LAYER_WORDS = ("layers", "layer", "blocks", "block", "h")
_NAMED = ("source", "edge")  # attributes whose values are operator names


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
        text = first.message.replace(first.name, self.where, 1)
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
        Groups: the lowest level first, then the most frequent, then the earliest.
    """
    found = report.differences if isinstance(report, ContainmentReport) else report
    groups: dict[tuple[object, ...], list[Difference]] = {}
    for item in found:
        path, role = _split(item.operator)
        key: tuple[object, ...] = (
            item.level,
            item.attribute,
            _value(item, item.rollout),
            _value(item, item.train),
            f"{_NUMBER.sub('*', path)}{role}",
            item.operand,
        )
        groups.setdefault(key, []).append(item)
    ordered = sorted(groups.values(), key=lambda items: (items[0].level, -len(items)))
    return tuple(_group(items) for items in ordered)


def group_causes(
    groups: Iterable[DifferenceGroup],
) -> tuple[tuple[DifferenceGroup, ...], ...]:
    """Put groups together that differ in nothing but their place.

    Args:
        groups: What `group_differences` returned.

    Returns:
        Groups of the same level, attribute and values; again the lowest level first,
        then the one with the most differences.
    """
    causes: dict[tuple[object, ...], list[DifferenceGroup]] = {}
    for group in groups:
        values = (group.rollout, group.train) if group.attribute not in _NAMED else ()
        key = (group.level, group.attribute, *values)
        causes.setdefault(key, []).append(group)
    return tuple(
        tuple(cause)
        for cause in sorted(causes.values(), key=lambda x: (x[0].level, -size(x)))
    )


def size(groups: Iterable[DifferenceGroup]) -> int:
    """Return how many differences groups hold in all."""
    return sum(len(group.differences) for group in groups)


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
    path, role = _split(value)
    return f"{_NUMBER.sub('*', path)}{role}"


def _group(items: list[Difference]) -> DifferenceGroup:
    first = items[0]
    path, role = _split(first.operator)
    tail = role + (f".{first.operand}" if first.operand else "")
    return DifferenceGroup(
        first.level,
        first.attribute,
        _value(first, first.rollout),
        _value(first, first.train),
        _NUMBER.sub("*", path) + tail,
        _where(items) if len(items) > 1 else first.name,
        tuple(items),
    )


def _where(items: list[Difference]) -> str:
    paths = [_split(item.operator)[0] for item in items]
    columns = list(
        zip(*(map(int, _NUMBER.findall(path)) for path in paths), strict=True)
    )
    name = items[0].name
    if not columns:
        return f"{len(items)} times {name}"
    pieces = _NUMBER.split(_split(name)[0] if ":" in name else name)
    texts = [ranges(column) for column in columns]
    prefix = pieces[0] + texts[0]
    rest = "".join(
        text + piece for text, piece in zip(["", *texts[1:]], pieces[1:], strict=True)
    )
    rest = (
        rest.removeprefix(".") + name[len(_split(name)[0]) :] if ":" in name else rest
    )
    number = len(set(columns[0]))
    layers = pieces[0].rstrip(".").rpartition(".")[2] in _LAYER_WORDS
    word = ("layer" if layers else "place") + ("" if number == 1 else "s")
    where = f"{number} {word} ({prefix})"
    if len(items) != number:
        where = f"{len(items)} places in {where}"
    return f"{where}, {rest.removeprefix('.')}" if rest else where
