"""Compile the configurations of torchao's quantizers, several at once.

Triton compiles each of them at the first call, one after the other: 360 for a layer.
Worker processes fill its cache on disk; which configuration is the fastest is found
later, on a quiet GPU.
"""

import importlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import torch

from jetrl_compile.bench.torchao import BLOCK, PACKAGE, function, tune_for
from jetrl_compile.errors import ProviderError, one_line

MOST_WORKERS = 16
_PREFIX = "triton_fp8_blockwise"
ACTIVATIONS = (
    f"{_PREFIX}_act_quant_lhs",
    f"{_PREFIX}_act_quant_rhs",
    f"{_PREFIX}_act_quant_transposed_lhs",
)
WEIGHTS = (
    f"{_PREFIX}_weight_quant_rhs",
    f"{_PREFIX}_weight_quant_transposed_rhs",
)
Call = tuple[str, int, int]


def calls_of(linears: Iterable[tuple[int, int]], tokens: Iterable[int]) -> list[Call]:
    """Return the quantizer calls of forward and backward: name, rows, columns.

    Args:
        linears: Out and in features of each linear layer.
        tokens: Numbers of rows of its input.
    """
    found: dict[Call, None] = {}
    for n, k in linears:
        for name in WEIGHTS:
            found[name, n, k] = None
        for m in tokens:
            lhs, rhs, transposed = ACTIVATIONS
            for call in ((lhs, m, k), (lhs, m, n), (rhs, m, k), (transposed, m, n)):
                found[call] = None
    return list(found)


def compile_quantizers(
    linears: Iterable[tuple[int, int]],
    tokens: Iterable[int],
    say: Callable[[str], None],
) -> None:
    """Compile what a model's layers need; what fails here fails again when it runs.

    Args:
        linears: As of `calls_of`.
        tokens: As of `calls_of`.
        say: Called with a line when all are done.
    """
    try:
        function()
    except ProviderError:
        return  # the table will say why
    keep_one_cache()
    calls = calls_of(linears, tokens)
    workers = min(MOST_WORKERS, os.cpu_count() or 1, len(calls))
    failed: list[str] = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(_run, call) for call in calls]):
            if (error := future.exception()) is not None:
                failed.append(one_line(error))
    say(f"{len(calls) - len(failed)} of torchao's quantizers compiled")
    for line in failed:
        say(f"torchao: {line}")


def keep_one_cache() -> None:
    """Let Triton keep what it compiles in one folder, here and in worker processes.

    TorchInductor names another one (`TRITON_CACHE_DIR`) at the first kernel that it
    loads, unless there is one, and Triton would then find nothing that it made before.
    """
    knobs: Any = importlib.import_module("triton.knobs")
    os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)


def _run(call: Call) -> None:
    tune_for(warmup=1, rep=1)
    name, rows, cols = call
    kernels: Any = importlib.import_module(f"{PACKAGE}.kernels")
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    getattr(kernels, name)(x, BLOCK)
    torch.cuda.synchronize()
