"""Exact mode of an engine: what it needs of vLLM's config, and what it sets there.

    LLM(..., quantization="jetrl", logprobs_mode="processed_logprobs",
        additional_config={"jetrl": {"exact": True}})

Attention is a backend that is registered with vLLM: FlashAttention 3 with one split at
head size 128, else the project's Triton kernel. Norms, rotary embeddings and
activations are put in by the compile pass, the output head by its quantization method.
Log-probs are vLLM's own: the trainer runs the kernel of the engine's model runner.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from jetrl_compile.errors import ModelError
from jetrl_compile.integrations.vllm.live_model import config_of
from jetrl_compile.integrations.vllm.own_attention import KV_DTYPES, use_backend
from jetrl_compile.kernels.attention_kernels import attention_kernel

LOGPROBS_MODE = "processed_logprobs"
BACKENDS = {
    "fa3": "jetrl_compile.integrations.vllm.exact_flash.ExactFlashBackend",
    "triton": "jetrl_compile.integrations.vllm.exact_triton.ExactTritonBackend",
}


def exact_settings(recipe: str = "jetrl") -> dict[str, Any]:
    """Return the arguments of vLLM's LLM that exact mode needs, beside `quantization`.

    Args:
        recipe: Of the trainer.
    """
    own = {"jetrl": {"recipe": recipe, "exact": True}}
    return {"logprobs_mode": LOGPROBS_MODE, "additional_config": own}


def refusals(engine: Any) -> Iterator[str]:
    """Yield why an engine cannot be exact.

    Args:
        engine: vLLM's config.
    """
    parallel = engine.parallel_config
    for name in ("tensor_parallel_size", "decode_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size != 1:
            yield f"{name}={size}: sums over ranks have an order of their own; use 1"
    dtype = getattr(engine.cache_config, "cache_dtype", "auto")
    if dtype not in KV_DTYPES:
        yield f"kv_cache_dtype={dtype!r}: the trainer keeps keys in BF16; use 'auto'"
    if getattr(engine, "speculative_config", None) is not None:
        yield "speculative decoding samples what another model proposes; leave it out"
    if getattr(engine, "lora_config", None) is not None:
        yield "LoRA adds products that no exact kernel computes; merge it"
    mode = getattr(engine.model_config, "logprobs_mode", "raw_logprobs")
    if mode != LOGPROBS_MODE:
        yield (
            f"logprobs_mode={mode!r}: log-probs are of what is sampled from, in FP32; "
            f"set logprobs_mode={LOGPROBS_MODE!r}"
        )
    config = _text_config(engine)
    if getattr(config, "sliding_window", None) and getattr(
        config, "use_sliding_window", True
    ):
        yield "sliding windows have no exact kernel; use a model without them"
    if getattr(config, "attn_logit_softcapping", None):
        yield "soft caps of scores have no exact kernel; use a model without them"


def set_up_exact(engine: Any, compiles: bool) -> str:
    """Check an engine's config, and choose its attention; before layers are made.

    Args:
        engine: vLLM's config of the engine.
        compiles: Whether the pass will run.

    Returns:
        The attention kernel.

    Raises:
        ModelError: The engine cannot be exact; all reasons are listed.
    """
    reasons = list(refusals(engine))
    if not compiles:
        reasons.append(
            "the engine runs eagerly, without the pass that puts exact kernels in; "
            "leave out enforce_eager"
        )
    if reasons:
        raise ModelError("exact mode cannot hold here: " + "; ".join(reasons))
    kernel = attention_kernel("cuda", int(engine.model_config.get_head_size()))
    use_backend(engine, BACKENDS[kernel])
    if kernel == "fa3":
        engine.attention_config.flash_attn_version = 3
    return kernel


def log_probs_kernel(engine: Any) -> str:
    """Return the kernel of `jetrl::log_probs` that an engine's sampler agrees with.

    Args:
        engine: vLLM's config: its first model runner computes PyTorch's log_softmax,
            the second one sums over blocks.
    """
    return "blocks" if getattr(engine, "use_v2_model_runner", False) else "aten"


def prepare_exact(config: Any, model: nn.Module) -> str:
    """Do what exact mode needs of a loaded model, before its first prompt.

    Call it in each worker: `llm.apply_model(partial(prepare_exact, config))`.

    Args:
        config: The model's Hugging Face config (of its text part).
        model: Of vLLM's, loaded with `"exact": True`.

    Returns:
        The kernel of `jetrl::log_probs` that the trainer is to run.

    Raises:
        ModelError: The engine is not in exact mode.
    """
    own = config_of(model)
    if not getattr(own, "attention", ""):
        raise ModelError(
            "the engine is not in exact mode; give LLM "
            "additional_config={'jetrl': {'exact': True}}"
        )
    align_rope_tables(model, config)
    kernel: str = own.log_probs
    return kernel


@torch.no_grad()
def align_rope_tables(model: nn.Module, config: Any) -> int:
    """Write the trainer's cosines and sines into an engine's tables.

    Hugging Face's models compute frequencies on the CPU and cosines on the GPU, vLLM
    both where the model is made; a table differs where a power or cosine does in its
    last bit. Written in place, so that graphs stay valid; call it before prompts run.

    Args:
        model: Of vLLM's, loaded.
        config: The model's Hugging Face config (of its text part).

    Returns:
        How many numbers were others.
    """
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    changed, done = 0, set()
    for module in model.modules():
        table = getattr(module, "cos_sin_cache", None)
        if table is None or table.data_ptr() in done:
            continue
        done.add(table.data_ptr())
        make: Any = LlamaRotaryEmbedding
        with torch.device("cpu"):
            rope = make(config)
        rope = rope.to(table.device)
        positions = torch.arange(table.shape[0], device=table.device)[None]
        like = torch.empty(0, dtype=table.dtype, device=table.device)
        cos, sin = rope(like, positions)
        half = table.shape[-1] // 2
        wanted = torch.cat((cos[0, :, :half], sin[0, :, :half]), -1)
        changed += int((wanted != table).sum())
        table.copy_(wanted)
    return changed


def _text_config(engine: Any) -> Any:
    config: Any = engine.model_config.hf_config
    return getattr(config, "text_config", config)
