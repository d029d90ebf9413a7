"""Compile the GEMM of few rows for Hopper, and print what its machine code has.

    python tests/kernels/compile_decode.py

Needs Triton with its ptxas, and no GPU. Prints a JSON list a kernel: its rows, how
often it names local memory, PTX instructions of interest in their order, repeats once.
"""

import importlib
import json
import re
from itertools import groupby
from typing import Any

from for_hopper import compiled

from jetrl_compile.kernels.gluon_decode import chunks_of, decode_kernel

runtime: Any = importlib.import_module("triton.experimental.gluon._runtime")
POINTERS = {
    "a": "*fp8e4nv",
    "b": "*fp8e4nv",
    "a_scales": "*fp32",
    "b_scales": "*fp32",
    "out": "*bf16",
}
SEEN = r"griddepcontrol\.\w+|wgmma\.mma_async|ld\.global|cp\.async\.cg|st\.global"


def seen(rows: int, groups: int, programs: int, full: bool) -> tuple[int, list[str]]:
    """Return how often local memory is named, and instructions in their order."""
    chunks, chunk = chunks_of(rows, groups, programs, 132)
    values = {
        "GROUPS": groups,
        "PADDED": 1 << (groups - 1).bit_length(),
        "ROWS": rows,
        "CHUNKS": chunks,
        "CHUNK": chunk,
        "FULL": full,
    }
    unaligned = ("m", "a_scales_group", "b_scales_row")
    source = runtime.GluonASTSource
    stages = compiled(decode_kernel, POINTERS, values, unaligned, source, num_warps=4)
    ptx = stages["ptx"]
    return ptx.count(".local "), [name for name, _ in groupby(re.findall(SEEN, ptx))]


def main() -> None:
    """Print a line a kernel."""
    for rows in (8, 16):
        for groups, programs in ((32, 96), (96, 64), (32, 384), (6, 19)):
            found = seen(rows, groups, programs, programs > 19)
            print(json.dumps([rows, *found]))


if __name__ == "__main__":
    main()
