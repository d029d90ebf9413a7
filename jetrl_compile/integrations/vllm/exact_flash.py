"""vLLM's FlashAttention with one split over keys, for head size 128.

vLLM has no setting for it but VLLM_BATCH_INVARIANT, which also replaces PyTorch's GEMMs
by slower ones: `flash_attn_max_num_splits_for_cuda_graph` holds for captured sizes
alone. So the metadata that vLLM's builder makes say one split, always. Cascade
attention, which splits keys at a common prefix, is off.
"""

from typing import Any

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionMetadataBuilder,
)


class ExactFlashBuilder(FlashAttentionMetadataBuilder):
    """Makes the metadata of a step."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
    ) -> Any:
        """Return vLLM's metadata, with one split and without a schedule made ahead."""
        made = super().build(0, common_attn_metadata, True)
        made.max_num_splits = 1
        made.scheduler_metadata = None
        return made

    def use_cascade_attention(self, *_: Any, **__: Any) -> bool:
        """Return that keys are not split at a common prefix."""
        return False


class ExactFlashBackend(FlashAttentionBackend):
    """FlashAttention 3, as the trainer runs it."""

    @staticmethod
    def get_name() -> str:
        """Return the name that it is registered under."""
        return "CUSTOM"

    @staticmethod
    def get_builder_cls() -> type[ExactFlashBuilder]:
        """Return what makes the metadata."""
        return ExactFlashBuilder
