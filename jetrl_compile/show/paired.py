"""One or two precision graphs as one list of operators and uses, with differences."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from jetrl_compile.containment import (
    ContainmentReport,
    check_containment,
    diff_graphs,
)
from jetrl_compile.differences import Difference
from jetrl_compile.errors import PrecisionFlowError
from jetrl_compile.formats import Flow
from jetrl_compile.precision_graph import Operator, PrecisionGraph

PHASES = ("forward", "dgrad", "wgrad")


@dataclass(frozen=True, slots=True)
class Item:
    """An operator that one or both graphs have.

    Attributes:
        name: As in the graphs.
        sides: The operator in each graph, None where it is missing; equally long for
            all items.
        found: Numbers of the differences that it has, in `Paired.differences`.
    """

    name: str
    sides: tuple[Operator | None, ...]
    found: tuple[int, ...] = ()

    @property
    def operator(self) -> Operator:
        """The operator of the first graph that has it."""
        return next(side for side in self.sides if side is not None)

    @property
    def phase(self) -> str:
        """One of `PHASES`; "dgrad" stands for all of backward but wgrad."""
        op = self.operator
        if op.phase == "forward":
            return "forward"
        return "wgrad" if op.role == "wgrad" else "dgrad"


@dataclass(frozen=True, slots=True)
class Use:
    """An edge that one or both graphs have.

    Attributes:
        source: Name of the operator that makes the tensor.
        target: Name of the operator that reads it.
        operand: Which operand it is.
        flows: The flow in each graph, None where the edge is missing.
        found: Numbers of the differences that it has.
    """

    source: str
    target: str
    operand: str
    flows: tuple[Flow | None, ...]
    found: tuple[int, ...] = ()

    @property
    def flow(self) -> Flow:
        """The flow in the first graph that has the edge."""
        return next(flow for flow in self.flows if flow is not None)


@dataclass(frozen=True)
class Paired:
    """One or two graphs, operator by operator.

    Attributes:
        titles: What each graph is called.
        meta: The meta data of each graph.
        items: In execution order of the first graph, then what only the second has.
        uses: The edges, likewise.
        differences: What is not the same; empty for one graph.
        verdict: One line on the comparison, "" for one graph.
    """

    titles: tuple[str, ...]
    meta: tuple[dict[str, str], ...]
    items: tuple[Item, ...]
    uses: tuple[Use, ...]
    differences: tuple[Difference, ...] = field(default=())
    verdict: str = ""


def pair_graphs(
    graphs: Sequence[PrecisionGraph],
    titles: Sequence[str],
    report: ContainmentReport | None = None,
) -> Paired:
    """Put one graph, or two by name, into one list.

    A rollout graph and a training graph (by their meta key "phase", in either order)
    are compared as `check_containment` does, any other two as `diff_graphs` does.

    Args:
        graphs: One or two.
        titles: What each is called.
        report: Of the rollout graph and the training graph, where it is known: an
            audit's has levels 3 and 4 too.

    Returns:
        The list; a rollout graph comes first.
    """
    order = [0] if len(graphs) == 1 else [0, 1]
    phases = [graph.meta.get("phase") for graph in graphs]
    if phases == ["train", "rollout"]:
        order, phases = [1, 0], ["rollout", "train"]
    picked = [graphs[index] for index in order]
    names = tuple(titles[index] for index in order)
    if report is None:
        contained = phases == ["rollout", "train"]
        differences, verdict = _compare(picked, names, contained)
    else:
        differences, verdict = report.differences, report.verdict()
    at: dict[tuple[str, str], list[int]] = {}
    for number, item in enumerate(differences):
        at.setdefault((item.operator, item.operand), []).append(number)
    return Paired(
        names,
        tuple(dict(graph.meta) for graph in picked),
        tuple(_items(picked, at)),
        tuple(_uses(picked, at)),
        tuple(differences),
        verdict,
    )


def narrow(paired: Paired, module: str) -> Paired:
    """Return the part in modules, with the operators that feed it.

    Args:
        paired: The whole.
        module: A module path or a glob of such paths, which stands for all that is
            below it, or a glob of operator names.

    Raises:
        PrecisionFlowError: Nothing has such a name.
    """
    inside = {
        item.name
        for item in paired.items
        if item.name == module
        or item.name.startswith((f"{module}.", f"{module}:"))
        or any(
            fnmatchcase(item.name, pattern)
            for pattern in (module, f"{module}.*", f"{module}:*")
        )
    }
    if not inside:
        examples = ", ".join(dict.fromkeys(_module_names(paired.items)))
        raise PrecisionFlowError(
            f"no operator is in the module {module!r}; name a module path or a glob, "
            f"such as {examples:.200}"
        )
    uses = [use for use in paired.uses if use.target in inside]
    kept = inside | {use.source for use in uses}
    items = [item for item in paired.items if item.name in kept]
    found = [*(item.found for item in items), *(use.found for use in uses)]
    numbers = sorted({number for each in found for number in each})
    new = {old: place for place, old in enumerate(numbers)}
    verdict = paired.verdict
    if paired.differences:
        verdict += f"; {len(new)} in {module}"
    return replace(
        paired,
        items=tuple(replace(x, found=tuple(new[n] for n in x.found)) for x in items),
        uses=tuple(replace(x, found=tuple(new[n] for n in x.found)) for x in uses),
        differences=tuple(paired.differences[n] for n in numbers),
        verdict=verdict,
    )


def _module_names(items: Iterable[Item]) -> list[str]:
    names = [item.operator.module for item in items if item.operator.module]
    return names[:: max(1, len(names) // 4)][:4]


def _compare(
    graphs: Sequence[PrecisionGraph], titles: tuple[str, ...], contained: bool
) -> tuple[Sequence[Difference], str]:
    if len(graphs) == 1:
        return (), ""
    if contained:
        report = check_containment(graphs[0], graphs[1])
        return report.differences, report.verdict()
    found = diff_graphs(graphs[0], graphs[1], sides=(titles[0], titles[1]))
    return found, f"{len(found)} differences" if found else "no differences"


def _items(
    graphs: Sequence[PrecisionGraph], at: dict[tuple[str, str], list[int]]
) -> Iterable[Item]:
    names = dict.fromkeys(op.name for graph in graphs for op in graph.operators)
    for name in names:
        sides = tuple(graph.by_name.get(name) for graph in graphs)
        yield Item(name, sides, tuple(at.get((name, ""), ())))


def _uses(
    graphs: Sequence[PrecisionGraph], at: dict[tuple[str, str], list[int]]
) -> Iterable[Use]:
    flows: dict[tuple[str, str, str], list[Flow | None]] = {}
    for index, graph in enumerate(graphs):
        for edge in graph.edges:
            key = (edge.source, edge.target, edge.operand)
            flows.setdefault(key, [None] * len(graphs))[index] = edge.flow
    for (source, target, operand), sides in flows.items():
        # A source that differs is told of the operator, with its operand.
        found = tuple(at.get((target, operand), ()))
        yield Use(source, target, operand, tuple(sides), found)
