"""A GEMM for few rows of `a`, such as a step of decoding, on Hopper, in Gluon.

Gluon changes from release to release: `provider_deep_gemm.py` says with which of Triton
this runs.

It computes what DeepGEMM's "1d2d" kernel does, with the same bits: 128 codes at a time,
in ascending order, on the tensor cores from zero, then
`total += part * (a_scale * b_scale)` in FP32. A program makes 64 columns of the result,
as b a^T: weights are the tensor cores' 64 rows. What differs from DeepGEMM: up to four
products of 128 codes are in flight, so that a product does not wait for the one before
it, only its sum does. At 64 rows DeepGEMM is faster (docs/log.md, 2026-11-30).
"""

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jetrl_compile.kernels.launch_recorder import launch_kernel
from jetrl_compile.kernels.triton_device import multiprocessors, on_device, overlaps

GROUP = 128
_COLUMNS = 64  # of a program

gluon: Any = importlib.import_module("triton.experimental.gluon")
gl: Any = importlib.import_module("triton.experimental.gluon.language")
hopper: Any = importlib.import_module(
    "triton.experimental.gluon.language.nvidia.hopper"
)
async_copy: Any = hopper.async_copy


@gluon.jit  # type: ignore[untyped-decorator, unused-ignore]
def after_the_last_kernel() -> None:
    """Do what the function of this name in `triton_overlap.py` does."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit  # type: ignore[untyped-decorator, unused-ignore]
def _copy(
    base: gl.tensor,
    first: gl.tensor,
    rows: gl.tensor,
    col: gl.tensor,
    cols: gl.tensor,
    stride: gl.tensor,
    to: gl.tensor,
    HEIGHT: gl.constexpr,
    WIDTH: gl.constexpr,
    MASKED: gl.constexpr,
) -> None:
    """Start copying a tile to shared memory, 16 bytes a thread; columns end at cols."""
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 16], [32 // (WIDTH // 16), WIDTH // 16], [4, 1], [1, 0]
    )
    row = first + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, layout))
    at = col + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    source = base + (row[:, None] * stride + at[None, :])
    if MASKED:
        inside = (row[:, None] < rows) & (at[None, :] < cols)
    else:
        inside = (row[:, None] >= 0) & (at[None, :] < cols)
    async_copy.async_copy_global_to_shared(to, source, mask=inside)


# Any number of rows shares a kernel with those that are padded alike.
@partial(gluon.jit, do_not_specialize=["m"])
def decode_kernel(
    a: gl.tensor,
    a_scales: gl.tensor,
    b: gl.tensor,
    b_scales: gl.tensor,
    out: gl.tensor,
    m: gl.tensor,
    n: gl.tensor,
    a_stride: gl.tensor,
    a_scales_group: gl.tensor,
    b_stride: gl.tensor,
    b_scales_row: gl.tensor,
    out_stride: gl.tensor,
    GROUPS: gl.constexpr,
    PADDED: gl.constexpr,
    ROWS: gl.constexpr,
    CHUNKS: gl.constexpr,
    CHUNK: gl.constexpr,
    FULL: gl.constexpr,
) -> None:
    """Make 64 columns of a b^T for up to ROWS rows; `gemm` says what is given."""
    after_the_last_kernel()
    WIDTH: gl.constexpr = CHUNK * 128
    K: gl.constexpr = GROUPS * 128
    codes: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    col = gl.program_id(0) * 64
    w = gl.allocate_shared_memory(b.dtype.element_ty, [CHUNKS, 64, WIDTH], codes)
    x = gl.allocate_shared_memory(a.dtype.element_ty, [CHUNKS, ROWS, WIDTH], codes)
    scale = gl.allocate_shared_memory(gl.float32, [PADDED, ROWS], plain)

    for c in gl.static_range(CHUNKS - 1):
        to = w.index(c)
        _copy(b, col, n, c * WIDTH, K, b_stride, to, 64, WIDTH, not FULL)
        _copy(a, 0, m, c * WIDTH, K, a_stride, x.index(c), ROWS, WIDTH, True)
        async_copy.commit_group()

    # The scales of all groups, multiplied once.
    spread: gl.constexpr = gl.BlockedLayout([1, 1], [32 // ROWS, ROWS], [4, 1], [1, 0])
    group = gl.arange(0, PADDED, layout=gl.SliceLayout(1, spread))
    token = gl.arange(0, ROWS, layout=gl.SliceLayout(0, spread))
    inside = (group[:, None] < GROUPS) & (token[None, :] < m)
    at = a_scales + (group[:, None] * a_scales_group + token[None, :])
    of_a = gl.load(at, mask=inside, other=0.0)
    at = b_scales + (col // 128) * b_scales_row + group
    of_b = gl.load(at, mask=group < GROUPS, other=0.0)
    scale.store(of_a * of_b[:, None])
    scales = scale._reinterpret(gl.float32, [PADDED, 1, ROWS], plain)

    total = gl.zeros([64, ROWS], gl.float32, sums)
    p0 = gl.zeros([64, ROWS], gl.float32, sums)
    p1 = gl.zeros([64, ROWS], gl.float32, sums)
    p2 = gl.zeros([64, ROWS], gl.float32, sums)
    p3 = gl.zeros([64, ROWS], gl.float32, sums)
    slot = 0
    for c in range(GROUPS // CHUNK):
        async_copy.wait_group(CHUNKS - 2)
        hopper.fence_async_shared()
        gl.thread_barrier()
        w_at, x_at = w.index(slot), x.index(slot)
        t0 = _product(w_at, x_at, p0, 0)
        t1 = _product(w_at, x_at, p1, 1)
        if CHUNK == 4:
            t2 = _product(w_at, x_at, p2, 2)
            t3 = _product(w_at, x_at, p3, 3)
        # Into the chunk before this one: every thread has waited for its products.
        free = gl.where(slot == 0, CHUNKS - 1, slot - 1)
        ahead = (c + CHUNKS - 1) * WIDTH
        to = w.index(free)
        _copy(b, col, n, ahead, K, b_stride, to, 64, WIDTH, not FULL)
        _copy(a, 0, m, ahead, K, a_stride, x.index(free), ROWS, WIDTH, True)
        async_copy.commit_group()
        s0 = scales.index(c * CHUNK).load(sums)
        s1 = scales.index(c * CHUNK + 1).load(sums)
        if CHUNK == 4:
            s2 = scales.index(c * CHUNK + 2).load(sums)
            s3 = scales.index(c * CHUNK + 3).load(sums)
        p0 = hopper.warpgroup_mma_wait(CHUNK - 1, deps=[t0])
        total = gl.fma(p0, gl.broadcast(s0, p0)[0], total)
        p1 = hopper.warpgroup_mma_wait(CHUNK - 2, deps=[t1])
        total = gl.fma(p1, gl.broadcast(s1, p1)[0], total)
        if CHUNK == 4:
            p2 = hopper.warpgroup_mma_wait(1, deps=[t2])
            total = gl.fma(p2, gl.broadcast(s2, p2)[0], total)
            p3 = hopper.warpgroup_mma_wait(0, deps=[t3])
            total = gl.fma(p3, gl.broadcast(s3, p3)[0], total)
        slot = gl.where(slot == CHUNKS - 1, 0, slot + 1)

    column = col + gl.arange(0, 64, layout=gl.SliceLayout(1, sums))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, sums))
    at = out + (row[None, :] * out_stride + column[:, None])
    there = (row[None, :] < m) & (column[:, None] < n)
    gl.store(at, total.to(out.dtype.element_ty), mask=there)


@gluon.jit  # type: ignore[untyped-decorator, unused-ignore]
def _product(
    w: gl.tensor, x: gl.tensor, registers: gl.tensor, NUMBER: gl.constexpr
) -> gl.tensor:
    """Start a product of 128 codes, from zero, into registers that are free."""
    left = w.slice(128 * NUMBER, 128, dim=1)
    right = x.slice(128 * NUMBER, 128, dim=1).permute([1, 0])
    return hopper.warpgroup_mma(left, right, registers, use_acc=False, is_async=True)


def chunks_of(
    rows: int, groups: int, programs: int, processors: int
) -> tuple[int, int]:
    """Return chunks in shared memory, and groups of 128 codes in a chunk.

    As many programs as there are share a multiprocessor's 227 KiB, so that none waits
    for another one's end.

    Args:
        rows: Of `a`, padded: 8 or 16.
        groups: Of the contraction.
        programs: How many there are.
        processors: Streaming multiprocessors of the GPU.
    """
    chunk = 4 if groups % 4 == 0 else 2
    room = 220 * 1024 // min(3, -(-programs // processors))
    room -= 4 * rows * (1 << (groups - 1).bit_length())
    fit = room // (chunk * GROUP * (_COLUMNS + rows))
    if fit < 3 and chunk == 4:
        chunk, fit = 2, room // (2 * GROUP * (_COLUMNS + rows))
    return max(2, min(fit, 16 // chunk)), chunk


def gemm(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor) -> Tensor:
    """Multiply codes of 1x128 groups by codes of 128x128 blocks.

    Args:
        a: (m, k) codes in E4M3, m from 1 to 16; columns adjacent, rows at multiples of
            16 bytes; k a multiple of 256, up to 32768. No more than 2^31 bytes.
        a_scales: (m, k / 128) in FP32, rows adjacent.
        b: (n, k) codes in E4M3, like `a`.
        b_scales: (ceil(n / 128), k / 128) in FP32, columns adjacent.

    Returns:
        (m, n) in BF16, row-major.
    """
    (m, k), n = a.shape, b.shape[0]
    out = torch.empty((m, n), dtype=torch.bfloat16, device=a.device)
    rows = 8 if m <= 8 else 16
    groups, programs = k // GROUP, -(-n // _COLUMNS)
    chunks, chunk = chunks_of(rows, groups, programs, multiprocessors(a.device))
    with on_device(a):
        launch_kernel(decode_kernel, (programs,), overlaps(a.device))(
            a,
            a_scales,
            b,
            b_scales,
            out,
            m,
            n,
            a.stride(0),
            a_scales.stride(1),
            b.stride(0),
            b_scales.stride(0),
            out.stride(0),
            GROUPS=groups,
            PADDED=1 << (groups - 1).bit_length(),
            ROWS=rows,
            CHUNKS=chunks,
            CHUNK=chunk,
            FULL=n % _COLUMNS == 0,
            num_warps=4,
        )
    return out
