"""Group the backward nodes of a module; sums of gradients join their parts."""

from jetrl_compile.group_finder import GroupFinder
from jetrl_compile.op_classes import ADDS


def backward_groups(finder: GroupFinder, loose: list[int]) -> None:
    """Group the backward nodes that are no weight GEMM.

    Constants, masks and indices that backward makes belong to the first node that reads
    them.

    Args:
        finder: Holds the groups; added to.
        loose: The nodes, in execution order.
    """
    nodes = finder.sources.nodes
    owner = _owners(finder, loose)
    helpers: dict[int, list[int]] = {}
    by_label: dict[str, list[int]] = {}
    label: dict[int, str] = {}
    for index in loose:
        if owner[index] != index:
            helpers.setdefault(owner[index], []).append(index)
            continue
        module = nodes[index].module or _gradient_module(finder, index, label)
        if nodes[index].target in ADDS:
            parts = {label.get(i, "") for i in finder.reads(index)}
            module = (parts.pop() if len(parts) == 1 else "") or f"+{index}"
        label[index] = module
        by_label.setdefault(module, []).append(index)
    for module, members in by_label.items():
        is_sum = module.startswith("+")
        for part in [members] if is_sum else finder.components(members):
            made = [i for index in part for i in helpers.get(index, ())]
            shape, name = ("sum", "") if is_sum else ("backward", module)
            finder.add([*part, *made], shape, name)


def _owners(finder: GroupFinder, loose: list[int]) -> dict[int, int]:
    """For each node, the node that it is made for: itself where it has a gradient."""
    computed = set(loose)
    owner: dict[int, int] = {}
    for index in reversed(loose):
        owner[index] = index
        if finder.sources.is_index[index]:
            found = next((i for i in finder.readers(index) if i in computed), index)
            owner[index] = owner[found] if found != index else index
    return owner


def _gradient_module(finder: GroupFinder, index: int, label: dict[int, str]) -> str:
    """The module of what a node without one reads: of a gradient, if it does."""
    nodes = finder.sources.nodes
    reads = sorted(finder.reads(index), key=lambda i: (nodes[i].backward, i))
    for source in reversed(reads):
        found = label.get(source) or nodes[source].module
        if nodes[source].op == "call" and found and not found.startswith("+"):
            return found
    return ""
