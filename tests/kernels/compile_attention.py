"""Compile the attention of decoded steps for Hopper, and print what its PTX has.

    python tests/kernels/compile_attention.py

Needs Triton with its ptxas, and no GPU. Prints a JSON list a kernel: its splits, how
often it names local memory, instructions of interest in their order, repeats once.
"""

import importlib
import json
import os
import re
from itertools import groupby
from typing import Any

from for_hopper import TARGET, compiled

from jetrl_compile.kernels.decode_attention import KEYS, LEAST, STAGES, WARPS
from jetrl_compile.kernels.decode_attention_kernels import (
    ROWS,
    decode_attention_kernel,
)

os.environ["TRITON_ALWAYS_COMPILE"] = "1"  # a cache does not know what is here Hopper
POINTERS = {
    **dict.fromkeys(("q", "k", "v", "key_cache", "value_cache", "out"), "*bf16"),
    **dict.fromkeys(("parts", "part_max", "part_sum"), "*fp32"),
    **dict.fromkeys(("arrived", "lengths", "block_table"), "*i32"),
    "slots": "*i64",
    "scale": "fp32",
}
SEEN = (
    r"griddepcontrol\.wait|ld\.global(?:\.cg)?|cp\.async\.cg|mma\.sync|bar\.sync|"
    r"atom\.global\.\w+\.\w+|st\.global"
)


def seen(
    heads: int, heads_k: int, size: int, splits: int, writes: bool = True
) -> tuple[int, list[str]]:
    """Return how often local memory is named, and instructions in their order."""
    values: dict[str, Any] = {
        "HEADS": heads,
        "GROUP": heads // heads_k,
        "SIZE": size,
        "WIDTH": 1 << (size - 1).bit_length(),
        "PAGE": 16,
        "ROWS": ROWS,
        "KEYS": KEYS,
        "SPLITS": splits,
        "LEAST": LEAST,
    }
    if not writes:
        values["slots"] = None
    types = dict(POINTERS)
    if splits == 1:  # `out` stands for what is not used
        types |= dict.fromkeys(("parts", "part_max", "part_sum"), "*bf16")
    ptx = compiled(
        decode_attention_kernel,
        types,
        values,
        ("table_stride", "scale"),
        num_warps=WARPS,
        num_stages=STAGES,
    )["ptx"]
    return ptx.count(".local "), [name for name, _ in groupby(re.findall(SEEN, ptx))]


def hopper() -> Any:
    """Stand for the question which GPU is there."""
    return TARGET


def main() -> None:
    """Print a line a kernel."""
    # Kernels ask the GPU that is there which instructions they may have.
    info: Any = importlib.import_module("triton.language.target_info")
    info.current_target = hopper
    for heads, heads_k, size in ((32, 8, 128), (9, 3, 64), (64, 8, 80), (16, 1, 256)):
        for splits in (1, 8):
            print(json.dumps([splits, *seen(heads, heads_k, size, splits)]))
    print(json.dumps([8, *seen(32, 8, 128, 8, writes=False)]))


hopper.__triton_builtin__ = True  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
