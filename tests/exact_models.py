"""A tiny model in exact mode: a trainer, its rollout model, and how both are run."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from jetrl_compile.exact_attention import use_exact_attention
from jetrl_compile.examples.sampling import cache_argument, position_ids
from jetrl_compile.kernels import exact_ops
from jetrl_compile.layers import compile_layers
from jetrl_compile.rollout import make_rollout_model

VOCABULARY = 256
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}


def _llama() -> Any:  # as SmolLM2: tied, three heads of queries on one of keys
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))


def _qwen2() -> Any:  # biases of q, k and v
    return Qwen2ForCausalLM(Qwen2Config(**SIZES))


def _qwen3() -> Any:  # norms of q and k
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=64))


def _whole() -> Any:  # of whole blocks, so that q, k and v are one GEMM
    sizes = {**SIZES, "hidden_size": 256, "intermediate_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return Qwen3ForCausalLM(Qwen3Config(**{**sizes, **heads}))


KINDS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "whole": _whole,
}


def make_trainer(kind: str = "llama", *, attention: bool = True) -> Any:
    """A model in BF16 whose weights, norms and biases too, are random."""
    torch.manual_seed(0)
    model = KINDS[kind]().to(torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "embed" in name:
                parameter.mul_(20)
    if attention:
        use_exact_attention(model)
    return model


def make_pair(kind: str = "llama") -> tuple[Any, Any]:
    trainer = make_trainer(kind)
    return trainer, make_rollout_model(trainer)


def compiled(model: Any, phase: str, **options: Any) -> Any:
    """A copy of a model on the same weights, compiled a layer at a time."""
    given = {"lowering": "aot", "exact": True, "phase": phase, **options}
    twin = copy.deepcopy(model, {id(t): t for t in _tensors(model)})
    compile_layers(twin, **given)
    return twin


def compiled_whole(model: nn.Module, phase: str, **options: Any) -> Any:
    """A model compiled whole; its floats are constants."""
    given = {"lowering": "aot", "exact": True, "phase": phase, **options}
    called: Any = torch.compile(model, backend="jetrl", fullgraph=True, options=given)
    config: Any = torch._dynamo.config
    return config.patch(specialize_float=True)(called)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def trainer_log_probs(
    model: Any, tokens: Tensor, mask: Tensor, temperature: float = 1.0
) -> Tensor:
    """The log-prob of each token but the first, (B, L - 1), with a gradient."""
    out = model(
        input_ids=tokens,
        attention_mask=mask,
        position_ids=position_ids(mask),
        use_cache=False,
    )
    logits = out.logits[:, :-1].reshape(-1, VOCABULARY)
    found: Tensor = exact_ops.log_probs(
        logits, tokens[:, 1:].flatten(), temperature, "aten"
    )
    return found.view(tokens.shape[0], -1)


@torch.no_grad()
def rollout_log_probs(
    model: Any,
    tokens: Tensor,
    mask: Tensor,
    chunks: list[int],
    temperature: float = 1.0,
) -> Tensor:
    """The same from a cache, that many tokens a call."""
    cache: Any = DynamicCache(config=model.config)
    kept = {cache_argument(model): cache, "use_cache": True}
    positions = position_ids(mask)
    logits, start = [], 0
    for length in chunks:
        end = start + length
        out = model(
            input_ids=tokens[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=positions[:, start:end],
            **kept,
        )
        logits.append(out.logits)
        start = end
    assert start == tokens.shape[1]
    whole = torch.cat(logits, 1)[:, :-1].reshape(-1, VOCABULARY)
    found: Tensor = exact_ops.log_probs(
        whole, tokens[:, 1:].flatten(), temperature, "aten"
    )
    return found.view(tokens.shape[0], -1)
