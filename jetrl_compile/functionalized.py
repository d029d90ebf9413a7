"""Read operators that write to their arguments back from their functional form.

AOTAutograd wraps an operator such as vLLM's attention, which writes to `output`, into
`auto_functionalized(op, ...)`, whose results are the operator's own and then the
tensors that it wrote to. Captured is the operator itself, with those as its results.
"""

from collections.abc import Callable
from typing import Any

import torch

from jetrl_compile.captured_graph import CapturedNode

_WRAPPERS = ("auto_functionalized", "auto_functionalized_v2")


def unwrap_functionalized(
    node: torch.fx.Node,
    item: CapturedNode,
    own_results: dict[torch.fx.Node, int],
    op_name: Callable[[Any], str],
) -> None:
    """Make a wrapped operator, or the choice of one of its results, its plain self.

    Args:
        node: The FX node.
        item: Its captured form; changed in place.
        own_results: For each wrapper seen, how many results precede the tensors that
            the operator wrote to; filled here.
        op_name: Names an operator.
    """
    if item.target in _WRAPPERS and isinstance(node.args[0], torch._ops.OpOverload):
        own_results[node] = _unwrap(node.args[0], item, op_name)
    elif item.target == "getitem" and node.args[0] in own_results:
        maker, slot = node.args
        if isinstance(maker, torch.fx.Node) and isinstance(slot, int):
            item.args = (item.args[0], slot - own_results[maker])


def _unwrap(
    operator: torch._ops.OpOverload, item: CapturedNode, op_name: Callable[[Any], str]
) -> int:
    schema = operator._schema
    bases = item.kwargs.get("_all_bases", ())
    args: list[Any] = []
    for argument in schema.arguments:
        base = item.kwargs.get(f"_{argument.name}_base_index")
        if isinstance(base, int):
            args.append(bases[base])
        else:
            args.append(item.kwargs.get(argument.name))
    item.target = op_name(operator)
    item.args, item.kwargs = tuple(args), {}
    # A result of None counts as one in the wrapper's results.
    own = max(1, len(schema.returns))
    item.outputs = item.outputs[own:]
    return own
