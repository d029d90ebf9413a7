"""Find attention that a model writes out: the nodes between two matmuls of activations.

Eager attention is one of these, and so are linear and gated attentions, which no
library function computes.
"""

from jetrl_compile.group_finder import GroupFinder
from jetrl_compile.op_classes import MATMULS


def written_attentions(finder: GroupFinder, loose: list[int]) -> None:
    """Group the nodes between the matmuls of activations of each module.

    Args:
        finder: Holds the groups; added to.
        loose: Forward nodes that are in no group yet, in execution order.
    """
    sources = finder.sources
    by_module: dict[str, list[int]] = {}
    for index in loose:
        node = sources.nodes[index]
        if node.target in MATMULS and not any(
            map(sources.is_parameter, sources.inputs[index])
        ):
            by_module.setdefault(node.module, []).append(index)
    allowed = set(loose)
    for module, matmuls in by_module.items():
        if len(matmuls) < 2:
            continue
        after = _reached_from(finder, matmuls[0], allowed, module)
        core: set[int] = set()
        pending = [index for index in matmuls if index in after]
        while pending:
            index = pending.pop()
            if index in core or index not in after:
                continue
            core.add(index)
            pending += finder.reads(index)
        if len(core) > 2:
            finder.add(sorted(core), "attention", module)


def _reached_from(
    finder: GroupFinder, start: int, allowed: set[int], module: str
) -> set[int]:
    """The nodes of a module that read a node's result, directly or not."""
    after: set[int] = set()
    pending = [start]
    while pending:
        index = pending.pop()
        if index in after:
            continue
        after.add(index)
        pending += [
            user
            for user in finder.readers(index)
            if user in allowed and finder.sources.nodes[user].module == module
        ]
    return after
