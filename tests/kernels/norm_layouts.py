"""Compile the norm's kernel for Hopper, and print how it spreads what it adds up.

    python tests/kernels/norm_layouts.py

Needs Triton and no GPU. Prints, for each length of a row, one JSON list a line: the
layouts of the squares in the variants that the norm is launched in. Triton adds up in
the order of a layout, so variants of other layouts give other bits.
"""

import json
import re
from typing import Any

from for_hopper import compiled

from jetrl_compile.kernels.triton_norm import split_groups, warps_of
from jetrl_compile.kernels.triton_norm_kernels import norm_kernel

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
    types = {"x": "*bf16", "weight": "*bf16", "eps": "fp32", **POINTERS}
    for name in ("residual", "total", "kept"):
        if name in given:
            types[name] = "*bf16"
        else:
            values[name] = None
    stages = compiled(
        norm_kernel,
        types,
        values,
        ("eps", "scale_stride"),
        num_warps=warps_of(first + last),
    )
    text = stages["ttgir"]
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
