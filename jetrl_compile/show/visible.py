"""What of a view is visible: which blocks are open, which phases are shown.

`assets/model.js` does the same in the page, where it changes with every click.
"""

from dataclasses import dataclass, field

from jetrl_compile.show.paired import PHASES
from jetrl_compile.show.view import Edge, Node, View


@dataclass(frozen=True, slots=True)
class Switches:
    """What is shown at first; in the page it can be changed.

    Attributes:
        phases: Of "forward", "dgrad" and "wgrad"; "dgrad" stands for the rest of
            backward.
        opened: Whether repeated layers are open.
        weights: Whether weights are nodes; if not, GEMMs tell their precision.
        saved: Whether edges from forward to backward are shown.
        integers: Whether what makes integers only is shown.
    """

    phases: tuple[str, ...] = PHASES
    opened: bool = False
    weights: bool = False
    saved: bool = False
    integers: bool = False


def default_phases(view: View) -> tuple[str, ...]:
    """Return what is shown unless told: two graphs are compared by their forwards."""
    phases = view.phases()
    return phases if len(view.titles) == 1 else phases[:1]


@dataclass(slots=True)
class Box:
    """A node, a closed block, or an open one with others in it.

    Attributes:
        id: "n3" or "b3".
        number: Of the node or block in the view.
        parent: Id of the open block around it, "" for none.
        is_open: Whether it is an open block.
        members: Numbers of the nodes in it.
        sides: Bits, as `Node.sides`.
    """

    id: str
    number: int
    parent: str
    is_open: bool = False
    members: list[int] = field(default_factory=list)
    sides: int = 0

    @property
    def is_block(self) -> bool:
        """Whether it stands for a block."""
        return self.id.startswith("b")


@dataclass(slots=True)
class Arrow:
    """Edges between the same two boxes; more than one only at closed blocks.

    Attributes:
        source: Id of a box.
        target: Id of a box.
        members: Numbers of the edges.
        sides: Bits: which graphs have any of them.
    """

    source: str
    target: str
    members: list[int] = field(default_factory=list)
    sides: int = 0


def visible(view: View, switches: Switches) -> tuple[dict[str, Box], list[Arrow]]:
    """Return what is drawn: boxes by id, parents before what is in them, and arrows."""
    boxes: dict[str, Box] = {}
    used = {
        edge.source
        for edge in view.edges
        if view.nodes[edge.target].phase in switches.phases
    }
    ids: list[str] = []
    for number, node in enumerate(view.nodes):
        is_shown = _is_shown(node, switches) and (
            node.role != "weight" or number in used
        )
        ids.append(_place(view, number, switches, boxes) if is_shown else "")
    arrows: dict[tuple[str, str, int], Arrow] = {}
    for number, edge in enumerate(view.edges):
        source, target = ids[edge.source], ids[edge.target]
        if not source or not target or source == target:
            continue
        if not switches.saved and is_saved(view, edge):
            continue
        single = not boxes[source].is_block and not boxes[target].is_block
        key = (source, target, number if single else -1)
        arrow = arrows.setdefault(key, Arrow(source, target))
        arrow.members.append(number)
        for bit, flow in enumerate(edge.flows):
            arrow.sides |= (flow is not None) << bit
    return boxes, list(arrows.values())


def is_saved(view: View, edge: Edge) -> bool:
    """Return whether an edge that is no weight goes from forward to backward."""
    source, target = view.nodes[edge.source], view.nodes[edge.target]
    return (
        source.role != "weight"
        and source.phase == "forward"
        and target.phase != "forward"
    )


def _is_shown(node: Node, switches: Switches) -> bool:
    if node.phase not in switches.phases:
        return False
    shown = {"weight": switches.weights, "integer": switches.integers}
    return shown.get(node.role, True)


def _place(view: View, number: int, switches: Switches, boxes: dict[str, Box]) -> str:
    """Put a node into the innermost open block; return what stands for it."""
    node = view.nodes[number]
    parent = ""
    for block in block_chain(view, node):
        box = boxes.setdefault(f"b{block}", Box(f"b{block}", block, parent))
        box.sides |= node.sides
        box.members.append(number)
        if not switches.opened:
            return box.id
        box.is_open = True
        parent = box.id
    name = f"n{number}"
    boxes[name] = Box(name, number, parent, members=[number], sides=node.sides)
    return name


def block_chain(view: View, node: Node) -> list[int]:
    """Return the numbers of the blocks around a node, the outermost first."""
    chain: list[int] = []
    number = node.block
    while number >= 0:
        chain.insert(0, number)
        number = view.blocks[number].parent
    return chain


def has_findings(view: View, box: Box, switches: Switches) -> bool:
    """Return whether a box has a difference that nothing in it or at it shows.

    That is a node's own, one of an edge from a weight that is not drawn, or one of
    anything in a closed block.
    """
    if box.is_open:
        return False
    if any(view.nodes[member].found for member in box.members):
        return True
    inside = set(box.members)
    return any(
        edge.found
        and edge.target in inside
        and (box.is_block or _is_hidden_weight(view, edge, switches))
        for edge in view.edges
    )


def _is_hidden_weight(view: View, edge: Edge, switches: Switches) -> bool:
    return view.nodes[edge.source].role == "weight" and not switches.weights


def flows_differ(view: View, edge: Edge) -> bool:
    """Return whether both graphs have an edge and read it at another precision."""
    texts = {view.flows[flow].text for flow in edge.flows if flow is not None}
    return len(texts) > 1
