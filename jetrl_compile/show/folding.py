"""Repeated layers become one block: which layers are equal, and which one is drawn.

A list is what has a number in its module path: "model.layers.0", "model.layers.1", and
within a layer "mlp.experts.0". Layers are equal when their operators, edges and
differences are, but for the number; what comes from a neighbour is equal in the first
layer too, where something else takes the neighbour's place. A run is a stretch of one
layer, or of a few that alternate, repeated; its first repetition stands for all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jetrl_compile.differences import Difference
from jetrl_compile.grouping import pattern, ranges
from jetrl_compile.show.paired import Item, Use

LONGEST_PERIOD = 8  # layers that alternate, such as 5 with a window and 1 without
SMALL = 4  # operators in a layer below which unequal layers are not made blocks


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive layers of a list, one period of which is drawn.

    Attributes:
        path: Of the list: "model.layers".
        numbers: The layers' numbers, in order.
        period: How many of them are drawn; the rest repeats them.
    """

    path: str
    numbers: tuple[int, ...]
    period: int

    @property
    def repeats(self) -> int:
        """How often the period occurs."""
        return len(self.numbers) // self.period

    @property
    def title(self) -> str:
        """The path with the numbers: "model.layers.0-35"."""
        return f"{self.path}.{ranges(self.numbers)}"


@dataclass(frozen=True)
class Folded:
    """What is left after folding.

    Attributes:
        items: One for each set of equal operators.
        uses: The edges between them, without those from one repetition to the next.
        runs: Outer lists before inner ones.
        carried: For each run's title, what one repetition hands to the next.
        stands_for: How many operators each item stands for, by name.
    """

    items: tuple[Item, ...]
    uses: tuple[Use, ...]
    runs: tuple[Run, ...]
    carried: dict[str, tuple[Use, ...]]
    stands_for: dict[str, int]


def fold(
    items: Sequence[Item], uses: Sequence[Use], differences: Sequence[Difference]
) -> Folded:
    """Fold the outermost lists, then the lists within what is left."""
    runs: list[Run] = []
    carried: dict[str, tuple[Use, ...]] = {}
    counts = {item.name: 1 for item in items}
    causes = [
        (found.attribute, *map(_pattern, (found.rollout, found.train)))
        for found in differences
    ]
    depth = 0
    while True:
        step = _Step(items, uses, causes, depth)
        if not step.lists:
            return Folded(tuple(items), tuple(uses), tuple(runs), carried, counts)
        runs += step.runs
        carried.update(step.carried)
        for item in items:
            kept = step.kept_name(item.name)
            if kept != item.name:
                counts[kept] += counts.pop(item.name)
        items, uses = step.items, step.uses
        depth += 1


def split(name: str, depth: int) -> tuple[str, int, str] | None:
    """Split an operator's name at a number in its module path.

    Args:
        name: Such as "model.layers.3.mlp:act".
        depth: Which number, 0 for the first.

    Returns:
        The list's path, the number and the rest, such as ("model.layers", 3, ".mlp:act"
        ), or None where there is none. A number at the end of a name without a role
        ("input.0") is none.
    """
    path, colon, role = name.rpartition(":")
    if not colon:
        path, role = name, ""
    parts = path.split(".")
    seen = 0
    for place, part in enumerate(parts):
        if not (part.isascii() and part.isdigit()) or not place:
            continue
        if seen == depth:
            if place == len(parts) - 1 and not colon:
                return None
            rest = "".join(f".{more}" for more in parts[place + 1 :])
            return ".".join(parts[:place]), int(part), f"{rest}{colon}{role}"
        seen += 1
    return None


