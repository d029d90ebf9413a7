"""What a containment check found, as data; the reports are made from it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from jetrl_compile.differences import LEVELS, Difference

STATUSES = ("passed", "failed", "not run")
NEEDS_A_LIVE_PAIR = (
    "needs the two models, not their graphs: run `jetrl audit` on a live pair"
)


@dataclass(frozen=True, slots=True)
class LevelResult:
    """The result of one level.

    Attributes:
        level: 1 structure, 2 flow, 3 bytes, 4 logits.
        status: "passed", "failed" or "not run".
        reason: Why it was not run; "" otherwise.
        counts: What was compared, by name, such as "operators" and "edges".
    """

    level: int
    status: str
    reason: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the level is called: "structure", "flow", "bytes" or "logits"."""
        return LEVELS[self.level]


@dataclass(frozen=True, slots=True)
class Listed:
    """An operator that the report lists, whether or not it differs.

    Attributes:
        name: Its name.
        sides: The graphs that have it: "rollout", "train" or both.
        reason: Why it is listed; "" where its list says it all.
    """

    name: str
    sides: tuple[str, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Wording:
    """What the texts of a report call things.

    Attributes:
        heading: What is compared.
        sides: The two graphs, as sentences name them.
        check: One word for names of test suites and rules.
        contained: What JSON calls the answer.
        fields: What JSON calls the parts of a report, where not as they are here;
            None for parts that it leaves out.
        is_change: Whether the second graph is a later state of the first.
        fix: What to do about any difference; "" where that depends on what differs.
    """

    heading: str
    sides: tuple[str, str]
    check: str
    contained: str = "contained"
    fields: Mapping[str, str | None] = field(default_factory=dict)
    is_change: bool = False
    fix: str = ""


WORDING = Wording(
    "Precision flow of rollout and training", ("rollout", "train"), "containment"
)


@dataclass(frozen=True)
class ContainmentReport:
    """Whether a rollout graph is contained in a training forward graph, and why not.

    Attributes:
        levels: The results of levels 1 to 4, in order.
        differences: In execution order of the rollout graph, level by level.
        notes: Differences that do not count, such as another attention kernel.
        remarks: Other lines for the reader.
        counts: Sizes of both graphs and what was not compared, by name.
        high_precision: GEMMs that stay in high precision, each with its reason.
        unknown: Operators of unknown kind.
        rollout_meta: Where the rollout graph comes from.
        train_meta: Where the training graph comes from.
        strict: Whether kernels and batch invariance of all operators were compared.
        undecided: Why containment could not be told; "" where it could.
    """

    levels: tuple[LevelResult, ...]
    differences: tuple[Difference, ...] = ()
    notes: tuple[Difference, ...] = ()
    remarks: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    high_precision: tuple[Listed, ...] = ()
    unknown: tuple[Listed, ...] = ()
    rollout_meta: Mapping[str, str] = field(default_factory=dict)
    train_meta: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False
    undecided: str = ""

    wording: ClassVar[Wording] = WORDING

    @property
    def contained(self) -> bool | None:
        """True, False, or None where it could not be told.

        One failed level is enough for False. True needs levels 1 and 2; a level that
        was not run beyond these changes nothing.
        """
        status = {level.level: level.status for level in self.levels}
        if "failed" in status.values():
            return False
        if self.undecided or any(status.get(need) != "passed" for need in (1, 2)):
            return None
        return True

    @property
    def exit_status(self) -> int:
        """0 contained, 1 not contained, 2 could not tell."""
        return {True: 0, False: 1, None: 2}[self.contained]

    def level(self, number: int) -> LevelResult:
        """Return the result of a level.

        Raises:
            KeyError: The report has no such level.
        """
        return {level.level: level for level in self.levels}[number]

    def with_level(
        self, result: LevelResult, differences: Iterable[Difference] = ()
    ) -> "ContainmentReport":
        """Return this report with another result of one level.

        Args:
            result: Takes the place of the level's result.
            differences: Take the place of the level's differences.
        """
        levels = {level.level: level for level in (*self.levels, result)}
        kept = [item for item in self.differences if item.level != result.level]
        merged = sorted((*kept, *differences), key=lambda item: item.level)
        return replace(
            self,
            levels=tuple(levels[number] for number in sorted(levels)),
            differences=tuple(merged),
        )

    def verdict(self) -> str:
        """Return the result in one line."""
        if self.contained is None:
            return f"could not tell: {self.undecided or 'a level was not run'}"
        if self.contained:
            run = [str(item.level) for item in self.levels if item.status == "passed"]
            return f"contained (levels {', '.join(run)} passed)"
        failed = [f"{x.level} {x.name}" for x in self.levels if x.status == "failed"]
        where = f"(level {', '.join(failed)})"
        number = len(self.differences)
        if not number:
            return f"not contained {where}"
        plural = "" if number == 1 else "s"
        return f"not contained: {number} difference{plural} {where}"
