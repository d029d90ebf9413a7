"""The forms that exact mode replaces by one operator each, in forward.

Norms and gated activations are matched as `fused_patterns` does; here are the rotary
embedding, and what is left of a form that backward alone reads.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from jetrl_compile.passes.fused_patterns import calls

aten = torch.ops.aten
BACKWARD = "is_backward"


@dataclass(frozen=True)
class Rotation:
    """x cos + cat(-x2, x1) sin, all in BF16.

    Attributes:
        result: The node of the sum.
        x: What is rotated.
        cos: The cosines, of the width of x.
        sin: The sines.
    """

    result: Node
    x: Node
    cos: Node
    sin: Node


def is_backward(node: Node) -> bool:
    """Whether a node is part of backward."""
    return node.meta.get("partitioner_tag") == BACKWARD


def match_rotation(result: Any) -> Rotation | None:
    """Return the rotary embedding that a node is the result of, or None."""
    if not calls(result, aten.add.Tensor):
        return None
    straight, turned = result.args[:2]
    if not calls(straight, aten.mul.Tensor) or not calls(turned, aten.mul.Tensor):
        return None
    x, cos = straight.args
    halves, sin = turned.args
    if not calls(halves, aten.cat.default) or halves.args[1:] not in ((-1,), _last(x)):
        return None
    parts: Any = halves.args[0]
    if len(parts) != 2 or not calls(parts[0], aten.neg.default):
        return None
    half = x.meta["val"].shape[-1] // 2
    if _half_of(parts[0].args[0], half) != (x, 1) or _half_of(parts[1], half) != (x, 0):
        return None
    tensors = (result, x, cos, sin)
    if not all(isinstance(t, Node) for t in tensors):
        return None
    values = [t.meta["val"] for t in tensors]
    if {value.dtype for value in values} != {torch.bfloat16}:
        return None
    if str(values[0].shape) != str(values[1].shape):
        return None
    return Rotation(*tensors)


def _last(x: Any) -> tuple[int]:
    return (x.meta["val"].dim() - 1,)


def _half_of(node: Any, half: int) -> tuple[Any, int]:
    """Return the tensor that a node is half of, and which half: 0 or 1."""
    if calls(node, aten.slice.Tensor):
        x, dim, start, *end = node.args
        whole = x.meta["val"]
        if dim not in (-1, whole.dim() - 1) or len(node.args) > 4:
            return None, -1
        stop = min(end[0], whole.shape[-1]) if end else whole.shape[-1]
        if (start, stop) == (0, half):
            return x, 0
        return (x, 1) if (start, stop) == (half, 2 * half) else (None, -1)
    if calls(node, operator.getitem) and calls(node.args[0], aten.split.Tensor):
        x, size, *dim = node.args[0].args
        if size == half and (dim or [0])[0] in (-1, x.meta["val"].dim() - 1):
            return x, node.args[1]
    return None, -1


def leave_to_backward(nodes: list[Node]) -> None:
    """Say of forward nodes that backward alone reads that they are part of it.

    Args:
        nodes: In the order of execution.
    """
    for node in reversed(nodes):
        if node.users and all(map(is_backward, node.users)):
            node.meta["partitioner_tag"] = BACKWARD


def chain(result: Node, inputs: list[Any]) -> list[Node]:
    """Return the nodes between inputs and a result, in the order of execution."""
    found: dict[Node, None] = {}
    pending = [result]
    while pending:
        node = pending.pop()
        if node in found or node in inputs or node.op != "call_function":
            continue
        found[node] = None
        pending += node.all_input_nodes
    order = {node: index for index, node in enumerate(result.graph.nodes)}
    return sorted(found, key=order.__getitem__)
