"""What is drawn, as data: blocks, nodes, edges and differences.

The page gets it as JSON, DOT and SVG are made from it. Folding has been done: a block
of repeated layers holds one of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from jetrl_compile.differences import attribute_label
from jetrl_compile.errors import PrecisionFlowError
from jetrl_compile.formats import Flow
from jetrl_compile.grouping import group_causes
from jetrl_compile.show.blocks import Block, BlockTable
from jetrl_compile.show.facts import flow_facts, node_facts, node_label, node_text
from jetrl_compile.show.folding import Folded, fold
from jetrl_compile.show.paired import PHASES, Item, Paired, Use
from jetrl_compile.show.sizes import edge_bytes
from jetrl_compile.show.styles import short_flow, style_of

LARGEST = 20_000  # operators in a page, after folding


@dataclass(frozen=True, slots=True)
class Node:
    """An operator.

    Attributes:
        name: Of the operator; with others folded into it, of the first.
        label: The name within its block.
        kind: As `Operator.kind`.
        phase: "forward", "dgrad" or "wgrad".
        block: Number of the innermost block, -1 for none.
        sides: Bits: 1 the first graph has it, 2 the second.
        text: For each graph a few words on its precision, "" where it is missing.
        fp8: For each graph whether it is an FP8 GEMM, None if it is no GEMM.
        facts: For each graph its attributes.
        role: "weight" and "integer" nodes can be hidden; "" otherwise.
        found: Numbers of its entries in `View.findings`.
        count: How many operators it stands for.
    """

    name: str
    label: str
    kind: str
    phase: str
    block: int
    sides: int
    text: tuple[str, ...]
    fp8: tuple[bool | None, ...]
    facts: tuple[tuple[tuple[str, str], ...], ...]
    role: str
    found: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Edge:
    """A use of a tensor, between two nodes.

    Attributes:
        source: Number of a node.
        target: Number of a node.
        operand: Which operand of the target it is.
        flows: For each graph a place in `View.flows`, None where it is missing.
        size: Bytes, None where the graph does not show it.
        found: Numbers of its entries in `View.findings`.
    """

    source: int
    target: int
    operand: str
    flows: tuple[int | None, ...]
    size: int | None
    found: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DrawnFlow:
    """A flow: its style, a short text, and every attribute."""

    style: int
    text: str
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """Equal differences at one place of repeated layers.

    Attributes:
        level: 1 structure to 4 logits.
        title: What differs: the same in all findings of one cause, which follow each
            other.
        remedy: What to do about that; "" where nothing is known to help.
        place: Where, and what only this place tells.
        label: What the attribute that differs is called.
        message: The whole sentence, with the remedy.
        count: How many differences it stands for.
        nodes: Numbers of the nodes that have it.
        edges: Numbers of the edges that have it.
    """

    level: int
    title: str
    remedy: str
    place: str
    label: str
    message: str
    count: int
    nodes: tuple[int, ...]
    edges: tuple[int, ...]


@dataclass(frozen=True)
class View:
    """Everything that is drawn.

    Attributes:
        titles: What each graph is called.
        meta: Where each graph comes from.
        verdict: One line on the comparison; "" for one graph.
        tokens: For which the bytes are.
        blocks: Outer ones before inner ones.
        nodes: In execution order.
        edges: In the order of their targets.
        flows: Each different flow once.
        findings: The differences: the lowest level first, then the most frequent.
    """

    titles: tuple[str, ...]
    meta: tuple[Mapping[str, str], ...]
    verdict: str
    tokens: int
    blocks: tuple[Block, ...]
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    flows: tuple[DrawnFlow, ...]
    findings: tuple[Finding, ...]

    def table(self) -> dict[str, object]:
        """Return it as plain lists and dictionaries, for JSON."""
        return asdict(self)

    def phases(self) -> tuple[str, ...]:
        """Return which of forward, dgrad and wgrad there are."""
        found = {node.phase for node in self.nodes}
        return tuple(phase for phase in PHASES if phase in found)


def make_view(paired: Paired, *, tokens: int = 4096) -> View:
    """Return what is drawn of one or two graphs.

    Args:
        paired: From `pair_graphs`.
        tokens: Of the batch for which edges get their thickness.

    Raises:
        PrecisionFlowError: There are too many different operators for a page.
    """
    folded = fold(paired.items, paired.uses, paired.differences)
    if len(folded.items) > LARGEST:
        raise PrecisionFlowError(
            f"{len(folded.items):,} operators are left after equal layers were folded; "
            f"a page holds {LARGEST:,}. Narrow it with --module, such as "
            f"--module {_a_module(paired)}"
        )
    return _Maker(paired, folded, tokens).run()


def _a_module(paired: Paired) -> str:
    modules = (item.operator.module for item in paired.items)
    deep = (module for module in modules if module.count(".") >= 2)
    return ".".join(next(deep, "model").split(".")[:3])


def _sides(paired: Paired) -> tuple[str, str] | None:
    """What differences call the two graphs: by their files, unless by their phases."""
    phases = [meta.get("phase") for meta in paired.meta]
    if len(paired.titles) != 2 or phases == ["rollout", "train"]:
        return None
    return paired.titles[0], paired.titles[1]


class _Maker:
    def __init__(self, paired: Paired, folded: Folded, tokens: int) -> None:
        self.paired, self.folded, self.tokens = paired, folded, tokens
        self.blocks = BlockTable(folded)
        self.groups = [
            (cause, place, group)
            for cause in group_causes(paired.differences, _sides(paired))
            for place, group in zip(cause.places(), cause.groups, strict=True)
        ]
        places = {id(item): place for place, item in enumerate(paired.differences)}
        self.group_of = {
            places[id(item)]: number
            for number, (*_, group) in enumerate(self.groups)
            for item in group.differences
        }
        self.flows: dict[Flow, int] = {}

    def run(self) -> View:
        reads: dict[str, list[Use]] = {item.name: [] for item in self.folded.items}
        for use in self.folded.uses:
            reads[use.target].append(use)
        hidden = self._hidden()
        nodes = tuple(
            self._node(item, reads[item.name], hidden) for item in self.folded.items
        )
        edges = tuple(self._edges({node.name: n for n, node in enumerate(nodes)}))
        return View(
            self.paired.titles,
            self.paired.meta,
            self.paired.verdict,
            self.tokens,
            tuple(self.blocks.blocks),
            nodes,
            edges,
            tuple(
                DrawnFlow(style_of(flow), short_flow(flow), flow_facts(flow))
                for flow in self.flows
            ),
            tuple(self._findings(nodes, edges)),
        )

    def _node(self, item: Item, uses: list[Use], hidden: Mapping[str, str]) -> Node:
        block = self.blocks.block_of(item)
        path = self.blocks.blocks[block].path if block >= 0 else ""
        words = node_text(item, uses)
        return Node(
            item.name,
            node_label(item, path),
            item.operator.kind,
            item.phase,
            block,
            sum(1 << bit for bit, side in enumerate(item.sides) if side is not None),
            tuple(text for text, _ in words),
            tuple(fp8 for _, fp8 in words),
            tuple(node_facts(side) for side in item.sides),
            hidden.get(item.name, ""),
            self._found(item.found),
            self.folded.stands_for[item.name],
        )

    def _hidden(self) -> dict[str, str]:
        """Weights, and what makes integers only, by name."""
        kinds = {item.name: item.operator.kind for item in self.folded.items}
        readers: dict[str, set[str]] = {}
        for use in self.folded.uses:
            readers.setdefault(use.source, set()).add(kinds[use.target])
        found = {}
        for name, kind in kinds.items():
            if kind == "parameter":
                found[name] = "weight"
            elif kind == "index" or (
                kind in ("input", "constant") and readers.get(name) == {"index"}
            ):
                found[name] = "integer"
        return found

    def _edges(self, numbers: Mapping[str, int]) -> Iterable[Edge]:
        sizes = edge_bytes(self.folded.items, self.folded.uses, self.tokens)
        for use in self.folded.uses:
            flows = tuple(
                None if flow is None else self.flows.setdefault(flow, len(self.flows))
                for flow in use.flows
            )
            yield Edge(
                numbers[use.source],
                numbers[use.target],
                use.operand,
                flows,
                sizes.get((use.source, use.target, use.operand)),
                self._found(use.found),
            )

    def _found(self, differences: Iterable[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.group_of[number] for number in differences))

    def _findings(
        self, nodes: Sequence[Node], edges: Sequence[Edge]
    ) -> Iterable[Finding]:
        at_nodes: dict[int, list[int]] = {}
        at_edges: dict[int, list[int]] = {}
        for place, node in enumerate(nodes):
            for number in node.found:
                at_nodes.setdefault(number, []).append(place)
        for place, edge in enumerate(edges):
            for number in edge.found:
                at_edges.setdefault(number, []).append(place)
        for number, (cause, where, group) in enumerate(self.groups):
            yield Finding(
                group.level,
                cause.title,
                cause.remedy,
                where,
                attribute_label(group.attribute),
                group.message,
                len(group.differences),
                tuple(at_nodes.get(number, ())),
                tuple(at_edges.get(number, ())),
            )
