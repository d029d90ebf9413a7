"""The blockwise FP8 training linear layer of torchao, as a baseline.

torchao.prototype.blockwise_fp8_training (torchao 0.18): x in 1x128 groups, w in 128x128
blocks, dy and x along tokens in 1x128 groups for wgrad, BF16 out, cuBLASLt's GEMMs; x
and w are saved in BF16. It takes no bias, so a bias is added apart.

Its quantizers are tuned by Triton at first use: 45 configurations of each, for each
size. Triton runs each for 125 ms, which is minutes for a layer; here it runs for 25 ms,
still hundreds of times.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_compile.errors import ProviderError, one_line

_MODULE = "torchao.prototype.blockwise_fp8_training.linear"
_KERNELS = "torchao.prototype.blockwise_fp8_training.kernels"
_TUNING_MS = {"warmup": 5, "rep": 20}
BLOCK = 128
Linears = dict[tuple[nn.Module, str], tuple[nn.Module, nn.Module]]


class WithBias(nn.Module):
    """A linear layer without bias, and a bias."""

    def __init__(self, linear: nn.Module, bias: nn.Parameter) -> None:
        super().__init__()
        self.linear = linear
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's result plus the bias."""
        result: Tensor = self.linear(x) + self.bias
        return result


def linear_class() -> Any:
    """Return torchao's class.

    Raises:
        ProviderError: torchao is not installed, or cannot be loaded or used here.
    """
    try:
        module = importlib.import_module(_MODULE)
    except ImportError as error:
        raise ProviderError(f"torchao cannot be imported: {one_line(error)}") from None
    except Exception as error:  # its import compiles and registers much
        raise ProviderError(
            f"torchao cannot be loaded: {type(error).__name__}: {one_line(error)}"
        ) from None
    if not torch.cuda.is_available():
        raise ProviderError("torchao's blockwise FP8 needs a GPU of capability 9.0")
    _tune_quickly()
    return module.Float8BlockwiseLinear


def _tune_quickly() -> None:
    testing = importlib.import_module("triton.testing")
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    measure = functools.partial(testing.do_bench, **_TUNING_MS)
    for kernel in vars(importlib.import_module(_KERNELS)).values():
        if isinstance(kernel, autotuner):
            kernel.do_bench = measure


def with_fp8_linears(layers: Sequence[nn.Module]) -> Linears:
    """Make torchao's layers for the linear layers of decoder layers; none is put in.

    Returns:
        By parent module and attribute name: the linear layer, and torchao's, which
        has the same parameters.

    Raises:
        ProviderError: torchao cannot be used, or a size is no multiple of 128.
    """
    made: Linears = {}
    fp8 = linear_class()
    for layer in layers:
        for parent in layer.modules():
            for name, child in parent.named_children():
                if type(child) is nn.Linear:
                    made[parent, name] = (child, _convert(fp8, name, child))
    return made


def _convert(fp8: Any, name: str, linear: nn.Linear) -> nn.Module:
    if linear.in_features % BLOCK or linear.out_features % BLOCK:
        raise ProviderError(
            f"{name} is {linear.out_features}x{linear.in_features}; torchao's layer "
            f"needs multiples of {BLOCK}"
        )
    bare = nn.Linear(1, 1, bias=False, device="meta")
    bare.in_features, bare.out_features = linear.in_features, linear.out_features
    bare.weight = linear.weight
    made: nn.Module = fp8.from_float(bare)
    return made if linear.bias is None else WithBias(made, linear.bias)
