"""Spell vLLM's rotary embedding as the trainer's model code does.

vLLM computes both halves apart, `x1 cos - x2 sin` and `x2 cos + x1 sin`; Hugging Face's
models compute `x cos + rotate_half(x) sin` on the whole. In exact steps both are the
same numbers. Compiled to one kernel, intermediate products are not rounded, and which
product a fused multiply-add takes depends on the spelling: so both sides spell alike.

Source: vLLM 0.24, layers/rotary_embedding/common.py; transformers 5, modeling_llama.py.
"""

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from jetrl_compile.passes.fused_patterns import calls
from jetrl_compile.passes.graph_nodes import emit

aten = torch.ops.aten
_END = 9223372036854775807  # how AOTAutograd writes an open slice


def spell_rope(graph: Graph) -> int:
    """Rewrite the rotary embeddings of a functional graph; return how many."""
    found = [(node, _match(node)) for node in graph.nodes]
    tables: dict[Node, Node] = {}
    count = 0
    for node, match in found:
        if match is None:
            continue
        x, cos, sin = match
        with graph.inserting_before(node):
            result = _rotate(graph, node, x, _whole(graph, cos, tables), sin, tables)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        count += 1
    if count:
        graph.eliminate_dead_code()
    return count


def _match(node: Node) -> tuple[Node, Node, Node] | None:
    """Return x, cos and sin, of half of x's width, if a node is a rotary embedding."""
    if not calls(node, aten.cat.default) or len(node.args) < 2:
        return None
    halves: Any = node.args[0]
    dim = node.args[1]
    if not isinstance(halves, (list, tuple)) or len(halves) != 2:
        return None
    first, second = halves
    rank = node.meta["val"].dim()
    if dim not in (-1, rank - 1) or not calls(first, aten.sub.Tensor):
        return None
    if not calls(second, aten.add.Tensor):
        return None
    terms: list[Any] = [*first.args, *second.args]
    if len(terms) != 4 or not all(calls(term, aten.mul.Tensor) for term in terms):
        return None
    (x1, cos), (x2, sin), (x2_again, cos_again), (x1_again, sin_again) = (
        term.args for term in terms
    )
    if (x1, x2, cos, sin) != (x1_again, x2_again, cos_again, sin_again):
        return None
    x = _halved(x1, x2)
    return None if x is None else (x, cos, sin)


def _halved(x1: Any, x2: Any) -> Node | None:
    """Return the tensor whose two halves two nodes are."""
    if not (calls(x1, operator.getitem) and calls(x2, operator.getitem)):
        return None
    whole: Any = x1.args[0]
    if x2.args[0] is not whole or (x1.args[1], x2.args[1]) != (0, 1):
        return None
    if not calls(whole, aten.split.Tensor):
        return None
    x, size = whole.args[:2]
    width = x.meta["val"].shape[-1]
    dim = whole.args[2] if len(whole.args) > 2 else 0
    last = (-1, x.meta["val"].dim() - 1)
    return x if dim in last and width == 2 * size else None


def _whole(graph: Graph, table: Node, tables: dict[Node, Node]) -> Node:
    """Return a table of half of the width twice, side by side."""
    if table not in tables:
        with graph.inserting_after(table):
            sizes = [1] * (table.meta["val"].dim() - 1) + [2]
            tables[table] = emit(graph, aten.repeat.default, (table, sizes), table)
    return tables[table]


def _rotate(
    graph: Graph, node: Node, x: Node, cos: Node, sin: Node, tables: dict[Node, Node]
) -> Node:
    def call(target: Any, *args: Any) -> Node:
        return emit(graph, target, args, node)

    half = x.meta["val"].shape[-1] // 2
    last = x.meta["val"].dim() - 1
    straight = call(aten.mul.Tensor, x, cos)
    low = call(aten.slice.Tensor, x, last, 0, half)
    high = call(aten.slice.Tensor, x, last, half, _END)
    turned = call(aten.cat.default, [call(aten.neg.default, high), low], -1)
    product = call(aten.mul.Tensor, turned, _whole(graph, sin, tables))
    return call(aten.add.Tensor, straight, product)
