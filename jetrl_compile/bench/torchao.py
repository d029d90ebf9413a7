"""The blockwise FP8 training linear layer of torchao, as a baseline.

torchao.prototype.blockwise_fp8_training (torchao 0.18): x in 1x128 groups, w in 128x128
blocks, dy and x along tokens in 1x128 groups for wgrad, BF16 out, cuBLASLt's GEMMs; x
and w are saved in BF16. It takes no bias, so a bias is added apart.

Dynamo cannot trace it (torch 2.11 and 2.13: `_scaled_mm_v2` is unknown to it), and with
a graph break at each linear layer the rest would run in pieces. So its forward and its
backward are one operator each, opaque to the compiler, and the layer around them is
compiled as a whole.

Its quantizers are tuned by Triton at first use: 45 configurations of each, for each
size. Triton runs each for 125 ms, which is minutes for a layer; here it runs for 25 ms
(23 s for one of Qwen3-8B). Triton keeps on disk which one was the fastest, so a run
that was cut short goes on where it ended. `torchao_ahead.py` compiles them before,
several at once.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_compile.errors import ProviderError, one_line

PACKAGE = "torchao.prototype.blockwise_fp8_training"
BLOCK = 128
TUNING_MS = {"warmup": 5, "rep": 20}
Linears = dict[tuple[nn.Module, str], tuple[nn.Module, nn.Module]]
_library: Any = torch.library  # untyped in torch 2.13


class _Saved:
    """What an autograd function writes to and reads from."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


@_library.custom_op("jetrl_bench::torchao_linear", mutates_args=())  # type: ignore[untyped-decorator, unused-ignore]
def _linear(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = function().forward(
        _Saved(), x.contiguous(), weight, BLOCK, torch.bfloat16, False
    )
    return out


@_linear.register_fake  # type: ignore[untyped-decorator, unused-ignore]
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@_library.custom_op("jetrl_bench::torchao_linear_backward", mutates_args=())  # type: ignore[untyped-decorator, unused-ignore]
def _linear_backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    saved: Any = _Saved()
    saved.save_for_backward(x.contiguous(), weight)
    saved.block_size, saved.out_dtype, saved.use_triton = BLOCK, torch.bfloat16, False
    dx, dw, *_ = function().backward(saved, dy)
    return dx, dw


@_linear_backward.register_fake  # type: ignore[untyped-decorator, unused-ignore]
def _(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> Any:
    return _linear_backward(dy, *ctx.saved_tensors)


_linear.register_autograd(_backward, setup_context=_setup)


class TorchaoLinear(nn.Module):
    """A linear layer that runs torchao's autograd function.

    Attributes:
        weight: (N, K) in BF16, shared with the layer that it stands for.
        bias: (N,) or None.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's result, (..., N) in BF16."""
        result: Tensor = _linear(x, self.weight)
        return result if self.bias is None else result + self.bias


@functools.cache
def function() -> Any:
    """Return torchao's autograd function.

    Raises:
        ProviderError: torchao is not installed, or cannot be loaded or used here.
    """
    try:
        module = importlib.import_module(f"{PACKAGE}.linear")
    except ImportError as error:
        raise ProviderError(f"torchao cannot be imported: {one_line(error)}") from None
    except Exception as error:  # its import compiles and registers much
        raise ProviderError(
            f"torchao cannot be loaded: {type(error).__name__}: {one_line(error)}"
        ) from None
    if not torch.cuda.is_available():
        raise ProviderError("torchao's blockwise FP8 needs a GPU of capability 9.0")
    tune_for(**TUNING_MS, keep=True)
    return module.fp8_blockwise_mm


def tune_for(warmup: int, rep: int, keep: bool = False) -> None:
    """Let Triton tune torchao's kernels for less long.

    Args:
        warmup: Milliseconds that a configuration runs before it is timed.
        rep: Milliseconds that it is timed.
        keep: Whether the fastest ones are kept in Triton's cache, and taken from there.
    """
    testing = importlib.import_module("triton.testing")
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    measure = functools.partial(testing.do_bench, warmup=warmup, rep=rep)
    for kernel in vars(importlib.import_module(f"{PACKAGE}.kernels")).values():
        if isinstance(kernel, autotuner):
            kernel.do_bench = measure
            kernel.cache_results = keep


def with_fp8_linears(layers: Sequence[nn.Module]) -> Linears:
    """Make torchao's layers for the linear layers of decoder layers; none is put in.

    Returns:
        By parent module and attribute name: the linear layer, and torchao's, which
        has the same parameters.

    Raises:
        ProviderError: torchao cannot be used, or a size is no multiple of 128.
    """
    made: Linears = {}
    function()
    for layer in layers:
        for parent in layer.modules():
            for name, child in parent.named_children():
                if type(child) is nn.Linear:
                    made[parent, name] = (child, _convert(name, child))
    return made


def _convert(name: str, linear: nn.Linear) -> nn.Module:
    if linear.in_features % BLOCK or linear.out_features % BLOCK:
        raise ProviderError(
            f"{name} is {linear.out_features}x{linear.in_features}; torchao's layer "
            f"needs multiples of {BLOCK}"
        )
    return TorchaoLinear(linear)
