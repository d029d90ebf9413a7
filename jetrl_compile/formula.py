"""A digest of what the nodes of one operator compute.

Parameters say what people ask for (eps, the function's name); the digest says the rest:
constants, dimensions, the order of steps, which half of a tensor is read. It is made of
AOTAutograd's operators, so it is comparable between graphs of that level alone. Masks
and positions take no part in it, nor does attention, whose mask may be written in
several ways.
"""

import hashlib
from typing import Any

from jetrl_compile.captured_graph import CapturedNode, Ref
from jetrl_compile.gemm_sites import FUSED_LAYERS
from jetrl_compile.group_finder import Group
from jetrl_compile.op_classes import ATTENTION, EMBEDDINGS, SPLITS
from jetrl_compile.tensor_sources import ROPE_TABLE, TensorSources

_WITHOUT = ("index", "backward", "sum", "attention")


def formula_of(group: Group, sources: TensorSources, level: str) -> str:
    """Return "<level>:<hash>", or "" where there is nothing to compare.

    Args:
        group: The operator's nodes.
        sources: Of the graph.
        level: "aten" for AOTAutograd's graphs; "" gives "".
    """
    nodes = [sources.nodes[index] for index in group.nodes]
    if (
        not level
        or group.shape in _WITHOUT
        or any(n.target in ATTENTION for n in nodes)
    ):
        return ""
    writer = _Writer(group, sources)
    lines = [writer.line(node) for node in nodes]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return f"{level}:{digest[:16]}"


class _Writer:
    """Writes nodes with local numbers in place of names."""

    def __init__(self, group: Group, sources: TensorSources) -> None:
        self.sources = sources
        self.local = {index: f"%{n}" for n, index in enumerate(group.nodes)}
        self.outer: dict[tuple[int, int, str], str] = {}

    def line(self, node: CapturedNode) -> str:
        """Return a node as text: its operator, operands and constants."""
        if node.target in EMBEDDINGS:  # a padding index changes gradients alone
            return f"{node.target}({', '.join(map(self.value, node.args[:2]))})"
        keyed = sorted((k, v) for k, v in node.kwargs.items() if v is not None)
        kwargs = [f"{key}={self.value(value)}" for key, value in keyed]
        args = [self.value(value) for value in node.args]
        return f"{node.target}({', '.join([*args, *kwargs])}) {node.dtype}"

    def value(self, value: Any) -> str:
        """Return an argument as text."""
        if isinstance(value, Ref):
            return self.read(value.index)
        if isinstance(value, (tuple, list)):
            return f"[{' '.join(map(self.value, value))}]"
        return repr(value)

    def read(self, index: int) -> str:
        """Return what a node reads: which tensor, which part of its last dimension."""
        source = self.sources.source(index)
        if self.sources.is_index[source.index]:
            return "index"
        name = self.local.get(source.index)
        cuts = self.cuts(index, source.index)
        if name is None:
            seam = ""
            module = self.sources.nodes[source.index].module
            if module.rpartition(".")[2] in FUSED_LAYERS or module.endswith(ROPE_TABLE):
                # What is read is the result of one of the layers that are fused, or
                # the table of cosines or that of sines.
                seam, cuts = "".join(cuts[:1]), cuts[1:]
            key = (source.index, source.slot, seam)
            name = self.outer.setdefault(key, f"x{len(self.outer)}")
        return f"{name}{''.join(cuts)}:{source.dtype}"

    def cuts(self, index: int, source: int) -> list[str]:
        """Return the cuts of the last dimension between a tensor and its reader."""
        cuts: list[str] = []
        item = ""
        while index != source and self.sources.inputs[index]:
            node = self.sources.nodes[index]
            before = self.sources.nodes[self.sources.inputs[index][0]]
            if node.target in SPLITS and _on_last(node, before):
                numbers = [a for a in node.args if not isinstance(a, Ref)]
                if node.target in ("slice", "narrow"):  # whatever the rank is
                    numbers[0] = -1
                cuts.append(f"{node.target}{numbers}{item}")
                item = ""
            elif node.target == "getitem" and before.target in SPLITS:
                item = str(node.args[1:])
            index = self.sources.inputs[index][0]
        return cuts[::-1]


def _on_last(node: CapturedNode, before: CapturedNode) -> bool:
    """Whether a slice or split is along the last dimension."""
    place = 1 if node.target in ("slice", "narrow") else 2
    dim = node.kwargs.get("dim", node.args[place] if len(node.args) > place else 0)
    return dim in (-1, len(before.shape) - 1)
