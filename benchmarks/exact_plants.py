"""Spoilers of exact mode: what plants each, and the operator that must be named.

Each is a context: it changes a live engine's model, or its trainer's, and undoes that.
What vLLM compiled cannot change without a new load, so norms and residuals are spoiled
in the trainer; attention and output head run outside of vLLM's compiled pieces.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from jetrl_compile.exact_attention import NAME, use_exact_attention
from jetrl_compile.integrations.vllm.live_model import attention_facts

LAYER = 1  # the decoder layer that is changed
PARTS = 128  # keys of a part, where Triton's attention is to merge others
Plant = Callable[[Any, Any], AbstractContextManager[None]]


class Spoiler(NamedTuple):
    """A spoiler.

    Attributes:
        plant: Of vLLM's loaded model and the trainer's: plants it while it is open.
        operator: The first operator that has other bits with it.
    """

    plant: Plant
    operator: str


class OtherNorm(nn.Module):
    """Multiplies by the weight before it rounds, as torch's own norm does."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x, (..., K), BF16."""
        wide = x.float()
        rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        result: Tensor = (wide * rstd * self.weight.float()).to(x.dtype)
        return result


class WideLayer(nn.Module):
    """A decoder layer that normalizes the FP32 sum of residual and attention."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        for name, child in layer.named_children():
            self.add_module(name, child)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Return the layer's result, (B, L, K), BF16."""
        layer: Any = self
        x = layer.input_layernorm(hidden_states)
        x, _ = layer.self_attn(hidden_states=x, **kwargs)
        total = hidden_states.float() + x.float()
        norm = layer.post_attention_layernorm
        rstd = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        y = norm.weight * (total * rstd).to(x.dtype)
        result: Tensor = total.to(x.dtype) + layer.mlp(y)
        return result


class MatmulHead:
    """An output head's method in vLLM: `torch.mm` in FP32.

    In BF16 there may be nothing to find: on an H200 cuBLAS gave 48 tokens the log-probs
    of exact mode's kernel. On a CPU these are rounded once, and have its bits in FP32.

    Attributes:
        state: Read by the integration, which puts its own method where there is none.
        embedding: Of the method that it stands for: an embedding may share the head.
    """

    def __init__(self, plain: Any) -> None:
        self.state = plain.state
        self.embedding = getattr(plain, "embedding", None)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the logits of x, (T, K), in BF16."""
        wide = torch.mm(x.float(), layer.weight.float().t())
        result = wide if bias is None else wide + bias
        return result.to(torch.bfloat16)


@contextmanager
def another_norm(_: Any, trainer: Any) -> Iterator[None]:
    """A norm of the trainer is PyTorch's."""
    layer = trainer.model.layers[LAYER]
    norm = layer.input_layernorm
    layer.input_layernorm = OtherNorm(norm)
    try:
        yield
    finally:
        layer.input_layernorm = norm


@contextmanager
def a_wide_residual(_: Any, trainer: Any) -> Iterator[None]:
    """A norm of the trainer reads the sum that the residual rounds, in FP32."""
    layers = trainer.model.layers
    layer = layers[LAYER]
    layers[LAYER] = WideLayer(layer)
    try:
        yield
    finally:
        layers[LAYER] = layer


@contextmanager
def sdpa_in_the_trainer(_: Any, trainer: Any) -> Iterator[None]:
    """The trainer's attention is PyTorch's."""
    trainer.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        use_exact_attention(trainer)
        assert trainer.config._attn_implementation == NAME


@contextmanager
def another_head(model: Any, _: Any) -> Iterator[None]:
    """The engine's output head runs `torch.mm`."""
    head = model.lm_head
    with mock.patch.object(head, "quant_method", MatmulHead(head.quant_method)):
        yield


@contextmanager
def two_splits(model: Any, _: Any) -> Iterator[None]:
    """The engine's attention splits keys otherwise when it decodes.

    The graph shows no kernel inside of vLLM's operator, but the engine's word for it:
    this one has a name of its own.
    """
    configs = {
        id(config): config
        for name in attention_facts(model)
        for config in [model.get_submodule(name).quant_config]
    }
    (kernel,) = {config.attention for config in configs.values()}
    for config in configs.values():
        config.attention = f"{kernel}_two_splits"
    try:
        with SPLITS[kernel](model):
            yield
    finally:
        for config in configs.values():
            config.attention = kernel


def _flash_splits(_: Any) -> Any:
    from jetrl_compile.integrations.vllm.exact_flash import ExactFlashBuilder

    plain: Callable[..., Any] = ExactFlashBuilder.build

    def build(*args: Any, **kwargs: Any) -> Any:
        made = plain(*args, **kwargs)
        if made.max_query_len == 1:
            made.max_num_splits = 2
        return made

    return mock.patch.object(ExactFlashBuilder, "build", build)


def _triton_splits(_: Any) -> Any:
    from jetrl_compile.integrations.vllm import exact_triton
    from jetrl_compile.kernels import triton_attention

    plain: Callable[..., Any] = exact_triton.paged_attention

    def paged(*args: Any) -> Any:
        if args[7] != 1:  # the most queries of a sequence
            return plain(*args)
        with mock.patch.object(triton_attention, "CHUNK", PARTS):
            return plain(*args)

    return mock.patch.object(exact_triton, "paged_attention", paged)


# By the kernel of attention: splits keys in decoding while it is open.
SPLITS: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "fa3": _flash_splits,
    "triton": _triton_splits,
}
_AT = f"model.layers.{LAYER}"
SPOILERS: dict[str, Spoiler] = {
    "two splits in decode": Spoiler(two_splits, "model.layers.0.self_attn:attention"),
    "SDPA in the trainer": Spoiler(
        sdpa_in_the_trainer, "model.layers.0.self_attn:attention"
    ),
    "PyTorch's norm": Spoiler(another_norm, f"{_AT}.input_layernorm:norm"),
    "torch.mm as output head": Spoiler(another_head, "lm_head:fprop"),
    "residual sum in FP32": Spoiler(
        a_wide_residual, f"{_AT}.self_attn.o_proj:residual_add"
    ),
}
