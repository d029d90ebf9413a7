"""Find rotary position embeddings, however they are written.

- Hugging Face: x * cos + cat(-x2, x1) * sin; interleaved with stack in place of cat
- vLLM: cat(x1 * cos - x2 * sin, x2 * cos + x1 * sin)
- a product of complex numbers

A concatenation with the part of x that is not rotated belongs to it (partial rotary).
"""

from jetrl_compile.group_finder import GroupFinder
from jetrl_compile.op_classes import ADDS, JOINS, MULS, SUBTRACTIONS


def rope_groups(finder: GroupFinder, forward: list[int]) -> None:
    """Group the nodes of each rotary embedding.

    Args:
        finder: Holds the groups; added to.
        forward: Forward nodes that may be part of one, in execution order.
    """
    nodes = finder.sources.nodes
    allowed = set(forward)
    for index in forward:
        node = nodes[index]
        if node.dtype.startswith("complex") and index not in finder.group_of:
            if not node.module.endswith("rotary_emb"):  # which makes the table
                finder.add([index], "rope", node.module)
            continue
        if node.target not in JOINS or index in finder.group_of:
            continue
        members = _negated_half(finder, index) or _two_halves(finder, index)
        if not members:
            continue
        members |= _with_unrotated(finder, members)
        free = [i for i in members & allowed if i not in finder.group_of]
        if index in free:
            module = node.module.removesuffix(".rotary_emb")
            finder.add(free, "rope", module)


def _negated_half(finder: GroupFinder, index: int) -> set[int]:
    """The members around cat(-x2, x1), or none."""
    nodes = finder.sources.nodes
    negated = [i for i in finder.reads(index) if nodes[i].target == "neg"]
    if not negated:
        return set()
    members = {index, *negated}
    for product in finder.readers(index):
        if nodes[product].target not in MULS:
            continue
        members.add(product)
        for total in finder.readers(product):
            if nodes[total].target in ADDS:
                reads = finder.reads(total)
                members |= {i for i in reads if nodes[i].target in MULS}
                members.add(total)
    return members


def _two_halves(finder: GroupFinder, index: int) -> set[int]:
    """The members of cat(x1 * cos - x2 * sin, x2 * cos + x1 * sin), or none."""
    nodes = finder.sources.nodes
    halves = finder.reads(index)
    kinds = {nodes[half].target for half in halves}
    if len(halves) != 2 or not (kinds & SUBTRACTIONS and kinds & ADDS):
        return set()
    members = {index, *halves}
    for half in halves:
        products = finder.reads(half)
        if len(products) != 2 or any(nodes[i].target not in MULS for i in products):
            return set()
        members.update(products)
    return members


def _with_unrotated(finder: GroupFinder, members: set[int]) -> set[int]:
    """The concatenations of a rotated part with the rest of the same tensor."""
    read = {i for member in members for i in finder.reads(member)} - members
    found: set[int] = set()
    for member in members:
        for reader in finder.readers(member):
            if finder.sources.nodes[reader].target in JOINS:
                others = set(finder.reads(reader)) - members
                if reader not in members and others and others <= read:
                    found.add(reader)
    return found
