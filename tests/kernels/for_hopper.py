"""Compiles a Triton kernel for Hopper, without a GPU and without running it."""

import importlib
from collections.abc import Collection, Mapping
from typing import Any

triton: Any = importlib.import_module("triton")
TARGET: Any = importlib.import_module("triton.backends.compiler").GPUTarget(
    "cuda", 90, 32
)
_AST: Any = importlib.import_module("triton.compiler").ASTSource


def compiled(
    kernel: Any,
    types: Mapping[str, str],
    values: Mapping[str, Any],
    unaligned: Collection[str],
    source: Any = _AST,
    **options: int,
) -> Mapping[str, str]:
    """Return the stages of a kernel's compilation, as text by name.

    Args:
        kernel: Of `triton.jit` or `gluon.jit`.
        types: Of its arguments, by name; "i32" for those that are left out.
        values: Of arguments that are constants.
        unaligned: Arguments that are no multiples of 16.
        source: The class that such a kernel's source is given as.
        **options: Of the launch.
    """
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in values else types.get(name, "i32")
        for name in names
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name not in values and name not in unaligned
    }
    constants = {(names.index(name),): value for name, value in values.items()}
    given = source(kernel, signature, constants, aligned)
    stages: Mapping[str, str] = triton.compile(
        given, target=TARGET, options=options
    ).asm
    return stages
