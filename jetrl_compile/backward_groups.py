"""Group the backward nodes of a module; sums of gradients join their parts."""

from jetrl_compile.group_finder import GroupFinder
from jetrl_compile.op_classes import ADDS


def backward_groups(finder: GroupFinder, loose: list[int]) -> None:
    """Group the backward nodes that are no weight GEMM.

    Args:
        finder: Holds the groups; added to.
        loose: The nodes, in execution order.
    """
    nodes = finder.sources.nodes
    by_label: dict[str, list[int]] = {}
    label: dict[int, str] = {}
    for index in loose:
        module = nodes[index].module or _gradient_module(finder, index, label)
        if nodes[index].target in ADDS:
            parts = {label.get(i, "") for i in finder.reads(index)}
            module = (parts.pop() if len(parts) == 1 else "") or f"+{index}"
        label[index] = module
        by_label.setdefault(module, []).append(index)
    for module, members in by_label.items():
        if module.startswith("+"):
            finder.add(members, "sum", "")
            continue
        for part in finder.components(members):
            finder.add(part, "backward", module)


def _gradient_module(finder: GroupFinder, index: int, label: dict[int, str]) -> str:
    """The module of what a node without one reads: of a gradient, if it does."""
    nodes = finder.sources.nodes
    reads = sorted(finder.reads(index), key=lambda i: (nodes[i].backward, i))
    for source in reversed(reads):
        found = label.get(source) or nodes[source].module
        if nodes[source].op == "call" and found and not found.startswith("+"):
            return found
    return ""
