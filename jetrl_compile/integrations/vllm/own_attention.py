"""Gives an engine one of the project's attention backends, by vLLM's registry.

In the default mode that is FlashAttention 3, with the project's kernel for steps that
decode; a backend that the user names stays. Exact mode has its own (`exact.py`).
"""

from collections.abc import Iterator
from typing import Any

from jetrl_compile.kernels.decode_attention import unsupported
from jetrl_compile.kernels.provider import no_hopper

DECODE_BACKEND = "jetrl_compile.integrations.vllm.decode_backend.DecodeBackend"
DECODE_KERNEL = "jetrl.decode_attention"
KV_DTYPES = ("auto", "bfloat16")


def use_backend(engine: Any, path: str) -> None:
    """Let the layers that are made from now on have an attention backend.

    Args:
        engine: vLLM's config of the engine.
        path: Of the class, which calls itself CUSTOM.
    """
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import (
        AttentionBackendEnum,
        register_backend,
    )

    register_backend(AttentionBackendEnum.CUSTOM, path)
    # vLLM remembers the class of a name: another engine of this process may have had
    # another one under it.
    remembered: Any = getattr(selector, "_cached_get_attn_backend", None)
    if remembered is not None:
        remembered.cache_clear()
    engine.attention_config.backend = AttentionBackendEnum.CUSTOM


def set_up_decode(engine: Any) -> str | None:
    """Give an engine the kernel for steps that decode, where it can run.

    Args:
        engine: vLLM's config of the engine.

    Returns:
        Why it has vLLM's attention alone, or None.
    """
    reason = next(reasons(engine), None)
    if reason is None:
        use_backend(engine, DECODE_BACKEND)
    return reason


def reasons(engine: Any) -> Iterator[str]:
    """Yield why an engine keeps vLLM's attention.

    Args:
        engine: vLLM's config.
    """
    attention = getattr(engine, "attention_config", None)
    if attention is None:
        yield "this vLLM has no attention_config"
        return
    if attention.backend is not None:
        yield f"the backend {attention.backend} is set"
    version = getattr(attention, "flash_attn_version", None)
    if version not in (None, 3):
        yield f"FlashAttention {version} is set"
    missing = no_hopper()
    if missing:
        yield missing
    from vllm import envs

    if getattr(envs, "VLLM_BATCH_INVARIANT", False):
        yield "VLLM_BATCH_INVARIANT is set, and its sums depend on the batch"
    dtype = getattr(engine.cache_config, "cache_dtype", "auto")
    if dtype not in KV_DTYPES:
        yield f"keys and values are kept in {dtype}"
    if getattr(engine, "speculative_config", None) is not None:
        yield "speculative decoding has more than one query a sequence"
    if getattr(engine, "kv_transfer_config", None) is not None:
        yield "connectors of caches know vLLM's backends alone"
    parallel, model = engine.parallel_config, engine.model_config
    if getattr(parallel, "decode_context_parallel_size", 1) != 1:
        yield "keys are spread over ranks"
    if getattr(attention, "use_non_causal", False):
        yield "attention is not causal"
    for name in ("use_mla", "is_encoder_decoder", "is_hybrid", "is_mm_prefix_lm"):
        if getattr(model, name, False):
            yield f"the model has {name}"
    # What FlashAttention itself refuses: vLLM falls back from no backend that is set.
    page: int = getattr(engine.cache_config, "block_size", None) or 16
    if getattr(engine.cache_config, "user_specified_block_size", False) and page % 16:
        yield f"block_size={page} is no multiple of 16"
    if model.get_head_size() % 8:
        yield f"a head of {model.get_head_size()} is no multiple of 8"
    why = unsupported(
        model.get_num_attention_heads(parallel),
        model.get_num_kv_heads(parallel),
        model.get_head_size(),
    )
    if why:
        yield why
