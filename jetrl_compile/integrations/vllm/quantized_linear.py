"""What a linear layer of the engine computes, as operators of the precision flow."""

import torch
from torch import Tensor, nn

from jetrl_compile.formats import Flow
from jetrl_compile.integrations.vllm.layout import LayerLayout
from jetrl_compile.integrations.vllm.storage import LAYOUT, scales_of
from jetrl_compile.kernels import ops
from jetrl_compile.kernels.gemm_parts import gemm_parts
from jetrl_compile.recipe import GemmFlows


def quantized_linear(
    layer: nn.Module, x: Tensor, bias: Tensor | None, flows: GemmFlows, provider: str
) -> Tensor:
    """Return x w^T + bias in BF16, the bias added to the rounded product.

    Args:
        layer: A layer with FP8 storage.
        x: (..., K), BF16.
        bias: (N,), BF16, or None.
        flows: How x and the weight are quantized.
        provider: Of the GEMM.
    """
    layout: LayerLayout = getattr(layer, LAYOUT)
    flow_x, flow_w = flows.fprop_x, flows.fprop_w
    flat = x if x.dim() == 2 else x.reshape(-1, layout.cols)
    codes, scales = ops.quantize(flat, *_region(flow_x), False, *_scale(flow_x), None)
    numbers = (*_region(flow_x), *_region(flow_w))
    last = (torch.bfloat16, provider)
    stored = (layer.weight, scales_of(layer))
    if layout.is_one_matrix:
        y: Tensor = ops.gemm(codes, scales, *stored, *numbers, *last)
    else:
        rows = [part.rows for part in layout.parts]
        y = gemm_parts(codes, scales, *stored, rows, *numbers, *last)
    if bias is not None:
        y = y + bias
    if x.dim() != 2:
        y = y.reshape(*x.shape[:-1], layout.rows)
    return y


def _region(flow: Flow) -> tuple[int, int]:
    assert flow.granularity is not None
    return flow.granularity.rows, flow.granularity.cols


def _scale(flow: Flow) -> tuple[str, float]:
    assert flow.scale_format is not None
    assert flow.amax_floor is not None
    return flow.scale_format, flow.amax_floor
