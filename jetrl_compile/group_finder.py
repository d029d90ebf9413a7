"""Groups of nodes, and walks over a captured graph that see through views and casts."""

from dataclasses import dataclass
from functools import cached_property

from jetrl_compile.tensor_sources import TensorSources


@dataclass
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

    @cached_property
    def members(self) -> frozenset[int]:
        """The nodes, to look one up."""
        return frozenset(self.nodes)


class GroupFinder:
    """What the rules that make groups share.

    Attributes:
        sources: Of the graph.
        group_of: For each node in a group, its group.
    """

    def __init__(self, sources: TensorSources) -> None:
        self.sources = sources
        self.group_of: dict[int, Group] = {}

    def add(self, nodes: list[int], shape: str, module: str) -> Group:
        """Make a group of nodes; one that was in another group leaves it."""
        group = Group(sorted(nodes) if len(nodes) > 1 else nodes, shape, module)
        for index in nodes:
            self.group_of[index] = group
        return group

    def reads(self, index: int) -> list[int]:
        """The makers of what a node reads, masks and positions apart."""
        sources, is_index = self.sources._sources, self.sources.is_index
        made = [sources[read].index for read in self.sources.inputs[index]]
        return [maker for maker in made if not is_index[maker]]

    def readers(self, index: int) -> list[int]:
        """The nodes that read a node's result, seen through views and casts."""
        users, passes = self.sources.users, self.sources.passes
        found: list[int] = []
        pending = [index]
        while pending:
            for user in users[pending.pop()]:
                if passes[user]:
                    pending.append(user)
                else:
                    found.append(user)
        return found

    def readers_in_forward(self, index: int) -> list[int]:
        """The forward nodes among the readers."""
        nodes = self.sources.nodes
        return [reader for reader in self.readers(index) if not nodes[reader].backward]

    def components(self, nodes: list[int]) -> list[list[int]]:
        """Split nodes into parts that are connected directly or through views.

        Nodes that read one activation belong together too.
        """
        if len(nodes) < 2:
            return [nodes] if nodes else []
        wanted = set(nodes)
        root = {index: index for index in nodes}

        def find(index: int) -> int:
            while root[index] != index:
                root[index] = root[root[index]]
                index = root[index]
            return index

        readers: dict[int, int] = {}
        for index in nodes:
            for source in self.reads(index):
                if source in wanted:
                    root[find(index)] = find(source)
                elif self.sources.nodes[source].op == "call":
                    root[find(index)] = find(readers.setdefault(source, index))
        parts: dict[int, list[int]] = {}
        for index in nodes:
            parts.setdefault(find(index), []).append(index)
        return list(parts.values())
