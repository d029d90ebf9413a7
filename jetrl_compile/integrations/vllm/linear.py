"""How a linear layer of vLLM computes: quantize x, multiply the stored FP8 weight.

The layer itself writes the flow into vLLM's graph. So it is the same whether the model
runs eagerly, compiled by vLLM or as one graph; passes only fuse what is there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.model_loader.reload.layerwise import (
    initialize_online_processing,
)
from vllm.model_executor.parameter import ModelWeightParameter

from jetrl_compile.errors import ModelError
from jetrl_compile.integrations.vllm.layout import LayerLayout, make_layout
from jetrl_compile.integrations.vllm.quantized_linear import quantized_linear
from jetrl_compile.integrations.vllm.storage import (
    LAYOUT,
    LOADED,
    counting,
    store,
)
from jetrl_compile.integrations.vllm.weight_state import WeightState
from jetrl_compile.kernels.dispatch import GemmShape, default_providers, select
from jetrl_compile.recipe import GemmFlows

PROVIDER = "jetrl_provider"  # attribute of a layer
_DONE = "_already_called_process_weights_after_loading"  # vLLM's mark


class JetRLLinearMethod(LinearMethodBase):
    """The quantization method of one layer.

    Attributes:
        prefix: The layer's module path in the engine.
        flows: The recipe's flows.
        packed: The model's `packed_modules_mapping`.
        state: Of the model's weights.
        providers: GEMM providers, the preferred one first; None: by device.
        unchecked: Whether weights are filled by no loader (load format "dummy").
    """

    uses_meta_device = True

    def __init__(
        self,
        prefix: str,
        flows: GemmFlows,
        packed: Mapping[str, Sequence[str]],
        state: WeightState,
        providers: tuple[str, ...] | None = None,
        unchecked: bool = False,
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.flows = flows
        self.packed = packed
        self.state = state
        self.providers = providers
        self.unchecked = unchecked

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Make a BF16 weight on the meta device: it is materialized once loaded."""
        if params_dtype is not torch.bfloat16:
            raise ModelError(
                f"{self.prefix} is {params_dtype}; the precision flow needs BF16: use "
                "LLM(..., dtype='bfloat16')"
            )
        layout = make_layout(
            layer,
            self.prefix,
            output_partition_sizes,
            input_size_per_partition,
            self.packed,
            self.flows.fprop_w,
        )
        setattr(layer, LAYOUT, layout)
        setattr(layer, LOADED, set())
        self.state.add(layout)
        weight = ModelWeightParameter(
            data=torch.empty(
                layout.rows, layout.cols, dtype=params_dtype, device="meta"
            ),
            input_dim=1,
            output_dim=0,
            weight_loader=counting(extra_weight_attrs["weight_loader"], layer),
        )
        layer.register_parameter("weight", weight)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Quantize what was loaded; called again by each of vLLM's reloads."""
        if getattr(layer, _DONE, False):
            return
        store(layer, self.state, unchecked=self.unchecked)
        setattr(layer, PROVIDER, self._provider(layer))
        setattr(layer, _DONE, True)

    def _provider(self, layer: torch.nn.Module) -> str:
        """Choose the provider of the layer's GEMM, for any number of tokens."""
        layout: LayerLayout = getattr(layer, LAYOUT)
        weight = layer.weight
        assert isinstance(weight, Tensor)
        rows = [layout.rows]
        if not layout.is_one_matrix:
            rows = [part.rows for part in layout.parts]
        names = []
        for n in rows:
            shape = GemmShape(
                role="fprop",
                n=n,
                k=layout.cols,
                a=self.flows.fprop_x,
                b=self.flows.fprop_w,
                m=None,
                out_dtype="bf16",
                device_type=weight.device.type,
            )
            names.append(select(shape, self.providers).provider.name)
        # The last one that any part needs: it accepts what the others do not.
        order = self.providers or default_providers(weight.device.type)
        return max(names, key=order.index)

    def apply(
        self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Return x w^T + bias in BF16, the bias added to the rounded product."""
        provider: str = getattr(layer, PROVIDER)
        return quantized_linear(layer, x, bias, self.flows, provider)
