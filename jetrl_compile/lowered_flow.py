"""Read the flow of a lowered GEMM's operand back from the operators that make it."""

from jetrl_compile.capture import CapturedNode
from jetrl_compile.formats import AMAX_FLOOR, Flow
from jetrl_compile.gemm_sites import quantized_operand
from jetrl_compile.granularity import Granularity
from jetrl_compile.op_classes import LOWERED_REQUANTIZE
from jetrl_compile.tensor_sources import TensorSources

DIRECTION = {"fprop": "K", "dgrad": "N", "wgrad": "M"}


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
        # Codes stored in the model: made from BF16 by the weight sync.
        scales = sources.source(node.args[codes + 1].index).index
        powers = sources.nodes[scales].module.endswith("_ue8m0")
        flow = Flow(
            "e4m3",
            Granularity(*region),
            DIRECTION[role],
            "ue8m0" if powers else "fp32",
            AMAX_FLOOR,
            "divide",
            "bf16",
            "row_major",
        )
        return read, flow
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
        "row_major",
    )
    return held, flow
