"""Operators that quantize, and bring the weight of the GEMM behind into the cache.

    jetrl::quantize_ahead            as jetrl::quantize
    jetrl::rms_norm_quantize_ahead   as jetrl::rms_norm_quantize
    jetrl::silu_mul_quantize_ahead   as jetrl::silu_mul_quantize

They have one argument more, the last: the weight's codes, (N, K) in E4M3, which change
no bit of the results (`bring_ahead`). A pass puts them in the place of the operators
that they stand for once the graph has been read.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from jetrl_compile.kernels import fused_ops, ops
from jetrl_compile.kernels.bring_ahead import bringing
from jetrl_compile.kernels.op_definition import define, parts_of

SUFFIX = "_ahead"


def _defined(op: Any) -> torch._ops.OpOverload:
    schema = op._schema
    name = schema.name.partition("::")[2]
    text = str(schema).partition("(")[2]
    head, _, results = text.partition(") -> ")
    run, trace = parts_of(name)

    def kernel(*args: Any) -> Any:
        matrix: Tensor = args[-1]
        with bringing(matrix):
            return run(*args[:-1])

    def fake(*args: Any) -> Any:
        return trace(*args[:-1])

    return define(f"{name}{SUFFIX}({head}, Tensor ahead) -> {results}", kernel, fake)


AHEAD: Mapping[Callable[..., Any], torch._ops.OpOverload] = MappingProxyType(
    {
        op: _defined(op)
        for op in (
            ops.quantize,
            fused_ops.rms_norm_quantize,
            fused_ops.silu_mul_quantize,
        )
    }
)
"""By operator: the one that brings a matrix ahead."""
