"""vLLM's FlashAttention, with the project's kernel where each sequence has one query.

Without prefix caching that kernel also writes the step's keys and values into the
cache, and vLLM's update of the cache, an operator of its own before attention, does
nothing in such a step. With prefix caching the operator writes them, since a sequence
may read a page that another one fills in the same step.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import get_layers_from_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from jetrl_compile.kernels.decode_attention import decode_attention, unsupported


class DecodeBuilder(FlashAttentionMetadataBuilder):
    """Makes the metadata of a step, and says whether it decodes."""

    # A graph of a step that decodes must not run for another one.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(
            vllm_config, AttentionLayerBase, layer_names
        )
        found = [getattr(layer, "impl", None) for layer in layers.values()]
        self.can_decode = all(getattr(impl, "can_decode", False) for impl in found)
        self.writes = not vllm_config.cache_config.enable_prefix_caching
        most = vllm_config.scheduler_config.max_num_seqs
        captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        heads = max((getattr(impl, "num_kv_heads", 0) for impl in found), default=0)
        # Made here, before a graph is captured.
        self.arrived = torch.zeros(
            max(most, captured) * heads, dtype=torch.int32, device=device
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
    ) -> Any:
        """Return vLLM's metadata; of a step that decodes without a schedule."""
        common = common_attn_metadata
        decodes = (
            self.can_decode
            and common.max_query_len == 1
            and common.num_actual_tokens == common.num_reqs
            and common_prefix_len == 0
            and common.causal is True
        )
        made: Any = super().build(common_prefix_len, common, fast_build or decodes)
        return self._mark(made, decodes)

    def update_block_table(
        self, metadata: Any, blk_table: Tensor, slot_mapping: Tensor
    ) -> Any:
        """Return another builder's metadata of the same step for this one's layers."""
        made: Any = super().update_block_table(metadata, blk_table, slot_mapping)
        return self._mark(made, self.can_decode and made.arrived is not None)

    def _mark(self, made: Any, decodes: bool) -> Any:
        """Say in metadata whether a step decodes, and who writes into the cache."""
        made.arrived = self.arrived if decodes else None
        made.writes = decodes and self.writes
        return made


class DecodeImpl(FlashAttentionImpl):
    """Runs the attention of a layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.can_decode = (
            self.attn_type == AttentionType.DECODER
            and self.alibi_slopes is None
            and self.sliding_window == (-1, -1)
            and not self.logits_soft_cap
            and self.sinks is None
            and self.kv_sharing_target_layer_name is None
            and unsupported(self.num_heads, self.num_kv_heads, self.head_size) is None
        )

    def do_kv_cache_update(
        self,
        layer: nn.Module,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Write keys and values into the cache, unless attention will."""
        given: Any = get_forward_context().attn_metadata
        if isinstance(given, list):
            given = given[0]
        if isinstance(given, dict):
            given = given.get(layer.layer_name)
        if not getattr(given, "writes", False):
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention of a step's tokens into `output` and return it.

        Args:
            layer: Of vLLM.
            query: (T, Hq, D), BF16.
            key: (T, Hkv, D), BF16.
            value: Like `key`.
            kv_cache: (pages, 2, page size, Hkv, D), BF16.
            attn_metadata: Of the step; None while vLLM measures memory.
            output: (T, Hq, D), contiguous.
            output_scale: None.
            output_block_scale: None.
        """
        arrived = getattr(attn_metadata, "arrived", None)
        if arrived is None:
            done: Tensor = super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
            return done
        tokens = attn_metadata.num_actual_tokens
        key_cache, value_cache = kv_cache.unbind(1)
        decode_attention(
            query[:tokens],
            key[:tokens],
            value[:tokens],
            key_cache,
            value_cache,
            output[:tokens],
            attn_metadata.seq_lens,
            attn_metadata.block_table,
            attn_metadata.slot_mapping if attn_metadata.writes else None,
            arrived,
            self.scale,
        )
        return output


class DecodeBackend(FlashAttentionBackend):
    """FlashAttention, but for steps that decode."""

    @staticmethod
    def get_name() -> str:
        """Return the name that it is registered under."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[DecodeImpl]:
        """Return what runs a layer."""
        return DecodeImpl

    @staticmethod
    def get_builder_cls() -> type[DecodeBuilder]:
        """Return what makes the metadata."""
        return DecodeBuilder
