"""Whether views of a stored matrix are still that matrix, or its transpose."""

from collections.abc import Iterable, Sequence

from jetrl_compile.captured_graph import CapturedNode
from jetrl_compile.op_classes import RESHAPES, TRANSPOSES

_ROWS, _COLUMNS, _BATCH = "rows", "columns", ""
Shape = Sequence[int | None]


def is_transposed(shape: Shape, views: Iterable[CapturedNode]) -> bool | None:
    """Return whether the last of some views is a matrix transposed.

    Args:
        shape: The matrix's shape.
        views: Transposes, reshapes, expansions and casts, each of the one before.

    Returns:
        None where rows and columns are mixed: the last view is another matrix.
    """
    axes = [_ROWS, _COLUMNS]
    for node in views:
        found: list[str] | None = axes
        if node.target in TRANSPOSES:
            found = _permuted(axes, node)
        elif node.target == "expand":
            found = [_BATCH] * (len(node.shape) - len(axes)) + axes
        elif node.target in RESHAPES and node.shape:
            found = _reshaped(axes, shape, node.shape)
        if found is None:
            return None
        axes = found
        shape = node.shape or shape
    if any(axes[:-2]):
        return None
    if axes[-2:] == [_ROWS, _COLUMNS]:
        return False
    return True if axes[-2:] == [_COLUMNS, _ROWS] else None


def _permuted(axes: list[str], node: CapturedNode) -> list[str] | None:
    numbers = [arg for arg in node.args[1:] if isinstance(arg, int)]
    lists = [arg for arg in node.args[1:] if isinstance(arg, (list, tuple))]
    size = len(axes)
    if node.target.startswith("permute"):
        order = [*(lists[0] if lists else node.kwargs.get("dims", numbers))]
        if sorted(dim % size for dim in order) != [*range(size)]:
            return None
        return [axes[dim] for dim in order]
    first, second = (*numbers, -2, -1)[:2] if len(numbers) == 2 else (-2, -1)
    result = [*axes]
    result[first], result[second] = axes[second], axes[first]
    return result


def _reshaped(axes: list[str], old: Shape, new: Shape) -> list[str] | None:
    """Dimensions of size 1 come and go; the others stay as they are, in their order."""
    if tuple(old) == tuple(new):
        return axes
    kept = [(size, axis) for size, axis in zip(old, axes, strict=True) if size != 1]
    if [size for size, _ in kept] != [size for size in new if size != 1]:
        return None
    rest = iter(axis for _, axis in kept)
    return [_BATCH if size == 1 else next(rest) for size in new]