class _Step:
    """Folds the lists at one depth."""

    def __init__(
        self,
        items: Sequence[Item],
        uses: Sequence[Use],
        causes: Sequence[tuple[object, ...]],
        depth: int,
    ) -> None:
        self.depth, self.causes = depth, causes
        self.place = {item.name: split(item.name, depth) for item in items}
        self.lists: dict[str, dict[int, list[Item]]] = {}
        for item in items:
            if place := self.place[item.name]:
                layers = self.lists.setdefault(place[0], {})
                layers.setdefault(place[1], []).append(item)
        self.runs: list[Run] = []
        self.first: dict[tuple[str, int], int] = {}
        self.run_of: dict[tuple[str, int], Run] = {}
        self.repetition: dict[tuple[str, int], int] = {}
        self.carried: dict[str, tuple[Use, ...]] = {}
        self._find_runs(self._prints(uses))
        self.items = [x for x in items if self.kept_name(x.name) == x.name]
        self.uses = list(self._kept_uses(uses))

    def kept_name(self, name: str) -> str:
        """The operator that stands for an operator."""
        place = self.place[name]
        if place is None or place[:2] not in self.first:
            return name
        path, number, rest = place
        first = self.first[(path, number)]
        return name if first == number else f"{path}.{first}{rest}"

    def _prints(self, uses: Sequence[Use]) -> dict[tuple[str, int], object]:
        """What must be equal in layers that are equal."""
        inner: dict[tuple[str, int], list[Use]] = {}
        carries: set[tuple[str, str, str]] = set()
        for use in uses:
            target = self.place[use.target]
            if target is None:
                continue
            inner.setdefault(target[:2], []).append(use)
            source = self.place[use.source]
            if source and source[0] == target[0] and source[1] != target[1]:
                carries.add((target[0], target[2], use.operand))
        prints: dict[tuple[str, int], object] = {}
        for path, layers in self.lists.items():
            for number, members in layers.items():
                key = (path, number)
                facts = frozenset(self._fact(item) for item in members)
                edges = frozenset(
                    self._edge(use, key, carries) for use in inner.get(key, ())
                )
                prints[key] = (facts, edges)
        return prints

    def _fact(self, item: Item) -> object:
        place = self.place[item.name]
        assert place is not None
        sides = tuple(side and replace(side, name="", module="") for side in item.sides)
        reasons = tuple(
            side and (side.reason, side.formula, side.module == "")
            for side in item.sides
        )
        return place[2], sides, reasons, self._found(item.found)

    def _edge(
        self, use: Use, key: tuple[str, int], carries: set[tuple[str, str, str]]
    ) -> object:
        target, source = self.place[use.target], self.place[use.source]
        assert target is not None
        if source and source[:2] == key:
            origin = source[2]
        elif (key[0], target[2], use.operand) in carries:
            origin = "<carried>"
        else:
            origin = f"<outside>{use.source}"
        return target[2], use.operand, origin, use.flows, self._found(use.found)

    def _found(self, numbers: Iterable[int]) -> object:
        return tuple(self.causes[number] for number in numbers)

    def _find_runs(self, prints: dict[tuple[str, int], object]) -> None:
        for path, layers in self.lists.items():
            numbers = sorted(layers)
            kinds = [prints[(path, number)] for number in numbers]
            found = [
                Run(path, tuple(numbers[low:high]), period)
                for low, high, period in find_runs(kinds)
            ]
            size = sum(map(len, layers.values())) / len(layers)
            if all(run.repeats == 1 for run in found) and size < SMALL:
                continue
            self.runs += found
            for run in found:
                for index, number in enumerate(run.numbers):
                    self.run_of[(path, number)] = run
                    self.first[(path, number)] = run.numbers[index % run.period]
                    self.repetition[(path, number)] = index // run.period

    def _kept_uses(self, uses: Sequence[Use]) -> Iterable[Use]:
        seen: set[tuple[str, str, str]] = set()
        carried: dict[str, dict[tuple[str, str, str], Use]] = {}
        for use in uses:
            source, target = self.kept_name(use.source), self.kept_name(use.target)
            key = (source, target, use.operand)
            if run := self._crosses(use):
                moved = replace(use, source=source, target=target)
                carried.setdefault(run.title, {}).setdefault(key, moved)
                continue
            if key not in seen:
                seen.add(key)
                yield replace(use, source=source, target=target)
        self.carried = {
            title: tuple(found.values()) for title, found in carried.items()
        }

    def _crosses(self, use: Use) -> Run | None:
        """The run in which a use goes from one repetition to another, or None."""
        source, target = self.place[use.source], self.place[use.target]
        if source is None or target is None:
            return None
        run = self.run_of.get(source[:2])
        if run is None or self.run_of.get(target[:2]) is not run:
            return None
        same = self.repetition[source[:2]] == self.repetition[target[:2]]
        return None if same else run


def find_runs(kinds: Sequence[object]) -> list[tuple[int, int, int]]:
    """Cut a sequence into stretches that repeat a short period.

    Args:
        kinds: Hashable values.

    Returns:
        For each stretch its start, its end and its period. The stretch that covers most
        is taken first at each place, the shortest period among equals.
    """
    numbers: dict[object, int] = {}
    codes = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
    found: list[tuple[int, int, int]] = []
    start = 0
    while start < len(codes):
        best = (start + 1, 1)
        for period in range(1, min(LONGEST_PERIOD, (len(codes) - start) // 2) + 1):
            end = start + period
            while end < len(codes) and codes[end] == codes[end - period]:
                end += 1
            end -= (end - start) % period
            if end - start >= 2 * period and end > best[0]:
                best = (end, period)
        found.append((start, *best))
        start = best[0]
    return found


def _pattern(value: str | None) -> str | None:
    return None if value is None else pattern(value)
