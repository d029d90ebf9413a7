"""Which of its kernels DeepGEMM runs for a GEMM on Hopper: tiles, cluster, stages.

DeepGEMM chooses by a model of the time that a tile's memory traffic takes, which
depends on all three sizes. This is the same rule, used only to tell which GEMMs need
one kernel, so that warm-up compiles each once, for every number of tokens in a range.
Where it errs (another version of DeepGEMM), a kernel is compiled twice or late, and no
result changes.

Tokens matter only through the number of tiles: from 1 to 16, 17 to 32, 33 to 64, and in
steps of 64 from there.

Source: DeepGEMM 2.5, csrc/jit_kernels/heuristics/sm90.hpp and common.hpp.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

H200_SMS = 132
_SHARED_MEMORY = 232448  # bytes that a block may use
_BARRIERS = 16 * 8 * 2
_MAX_STAGES = 16
_NEVER = 2**63 - 1
_K_TILE = 128


@dataclass(frozen=True, slots=True)
class Kernel:
    """What tells one of DeepGEMM's compiled kernels from another.

    Attributes:
        by_groups: Whether `b` has 1x128 groups and the result is FP32 ("1d1d"); else
            `b` has 128x128 blocks and the result is BF16 ("1d2d").
        n: Rows of `b`, which are compiled in.
        tile_m: Rows of a tile.
        tile_n: Columns of a tile.
        cluster: Tiles that share loads, along M and along N.
        stages: Steps of the contraction that are loaded ahead.
    """

    by_groups: bool
    n: int
    tile_m: int
    tile_n: int
    cluster: tuple[int, int]
    stages: int


def kernel_for(
    m: int, n: int, k: int, by_groups: bool, sms: int = H200_SMS
) -> Kernel | None:
    """Return the kernel that DeepGEMM runs; None where it has none.

    Args:
        m: Rows of `a`.
        n: Rows of `b`.
        k: The contraction.
        by_groups: As in `Kernel`.
        sms: Streaming multiprocessors of the GPU.
    """
    best: Kernel | None = None
    least = 0
    for tile_m, tile_n, cluster in _tiles(m, by_groups):
        if sms % (cluster[0] * cluster[1]):
            continue
        stages = _stages(tile_m, tile_n, k, by_groups)
        if stages < 3 or (tile_m * tile_n < 128 * 192 and stages < 4):
            continue
        cycles = _cycles(m, n, k, tile_m, tile_n, cluster, by_groups, sms)
        if best is None or cycles < least:
            best = Kernel(by_groups, n, tile_m, tile_n, cluster, stages)
            least = cycles
    return best


def token_steps(low: int, high: int) -> list[int]:
    """Return one number of tokens for each of which all in a range have its kernels.

    Args:
        low: The fewest tokens, at least 1.
        high: The most tokens.
    """
    steps = [16, 32, *range(64, high + 64, 64)]
    before = [0, *steps]
    return [s for at, s in zip(before, steps, strict=False) if s >= low and at < high]


def _tiles(m: int, by_groups: bool) -> Iterator[tuple[int, int, tuple[int, int]]]:
    heights = [64, 128, *([16] if m <= 16 else []), *([32] if m <= 32 else [])]
    if by_groups:
        widths = [16, *range(24, 161, 16)]
    else:
        heights.append(256)
        widths = list(range(16, 193, 16))
    for cluster in ((1, 1), (1, 2), (2, 1)):
        for tile_m in heights:
            for tile_n in widths:
                over = tile_n - _K_TILE
                if not by_groups and over > 0 and tile_n % over and _K_TILE % over:
                    continue
                if tile_m <= 128 or tile_n <= 128:
                    yield tile_m, tile_n, cluster


def _stages(tile_m: int, tile_n: int, k: int, by_groups: bool) -> int:
    result = _align(tile_m * tile_n * (4 if by_groups else 2), 1024)
    per_stage = (tile_m + tile_n) * _K_TILE + _align(tile_m * 4, 128)
    fixed = result + _BARRIERS
    if by_groups:
        per_stage += _align(tile_n * 4, 128)
    else:
        rows_of_scales = 1 if _K_TILE % tile_n == 0 else 2
        fixed += _align(_ceil_div(k, _K_TILE) * 4 * rows_of_scales, 8)
    return min((_SHARED_MEMORY - fixed) // per_stage, _MAX_STAGES)


def _cycles(
    m: int,
    n: int,
    k: int,
    tile_m: int,
    tile_n: int,
    cluster: tuple[int, int],
    by_groups: bool,
    sms: int,
) -> int:
    tiles = _ceil_div(m, tile_m) * _ceil_div(n, tile_n)
    waves = _ceil_div(tiles, sms)
    if cluster != (1, 1) and waves <= 1:
        return _NEVER
    out = tile_m * tile_n * (4 if by_groups else 2)
    out_traffic = out * (2 if by_groups else 1)  # 1d1d adds to what is there
    l2_loads = k * (tile_m // cluster[1] + tile_n // cluster[0])
    l1_loads = k * (tile_m + tile_n)
    tensor_cores = k * (max(64, tile_m) + tile_n) + out
    l2_rate = int(min(64.0 * sms, 8e6 / 1.3e3))  # bytes a cycle
    l2 = (l2_loads + out_traffic) * tiles // l2_rate
    l1 = (l1_loads + tensor_cores + out_traffic) * tiles // (128 * sms)
    efficiency = _fp32(tiles / (waves * sms))
    return int(_fp32(_fp32(max(l1, l2)) / efficiency))


def _fp32(value: float) -> float:
    return ctypes.c_float(value).value


def _ceil_div(size: int, by: int) -> int:
    return -(-size // by)


def _align(size: int, to: int) -> int:
    return _ceil_div(size, to) * to
