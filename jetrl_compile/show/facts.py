"""Words about operators and flows: labels, and every attribute for the panel."""

from collections.abc import Iterable
from dataclasses import fields

from jetrl_compile.differences import attribute_label
from jetrl_compile.formats import Flow
from jetrl_compile.precision_graph import GEMM_KINDS, Operator
from jetrl_compile.show.paired import Item, Use
from jetrl_compile.show.styles import short_flow

Facts = tuple[tuple[str, str], ...]
_FLOW_FIELDS = tuple(field.name for field in fields(Flow))


def node_label(item: Item, path: str) -> str:
    """Return an operator's module path within its block.

    Args:
        item: The operator.
        path: The block's, "" for none.
    """
    module, colon, role = item.name.rpartition(":")
    name = module if colon else item.name
    if path and name == path:
        return role or path.rpartition(".")[2]
    return name.removeprefix(f"{path}.") if path else name


def node_text(item: Item, uses: Iterable[Use]) -> list[tuple[str, bool | None]]:
    """Return for each graph a few words on an operator's precision.

    Args:
        item: The operator.
        uses: What it reads.

    Returns:
        The words ("" where the graph lacks it), and whether it is an FP8 GEMM; None if
        it is no GEMM.
    """
    found: list[tuple[str, bool | None]] = []
    for side, op in enumerate(item.sides):
        if op is None:
            found.append(("", None))
            continue
        flows = {
            use.operand: flow for use in uses if (flow := use.flows[side]) is not None
        }
        if op.kind in GEMM_KINDS:
            flows.pop("bias", None)
            fp8 = bool(flows) and all(flow.is_quantized for flow in flows.values())
            words = ", ".join(
                f"{key} {short_flow(flow)}" for key, flow in flows.items()
            )
            head = op.role if ":" in op.name else op.kind
            found.append((f"{head}: {words}" if words else head, fp8))
            continue
        if op.kind == "parameter":
            found.append((op.reason or "parameter", None))
            continue
        head = op.role if ":" in op.name else op.kind
        words = f" in {op.compute_dtype}" if op.compute_dtype else ""
        found.append((head + words, None))
    return found


def node_facts(op: Operator | None) -> Facts:
    """Return every attribute of an operator that it has, as text."""
    if op is None:
        return ()
    invariant = {True: "independent of the batch", False: "depends on the batch"}
    bits = "" if op.batch_invariant is None else invariant[op.batch_invariant]
    facts = [
        ("kind", op.kind.replace("_", " ")),
        ("module", op.module),
        ("phase", op.phase),
        *((attribute_label(f"params.{key}"), str(value)) for key, value in op.params),
        (attribute_label("compute_dtype"), op.compute_dtype),
        ("provider", op.provider),
        (attribute_label("batch_invariant"), bits),
        ("note", op.reason),
        ("formula", op.formula),
    ]
    return tuple((key, value) for key, value in facts if value)


def flow_facts(flow: Flow) -> Facts:
    """Return every attribute of a flow; those that are not set say so."""
    values = ((name, getattr(flow, name)) for name in _FLOW_FIELDS)
    return tuple(
        (attribute_label(name), "not set" if value is None else str(value))
        for name, value in values
    )
