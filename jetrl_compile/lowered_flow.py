"""Read the flow of a GEMM operand back from the operators that make or store it."""

from typing import Any

from jetrl_compile.captured_graph import CapturedNode
from jetrl_compile.formats import AMAX_FLOOR, Flow, scale_layout
from jetrl_compile.gemm_sites import GemmSite, quantized_operand
from jetrl_compile.granularity import Granularity
from jetrl_compile.op_classes import LOWERED_DEQUANTIZE, LOWERED_REQUANTIZE
from jetrl_compile.tensor_sources import TensorSources

DIRECTION = {"fprop": "K", "dgrad": "N", "wgrad": "M"}
# What an engine may say of stored codes that are not made by the contract.
_STORED = ("scale_format", "amax_floor", "scale_apply", "source_dtype", "scale_layout")


def lowered_provider(node: CapturedNode) -> str:
    """Return the provider of a `jetrl.gemm` node."""
    return str(node.args[9])


def lowered_flow(
    sources: TensorSources, node: CapturedNode, codes: int, role: str
) -> tuple[int, Flow]:
    """Return what an operand of a `jetrl.gemm` was quantized from, and how.

    Args:
        sources: Of the graph.
        node: The GEMM.
        codes: Position of the operand's codes among its arguments: 0 or 2.
        role: The GEMM's role.

    Returns:
        The node that holds the tensor before quantization (the codes themselves where
        the model stores them), and the flow.
    """
    read = node.args[codes].index
    region = node.args[4:6] if codes == 0 else node.args[6:8]
    made = quantized_operand(sources, read)
    if made is None:
        return read, _stored(sources, read, node.args[codes + 1].index, region, role)
    quantize, _ = made
    if quantize.target == LOWERED_REQUANTIZE:
        rows, cols, _, scale_format, floor = quantize.args[4:9]
        source = "e4m3"
        origin = quantized_operand(sources, quantize.args[0].index)
        held = quantize.args[0].index if origin is None else origin[0].args[0].index
    else:
        rows, cols, _, scale_format, floor = quantize.args[1:6]
        source, held = "bf16", quantize.args[0].index
    flow = Flow(
        "e4m3",
        Granularity(rows, cols),
        DIRECTION[role],
        scale_format,
        floor,
        "divide",
        source,
        scale_layout(Granularity(rows, cols)),
    )
    return held, flow


def stored_flow(sources: TensorSources, site: GemmSite) -> Flow | None:
    """Return the flow of a weight that is stored as codes and dequantized, or None."""
    node = sources.nodes[site.weight]
    if node.target != LOWERED_DEQUANTIZE:
        return None
    codes, scales, *region = node.args[:4]
    return _stored(sources, codes.index, scales.index, tuple(region), site.role)


def _stored(
    sources: TensorSources, codes: int, scales: int, region: tuple[int, ...], role: str
) -> Flow:
    """Codes stored in the model: made from BF16 by the weight sync.

    Scales whose buffer is called "..._ue8m0" are powers of two; an engine that makes
    its codes otherwise says so in the attributes of the codes.
    """
    held = sources.nodes[sources.source(codes).index]
    name = sources.nodes[sources.source(scales).index].module
    values: dict[str, Any] = {
        "scale_format": "ue8m0" if name.endswith("_ue8m0") else "fp32",
        "amax_floor": AMAX_FLOOR,
        "scale_apply": "divide",
        "source_dtype": "bf16",
        "scale_layout": "row_major",
    }
    values |= {key: held.attributes[key] for key in _STORED if key in held.attributes}
    return Flow("e4m3", Granularity(*region), DIRECTION[role], **values)
