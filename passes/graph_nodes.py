"""Making and ordering FX nodes."""

import heapq
import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch.fx import Graph, Node

from jetrl_compile.errors import LoweringError, one_line

# Metadata that a new node takes from the node that it is inserted for.
_KEPT_META = (
    "nn_module_stack",
    "fwd_nn_module_stack",
    "stack_trace",
    "seq_nr",
    "partitioner_tag",
    "recompute",
    "ac_graph_id",
    "source_fn_stack",
    "fwd_source_fn_stack",
)


def copy_graph(graph: Graph) -> Graph:
    """Return a graph with the same nodes; their metadata are shallow copies."""
    copied = Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied


# Marks a node in whose place another one was read before: see `refresh_values`.
STALE = "jetrl_replaced"


def replace_uses(old: Node, new: Node) -> None:
    """Let all readers of a node read one of another dtype, perhaps, or strides."""
    old.replace_all_uses_with(new)
    new.meta[STALE] = True


def kept_meta(node: Any) -> dict[str, Any]:
    """Return the metadata of a node that a new node in its place takes."""
    return {key: node.meta[key] for key in _KEPT_META if key in node.meta}


def hashable(value: Any) -> Any:
    """Return an argument of a call as something that a dictionary can hold."""
    if isinstance(value, (tuple, list)):
        return tuple(map(hashable, value))
    return value if isinstance(value, Hashable) else repr(value)


def call_key(target: Any, args: Any, node: Any) -> Any:
    """Return what makes two calls the same one: two modules may make the same tensor.

    Args:
        target: What is called.
        args: Its arguments.
        node: The node, or something that has its metadata.
    """
    meta = node.meta
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {"": ""}
    module = next(reversed(stack))
    return target, meta.get("partitioner_tag"), module, hashable(args)


def emit(graph: Graph, target: Any, args: tuple[Any, ...], anchor: Any) -> Node:
    """Insert a call at the graph's insertion point, with its true `meta["val"]`.

    Args:
        graph: The graph.
        target: An operator that has a fake implementation.
        args: Its arguments; nodes have `meta["val"]`.
        anchor: The node for which it is inserted: module path, phase and
            recomputation tags are taken from it.
    """
    node = graph.call_function(target, args)
    node.meta = kept_meta(anchor)
    values = torch.fx.map_arg(args, lambda read: read.meta["val"])
    node.meta["val"] = target(*values)
    return node


def emit_item(graph: Graph, node: Node, slot: int, anchor: Any) -> Node:
    """Insert the choice of one result of a node that has several."""
    return emit(graph, operator.getitem, (node, slot), anchor)


def maker_of(codes: Any, *targets: Any) -> Node | None:
    """Return the call of one of some operators that makes codes, its first result."""
    made = codes.args[0] if isinstance(codes, Node) and codes.args else None
    if isinstance(made, Node) and made.target in targets and codes.args[1] == 0:
        return made
    return None


def sort_nodes(graph: Graph) -> None:
    """Put each node behind what it reads, otherwise in the order that they have."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    waiting = {node: len(set(node.all_input_nodes)) for node in order}
    ready = [index for node, index in order.items() if not waiting[node]]
    nodes = list(order)
    heapq.heapify(ready)
    done = 0
    last: Node | None = None
    while ready:
        node = nodes[heapq.heappop(ready)]
        done += 1
        if last is not None:
            last.append(node)
        last = node
        for user in node.users:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, order[user])
    assert done == len(nodes), "the graph has a cycle"


def refresh_values(graph: Graph) -> int:
    """Give nodes whose inputs changed a true `meta["val"]` again.

    A pass that puts another node in a node's place may change the dtype or the strides
    of what reads it. AOTAutograd compares the strides of a saved tensor with those that
    it was said to have; where they differ it takes those of the first batch, as
    numbers.

    Args:
        graph: In the order of execution.

    Returns:
        How many values were made anew.

    Raises:
        LoweringError: A node cannot read what is now in its input's place.
    """
    changed: set[Node] = set()
    for node in graph.nodes:
        stale = node.meta.pop(STALE, False)
        if stale:
            changed.add(node)
        if node.op != "call_function" or changed.isdisjoint(node.all_input_nodes):
            continue
        args, kwargs = torch.fx.map_arg(
            (node.args, node.kwargs), lambda read: read.meta["val"]
        )
        try:
            value = node.target(*args, **kwargs)
        except RuntimeError as error:
            raise LoweringError(
                f"{node.format_node()} does not fit what it reads after a pass "
                f"({one_line(error)}); this is a fault of the compiler, please report "
                "it"
            ) from error
        if _order(value) != _order(node.meta["val"]):
            node.meta["val"] = value
            changed.add(node)
    return len(changed)


def _order(value: Any) -> Any:
    """The dtype, sizes and strides of a value, and of each of several."""
    if isinstance(value, (tuple, list)):
        return [_order(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return None
    return [str(n) for n in (value.dtype, *value.shape, *value.stride())]
