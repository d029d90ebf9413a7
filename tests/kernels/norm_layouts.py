"""Compile the norm's kernel for Hopper, and print how it spreads what it adds up.

    python tests/kernels/norm_layouts.py

Needs Triton and no GPU. Prints, for each length of a row, one JSON list a line: the
layouts of the squares in the variants that the norm is launched in. Triton adds up in
the order of a layout, so variants of other layouts give other bits.
"""

import importlib
import json
import re
from typing import Any

from jetrl_compile.kernels.triton_norm import split_groups, warps_of
from jetrl_compile.kernels.triton_norm_kernels import norm_kernel

triton: Any = importlib.import_module("triton")
GPUTarget: Any = importlib.import_module("triton.backends.compiler").GPUTarget
ASTSource: Any = importlib.import_module("triton.compiler").ASTSource
COLS = (576, 3584, 4096, 5120)
VARIANTS: tuple[tuple[str, ...], ...] = (
    (),
    ("kept",),
    ("residual", "total"),
    ("residual", "total", "kept"),
)
POINTERS = {"rstd": "*fp32", "scales": "*fp32", "codes": "*fp8e4nv"}


def layouts(cols: int, given: tuple[str, ...], ue8m0: bool) -> list[str]:
    """Return the layouts in which squares of a row are added up.

    Args:
        cols: Length of a row.
        given: Which of the kernel's optional tensors there are.
        ue8m0: Whether scales are powers of two.
    """
    first, last = split_groups(-(-cols // 128))
    values: dict[str, Any] = {
        "FIRST": first,
        "LAST": last,
        "FULL": (first + last) * 128 == cols,
        "FLOOR": 1e-10,
        "UE8M0": ue8m0,
    }
    signature = {}
    for name in norm_kernel.arg_names:
        if name in ("x", "weight", *given):
            signature[name] = "*bf16"
        elif name in POINTERS:
            signature[name] = POINTERS[name]
        elif name in ("residual", "total", "kept"):
            values[name] = None
        elif name == "eps":
            signature[name] = "fp32"
        elif name not in values:
            signature[name] = "i32"
    names = norm_kernel.arg_names
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name in signature and name not in ("eps", "scale_stride")
    }
    source = ASTSource(
        norm_kernel,
        {name: signature.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in values.items()},
        aligned,
    )
    options = {"num_warps": warps_of(first + last)}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    text = made.asm["ttgir"]
    named = dict(re.findall(r"(#\w+) = (#ttg\.\w+<.*>)", text))
    squares = re.findall(r"= arith\.mulf (%\S+), \1 : (tensor<.*?>) loc", text)
    return [re.sub(r"#\w+(?=>)", lambda m: named[m[0]], kind) for _, kind in squares]


def main() -> None:
    """Print the layouts."""
    for cols in COLS:
        found = [layouts(cols, v, ue8m0) for v in VARIANTS for ue8m0 in (False, True)]
        print(json.dumps(found))


if __name__ == "__main__":
    main()
