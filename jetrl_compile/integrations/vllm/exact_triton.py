"""The project's Triton attention as a backend of vLLM: any head size up to 256.

The cache and the writes into it are those of vLLM's Triton backend; the attention
itself is `kernels.triton_attention`, whose decode step has the bits of a prefill.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
)

from jetrl_compile.errors import ModelError
from jetrl_compile.kernels.triton_attention import MAX_HEAD_SIZE, paged_attention


@dataclass
class ExactMetadata:
    """What attention needs of a step.

    Attributes:
        num_actual_tokens: Tokens without padding.
        max_query_len: The most tokens of a request.
        query_start_loc: (N + 1,), int32: where each request's tokens begin.
        seq_lens: (N,), int32: keys of each request.
        block_table: (N, pages), int32.
        slot_mapping: (T,), int64: where keys and values are written.
        most_keys: The most keys that a request may ever have: a captured graph serves
            all steps.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    most_keys: int
    causal: bool = True
    use_cascade: bool = False


class ExactTritonBuilder(AttentionMetadataBuilder[ExactMetadata]):
    """Makes the metadata of a step."""

    # A captured grid has as many tiles of queries as the longest request had.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
    ) -> ExactMetadata:
        """Return the metadata of a step; common prefixes are read like other keys."""
        common = common_attn_metadata
        return ExactMetadata(
            common.num_actual_tokens,
            common.max_query_len,
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
            int(self.vllm_config.model_config.max_model_len),
        )

    def use_cascade_attention(self, *_: Any, **__: Any) -> bool:
        """Return that keys are not split at a common prefix."""
        return False


class ExactTritonImpl(TritonAttentionImpl):
    """Runs the attention of a layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        unknown = {
            "alibi": self.alibi_slopes is not None,
            "sliding window": self.sliding_window != (-1, -1),
            "soft cap": bool(self.logits_soft_cap),
            "sinks": self.sinks is not None,
        }
        if any(unknown.values()):
            names = ", ".join(name for name, found in unknown.items() if found)
            raise ModelError(
                f"exact attention has no kernel with {names}; use a model with full "
                "causal attention"
            )

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: ExactMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention of a step's tokens into `output` and return it.

        Args:
            layer: Of vLLM.
            query: (T, Hq, D), BF16.
            key: Not read: it is in the cache.
            value: Not read.
            kv_cache: (pages, 2, page size, Hkv, D), BF16.
            attn_metadata: Of the step; None while vLLM measures memory.
            output: (T, Hq, D), contiguous.
            output_scale: None.
            output_block_scale: None.
        """
        if attn_metadata is None:
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        key_cache, value_cache = kv_cache.unbind(1)
        paged_attention(
            query[:tokens],
            key_cache,
            value_cache,
            output[:tokens],
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            attn_metadata.block_table,
            attn_metadata.max_query_len,
            self.scale,
            attn_metadata.most_keys,
        )
        return output


class ExactTritonBackend(TritonAttentionBackend):
    """Attention by the project's Triton kernel."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Return the name that it is registered under."""
        return "CUSTOM"

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Return whether a tile holds a head."""
        return head_size <= MAX_HEAD_SIZE

    @staticmethod
    def get_impl_cls() -> type[ExactTritonImpl]:
        """Return what runs a layer."""
        return ExactTritonImpl

    @staticmethod
    def get_builder_cls() -> type[ExactTritonBuilder]:
        """Return what makes the metadata."""
        return ExactTritonBuilder
