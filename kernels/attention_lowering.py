"""Inductor leaves the memory of attention's mask and positions to them.

`sequences` tells batches apart by the storage of mask and positions and by PyTorch's
count of writes. Code that Inductor generates may put another tensor into a storage that
is not read any more, uncounted: where a graph makes two masks, the second one would get
the sequences of the first. Inputs of a graph, as layers have them, stay as they are.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from jetrl_compile.kernels.attention_ops import attention, attention_backward


@cache
def keep_sequences_apart() -> None:
    """Make Inductor leave the memory of attention's integers to them.

    Can go when a graph itself says which batch it attends to.
    """
    from torch._inductor import lowering

    inductor: Any = lowering  # untyped
    for op in (attention, attention_backward):
        lower = _lower(inductor.fallback_handler(op))
        inductor.add_needs_realized_inputs(op)
        inductor.register_lowering(op, type_promotion_kind=None)(lower)


def _lower(call: Any) -> Callable[..., Any]:
    from torch._inductor.virtualized import V

    virtualized: Any = V

    def lower(*args: Any) -> Any:
        made = call(*args)
        (kernel,) = made[0].data.data.inputs  # made[0] is the first of its results
        for used in kernel.inputs:
            if not used.get_dtype().is_floating_point:
                virtualized.graph.never_reuse_buffers.add(used.get_name())
        return made

    return lower
