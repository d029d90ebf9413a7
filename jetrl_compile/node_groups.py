"""Which nodes of a captured graph make up one operator.

A node that is no view, cast or weight GEMM belongs to one group: all nodes of a leaf
module (a norm, an activation, a rotary table) are one; so are the nodes of a rotary
embedding, of an attention written out as matmuls, of an activation and the multiply
that gates it, and the backward nodes of one module. Any other node is its own group.
"""

from jetrl_compile.backward_groups import backward_groups
from jetrl_compile.captured_graph import CapturedNode
from jetrl_compile.gemm_sites import GemmSites
from jetrl_compile.group_finder import Group, GroupFinder
from jetrl_compile.op_classes import (
    ADD_NORMS,
    ADDS,
    ATTENTION,
    GATED_ACTIVATIONS,
    GROUPED_GEMMS,
    LOWERED_DEQUANTIZE,
    LOWERED_QUANTIZE,
    LOWERED_REQUANTIZE,
    MATMULS,
    MULS,
    NORMS,
    PARTIAL_VIEWS,
    ROPES,
    ROTATIONS,
    VLLM_CACHE_UPDATE,
)
from jetrl_compile.rope_groups import rope_groups
from jetrl_compile.tensor_sources import TensorSources, scalar_args
from jetrl_compile.written_attention import written_attentions

__all__ = ["Group", "Grouping", "is_activation_class"]

# Operators that stand alone whatever module runs them.
_OPAQUE = (
    ATTENTION | NORMS | ADD_NORMS | ROPES | frozenset(GATED_ACTIVATIONS) | GROUPED_GEMMS
)
# Part of the flow of the edges that they are on.
_FLOW = frozenset((LOWERED_QUANTIZE, LOWERED_REQUANTIZE, LOWERED_DEQUANTIZE))


class Grouping(GroupFinder):
    """Groups of a captured graph's nodes.

    Attributes:
        groups: In the order of their first nodes.
        group_of: For each node in a group, its group.
    """

    def __init__(self, sources: TensorSources, gemms: GemmSites) -> None:
        super().__init__(sources)
        loose: list[int] = []
        backward: list[int] = []
        leaves: dict[str, list[int]] = {}
        positions: dict[str, list[int]] = {}
        inner = self._inner_modules()
        passes, is_index, sites = sources.passes, sources.is_index, gemms.sites
        for index, node in enumerate(sources.nodes):
            if node.op != "call" or passes[index] or index in sites:
                continue
            if node.target in _FLOW:
                continue
            if node.backward:
                backward.append(index)
            elif is_index[index]:
                positions.setdefault(node.module, []).append(index)
            elif node.target in ROTATIONS:
                self.add([index], "rope", node.module.removesuffix(".rotary_emb"))
            elif node.target in _OPAQUE or (
                node.target in MATMULS
                and any(sources.of_parameters[i] for i in sources.inputs[index])
            ):
                self.add([index], "single", node.module)
            elif node.target == VLLM_CACHE_UPDATE or node.module in inner:
                loose.append(index)
            else:
                leaves.setdefault(node.module, []).append(index)
        for module, nodes in positions.items():
            self.add(nodes, "index", module)
        forward = sorted([*loose, *(i for nodes in leaves.values() for i in nodes)])
        rope_groups(self, forward)
        for module, nodes in leaves.items():
            free = [i for i in nodes if i not in self.group_of]
            for part in self.components(free):
                self._leaf(part, module)
        written_attentions(self, [i for i in loose if i not in self.group_of])
        self._gated(loose)
        for index in loose:
            if index not in self.group_of:
                self._alone(index)
        backward_groups(self, backward)
        unique = {id(group): group for group in self.group_of.values()}
        self.groups = sorted(unique.values(), key=lambda group: group.nodes[0])

    def _inner_modules(self) -> set[str]:
        """Paths that have a module below them."""
        inner: set[str] = {""}
        for path in {node.module for node in self.sources.nodes if node.op == "call"}:
            while "." in path:
                path = path.rpartition(".")[0]
                if path in inner:
                    break
                inner.add(path)
        return inner

    def _alone(self, index: int) -> None:
        """A node of its own; a write into vLLM's cache is part of its attention."""
        node = self.sources.nodes[index]
        if node.target == VLLM_CACHE_UPDATE:
            for reader in self.readers(index):
                group = self.group_of.get(reader)
                if group is not None and self.sources.nodes[reader].target in ATTENTION:
                    self.add([index, *group.nodes], "single", group.module)
                    return
        self.add([index], "single", node.module)

    def _leaf(self, nodes: list[int], module: str) -> None:
        """Add the nodes of a leaf module, a residual add before a norm apart."""
        kinds = {self.sources.nodes[index].target for index in nodes}
        if "rsqrt" in kinds and len(nodes) > 1:
            members = set(nodes)
            for index in nodes:
                if self._adds_two_inputs(index, members):
                    self.add([index], "single", module)
                    nodes = [other for other in nodes if other != index]
        first = self.sources.nodes[nodes[0]]
        gated = is_activation_class(first) and self._multiplies_an_input(nodes)
        self.add(nodes, "gated" if gated else "leaf", module)

    def _adds_two_inputs(self, index: int, members: set[int]) -> bool:
        """Whether a node adds two activations that come from outside a group."""
        node = self.sources.nodes[index]
        if node.target not in ADDS or scalar_args(node):
            return False
        reads = self.reads(index)
        return (
            len(reads) == 2
            and not members & set(reads)
            and not any(map(self.sources.is_parameter, reads))
        )

    def _multiplies_an_input(self, nodes: list[int]) -> bool:
        """Whether the last node multiplies what the others made of another tensor."""
        *others, last = nodes
        if not others or self.sources.nodes[last].target not in MULS:
            return False
        read = [self._tensor(read) for read in self.sources.inputs[last]]
        gates = [tensor for tensor in read if tensor not in others]
        known = {self._tensor(i) for node in others for i in self.sources.inputs[node]}
        return len(read) == 2 and len(gates) == 1 and gates[0] not in known

    def _tensor(self, index: int) -> int:
        """The tensor, or the part of one, that a node is another form of."""
        nodes, parent = self.sources.nodes, self.sources.parent
        while parent[index] >= 0 and nodes[index].target not in PARTIAL_VIEWS:
            index = parent[index]
        return index

    def _gated(self, loose: list[int]) -> None:
        """Join an activation with the multiply that alone reads it."""
        for index in loose:
            node = self.sources.nodes[index]
            if node.target not in MULS or index in self.group_of:
                continue
            reads = self.reads(index)
            if len(reads) != 2:
                continue
            for source in reads:
                group = self.group_of.get(source)
                if (
                    group is not None
                    and group.shape == "leaf"
                    and is_activation_class(self.sources.nodes[source])
                    and self.readers_in_forward(source) == [index]
                ):
                    self.add([*group.nodes, index], "gated", group.module)
                    break


def is_activation_class(node: CapturedNode) -> bool:
    """Whether a node's module is an activation, by its class: SiLU, GELUActivation."""
    name = node.module_class.lower()
    return any(part in name for part in ("silu", "gelu", "relu", "activation", "swish"))
