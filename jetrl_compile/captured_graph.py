"""A captured graph: an FX graph's operators as data, free of torch objects.

The precision graph is built from this form, whatever the FX graph was (AOTAutograd's
joint or inference graph, or Dynamo's), and whether it was captured now or read from a
JSON file that was captured on another machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jetrl_compile.precision_graph import Scalar


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to the node of that index in `CapturedGraph.nodes`."""

    index: int


@dataclass(slots=True)
class CapturedNode:
    """One operator or placeholder.

    Attributes:
        name: Its name in the FX graph.
        op: "placeholder", "call", "attribute" (a constant of the module) or "output".
        target: Its name as `capture.op_name` gives it; for a placeholder "parameter",
            "buffer" or "input"; for an attribute "constant".
        args: Positional arguments as plain data in tuples and dicts, nodes as `Ref`.
        kwargs: Keyword arguments, likewise.
        dtype: Short name of its (first) result's dtype, or "" if it is no tensor.
        shape: The result's shape, None for a dynamic dimension.
        outputs: The dtypes of a result that is a tuple of tensors.
        module: The canonical path of the module that ran it; for a placeholder the
            path of the parameter or buffer, such as "lm_head.weight".
        module_class: That module's class name.
        backward: Whether it runs in backward.
        mutates: The arguments that it writes to, by position or keyword.
        attributes: What the engine knows of an opaque operator or a stored weight and
            the graph does not show: "scale" of an attention, "impl" of a vLLM IR
            operator, "scale_format" of stored codes.
    """

    name: str
    op: str
    target: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = ""
    shape: tuple[int | None, ...] = ()
    outputs: tuple[str, ...] = ()
    module: str = ""
    module_class: str = ""
    backward: bool = False
    mutates: tuple[int | str, ...] = ()
    attributes: Mapping[str, Scalar] = field(default_factory=dict)

    def inputs(self) -> list[int]:
        """Return the indices of the nodes that it reads, in order, repeats included."""
        found: list[int] = []
        _collect(self.args, found)
        if self.kwargs:
            _collect(self.kwargs, found)
        return found


@dataclass(frozen=True)
class CapturedGraph:
    """Nodes in execution order; each reads only earlier ones.

    Attributes:
        nodes: The nodes.
        known_reads: What `reads` is, where it is known already; else empty.
        level: "aten" for a graph of AOTAutograd's, whose operators are decomposed alike
            wherever it comes from; else "".
    """

    nodes: tuple[CapturedNode, ...]
    known_reads: Sequence[list[int]] = field(default=(), compare=False, repr=False)
    level: str = field(default="", compare=False)

    @cached_property
    def reads(self) -> Sequence[list[int]]:
        """For each node, the indices of the nodes that it reads."""
        return self.known_reads or [node.inputs() for node in self.nodes]


@dataclass(frozen=True, slots=True)
class PlaceholderInfo:
    """What is known of a graph input.

    Attributes:
        kind: "parameter", "buffer" or "input".
        path: The canonical path of a parameter or buffer; "" for an input.
    """

    kind: str
    path: str = ""


def _collect(value: Any, found: list[int]) -> None:
    for item in value if type(value) is tuple else value.values():
        kind = type(item)
        if kind is Ref:
            found.append(item.index)
        elif kind is tuple or kind is dict:
            _collect(item, found)
