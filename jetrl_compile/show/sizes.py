"""How many bytes an operator reads over an edge, as far as the graph shows it.

A precision graph has no tensor shapes, but N and K of every GEMM. From those follow the
sizes of weights, and the features a token has at a GEMM's input and output; operators
that keep the number of features pass it on. What does not follow is not guessed.
"""

from collections.abc import Mapping, Sequence

from jetrl_compile.formats import Flow
from jetrl_compile.show.paired import Item, Use

_WIDTHS = {"e4m3": 1, "e5m2": 1, "fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
_WIDTHS |= {"bool": 1, "int8": 1, "uint8": 1, "int16": 2, "int32": 4, "int64": 8}
_GEMM = "gemm"  # a grouped GEMM has some of the tokens for each of its weights
_KEEPING = ("norm", "rope", "residual_add", "bias_add", "cast", "activation")
_FEATURES = ("x", "branch", "residual", "gate", "up")  # operands that have all of them
_SWEEPS = 3


def edge_bytes(
    items: Sequence[Item], uses: Sequence[Use], tokens: int
) -> dict[tuple[str, str, str], int]:
    """Return the bytes that each edge carries, scales included.

    Args:
        items: In execution order.
        uses: The edges.
        tokens: How many tokens the batch has.

    Returns:
        By source, target and operand; edges of unknown size are left out.
    """
    by_name = {item.name: item for item in items}
    features = _features(by_name, uses)
    found: dict[tuple[str, str, str], int] = {}
    for use in uses:
        shape = _shape(by_name[use.source], by_name[use.target], use, features, tokens)
        if shape is not None and use.flow.dtype in _WIDTHS:
            key = (use.source, use.target, use.operand)
            found[key] = flow_bytes(use.flow, shape)
    return found


def flow_bytes(flow: Flow, shape: tuple[int, int]) -> int:
    """Return the bytes of a tensor of a known dtype, its scales included.

    Args:
        flow: How it is read.
        shape: Rows and columns, the contraction dimension last.
    """
    size = shape[0] * shape[1] * _WIDTHS[flow.dtype]
    if flow.granularity is None:
        return size
    rows, cols = flow.granularity.scale_shape(shape)
    return size + rows * cols * (1 if flow.scale_format == "ue8m0" else 4)


def _shape(
    source: Item,
    target: Item,
    use: Use,
    features: Mapping[str, int],
    tokens: int,
) -> tuple[int, int] | None:
    gemm = _gemm(target)
    if source.operator.kind == "parameter":
        if gemm is None or use.operand not in ("w", "weight"):
            return None
        n, k = gemm
        return (k, n) if target.operator.role == "dgrad" else (n, k)
    width = _operand_features(target, use.operand)
    width = features.get(use.source) if width is None else width
    if width is None:
        return None
    along_tokens = use.flow.direction == "M"
    return (width, tokens) if along_tokens else (tokens, width)


def _features(by_name: Mapping[str, Item], uses: Sequence[Use]) -> dict[str, int]:
    """Features a token has in what each operator makes."""
    found: dict[str, int] = {}
    for name, item in by_name.items():
        if gemm := _gemm(item):
            n, k = gemm
            made = {"fprop": n, "dgrad": k}.get(item.operator.role)
            if made is not None:
                found[name] = made
    for use in uses:
        width = _operand_features(by_name[use.target], use.operand)
        if width is not None and by_name[use.source].operator.kind != "parameter":
            found.setdefault(use.source, width)
    keeping = [use for use in uses if _keeps(by_name[use.target], use)]
    for _ in range(_SWEEPS):
        before = len(found)
        for use in keeping:
            if use.source in found:
                found.setdefault(use.target, found[use.source])
        for use in reversed(keeping):
            if use.target in found:
                found.setdefault(use.source, found[use.target])
        if len(found) == before:
            break
    return found


def _keeps(target: Item, use: Use) -> bool:
    """Whether the operand has as many features as the operator's result."""
    if target.operator.role == "grad_sum":
        return True
    return target.operator.kind in _KEEPING and use.operand in _FEATURES


def _operand_features(target: Item, operand: str) -> int | None:
    """Features of an operand of a GEMM that is no weight."""
    gemm = _gemm(target)
    if gemm is None:
        return None
    return {"x": gemm[1], "dy": gemm[0]}.get(operand)


def _gemm(item: Item) -> tuple[int, int] | None:
    """N and K of a GEMM, None for anything else or where they are not known."""
    op = item.operator
    params = dict(op.params)
    n, k = params.get("N"), params.get("K")
    if op.kind == _GEMM and type(n) is int and type(k) is int:
        return n, k
    return None
