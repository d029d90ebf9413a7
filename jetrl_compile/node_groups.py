"""Which nodes of a captured graph make up one operator.

A node that is no view, cast or weight GEMM belongs to one group: all nodes of a leaf
module (a norm, an activation, a rotary table) are one; so are the nodes of a rotary
embedding, of an attention written out as matmuls, of an activation and the multiply
that gates it, and the backward nodes of one module. Any other node is its own group.
"""

from dataclasses import dataclass, field

from jetrl_compile.capture import CapturedNode
from jetrl_compile.gemm_sites import GemmSites
from jetrl_compile.op_classes import (
    ADD_NORMS,
    ADDS,
    ATTENTION,
    GATED_ACTIVATIONS,
    GROUPED_GEMMS,
    MATMULS,
    MULS,
    NORMS,
    ROPES,
)
from jetrl_compile.tensor_sources import TensorSources


@dataclass(slots=True)
class Group:
    """Nodes that are one operator.

    Attributes:
        nodes: Their indices, in execution order.
        shape: What made it a group: "leaf", "rope", "attention", "index", "backward",
            "sum", "gated" or "single".
        module: Its module path.
    """

    nodes: list[int]
    shape: str
    module: str
    members: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Index the nodes."""
        self.members = set(self.nodes)


# Operators that stand alone whatever module runs them.
_OPAQUE = (
    ATTENTION | NORMS | ADD_NORMS | ROPES | frozenset(GATED_ACTIVATIONS) | GROUPED_GEMMS
)


class Grouping:
    """Groups of a captured graph's nodes.

    Attributes:
        groups: In the order of their first nodes.
        group_of: For each node in a group, its group.
    """

    def __init__(self, sources: TensorSources, gemms: GemmSites) -> None:
        self.sources = sources
        self.gemms = gemms
        self.group_of: dict[int, Group] = {}
        self._parents = self._inner_modules()
        loose: list[int] = []
        leaves: dict[tuple[str, str], list[int]] = {}
        for index, node in enumerate(sources.nodes):
            if (
                node.op != "call"
                or sources.passes[index]
                or index in gemms.sites
                or node.target.startswith("jetrl.")
            ):
                continue
            if sources.is_index[index] and not node.backward:
                leaves.setdefault(("index", node.module), []).append(index)
            elif node.backward:
                loose.append(index)
            elif node.target in _OPAQUE:
                self._add([index], "single", node.module)
            elif node.module not in self._parents:
                leaves.setdefault(("leaf", node.module), []).append(index)
            else:
                loose.append(index)
        for (shape, module), nodes in leaves.items():
            parts = [nodes] if shape == "index" else self._components(nodes)
            for part in parts:
                self._add(part, shape, module)
        forward = [i for i in loose if not sources.nodes[i].backward]
        self._written_out_attention(forward)
        self._rotary(forward)
        self._gated(forward)
        for index in forward:
            if index not in self.group_of:
                self._add([index], "single", sources.nodes[index].module)
        self._backward([i for i in loose if sources.nodes[i].backward])
        unique = {id(group): group for group in self.group_of.values()}
        self.groups = sorted(unique.values(), key=lambda group: group.nodes[0])

    def _add(self, nodes: list[int], shape: str, module: str) -> None:
        group = Group(sorted(nodes), shape, module)
        for index in nodes:
            self.group_of[index] = group

    def _inner_modules(self) -> set[str]:
        """Paths that have a module below them."""
        inner: set[str] = {""}
        for path in {node.module for node in self.sources.nodes if node.op == "call"}:
            while "." in path:
                path = path.rpartition(".")[0]
                inner.add(path)
        return inner

    def _components(self, nodes: list[int]) -> list[list[int]]:
        """Split nodes into parts that are connected directly or through views.

        Nodes that read one activation belong together too.
        """
        wanted = set(nodes)
        root = {index: index for index in nodes}

        def find(index: int) -> int:
            while root[index] != index:
                root[index] = root[root[index]]
                index = root[index]
            return index

        readers: dict[int, int] = {}
        for index in nodes:
            for source in self._reads(index):
                if source in wanted:
                    root[find(index)] = find(source)
                elif self.sources.nodes[source].op == "call":
                    root[find(index)] = find(readers.setdefault(source, index))
        parts: dict[int, list[int]] = {}
        for index in nodes:
            parts.setdefault(find(index), []).append(index)
        return list(parts.values())

    def _reads(self, index: int) -> list[int]:
        """The makers of what a node reads, masks and positions apart."""
        made = (self.sources.source(read).index for read in self.sources.inputs[index])
        return [index for index in made if not self.sources.is_index[index]]

    def _readers(self, index: int) -> list[int]:
        """The nodes that read a node's result, seen through views and casts."""
        found: list[int] = []
        pending = [index]
        while pending:
            for user in self.sources.users[pending.pop()]:
                if self.sources.passes[user]:
                    pending.append(user)
                else:
                    found.append(user)
        return found

    def _written_out_attention(self, loose: list[int]) -> None:
        """Group the nodes between two matmuls of activations in one module."""
        by_module: dict[str, list[int]] = {}
        for index in loose:
            node = self.sources.nodes[index]
            if node.target in MATMULS:
                by_module.setdefault(node.module, []).append(index)
        allowed = set(loose)
        for module, matmuls in by_module.items():
            after: set[int] = set()
            pending = [matmuls[0]]
            while pending:
                index = pending.pop()
                if index in after:
                    continue
                after.add(index)
                pending += [
                    user
                    for user in self._readers(index)
                    if user in allowed and self.sources.nodes[user].module == module
                ]
            core: set[int] = set()
            pending = [index for index in matmuls if index in after]
            while pending:
                index = pending.pop()
                if index in core or index not in after:
                    continue
                core.add(index)
                pending += self._reads(index)
            if len(matmuls) > 1 and len(core) > 2:
                self._add(sorted(core), "attention", module)

    def _rotary(self, loose: list[int]) -> None:
        """Group each x * cos + cat(-x2, x1) * sin, and complex rotations."""
        nodes = self.sources.nodes
        allowed = set(loose)
        for index in loose:
            if index in self.group_of:
                continue
            node = nodes[index]
            if node.dtype.startswith("complex"):
                self._add([index], "rope", node.module)
                continue
            negated = [i for i in self._reads(index) if nodes[i].target == "neg"]
            if node.target != "cat" or not negated:
                continue
            members = {index, *negated}
            for product in self._readers(index):
                if nodes[product].target not in MULS:
                    continue
                members.add(product)
                for total in self._readers(product):
                    if nodes[total].target in ADDS:
                        reads = self._reads(total)
                        members |= {i for i in reads if nodes[i].target in MULS}
                        members.add(total)
            free = [i for i in members & allowed if i not in self.group_of]
            self._add(free, "rope", node.module)

    def _gated(self, loose: list[int]) -> None:
        """Join an activation with the multiply that alone reads it."""
        for index in loose:
            node = self.sources.nodes[index]
            reads = self._reads(index)
            if node.target not in MULS or index in self.group_of or len(reads) != 2:
                continue
            for source in reads:
                group = self.group_of.get(source)
                if (
                    group is not None
                    and group.shape == "leaf"
                    and is_activation_class(self.sources.nodes[source])
                    and self._readers_in_forward(source) == [index]
                ):
                    self._add([*group.nodes, index], "gated", group.module)
                    break

    def _readers_in_forward(self, index: int) -> list[int]:
        return [i for i in self._readers(index) if not self.sources.nodes[i].backward]

    def _backward(self, loose: list[int]) -> None:
        """Group the backward nodes of a module; sums of gradients join their parts."""
        nodes = self.sources.nodes
        by_label: dict[str, list[int]] = {}
        label: dict[int, str] = {}
        for index in loose:
            module = nodes[index].module or self._gradient_module(index, label)
            if nodes[index].target in ADDS:
                parts = {label.get(i, "") for i in self._reads(index)}
                module = (parts.pop() if len(parts) == 1 else "") or f"+{index}"
            label[index] = module
            by_label.setdefault(module, []).append(index)
        for module, members in by_label.items():
            if module.startswith("+"):
                self._add(members, "sum", "")
                continue
            for part in self._components(members):
                self._add(part, "backward", module)

    def _gradient_module(self, index: int, label: dict[int, str]) -> str:
        """The module of what a node without one reads: of a gradient, if it does."""
        nodes = self.sources.nodes
        reads = sorted(self._reads(index), key=lambda i: (nodes[i].backward, i))
        for source in reversed(reads):
            found = label.get(source) or nodes[source].module
            if nodes[source].op == "call" and found and not found.startswith("+"):
                return found
        return ""


def is_activation_class(node: CapturedNode) -> bool:
    """Whether a node's module is an activation, by its class: SiLU, GELUActivation."""
    name = node.module_class.lower()
    return any(part in name for part in ("silu", "gelu", "relu", "activation", "swish"))
