"""The reference GEMM: exact partial products, a derived bound, and rows that no batch
changes."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from jetrl_compile.kernels import ops, reference

FLOOR = 1e-10
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
# Regions of a and b, as fprop/dgrad/wgrad of "jetrl", wgrad of "jetrl_paper", others.
REGION_PAIRS = [
    ((1, 128), (128, 128)),
    ((1, 128), (1, 128)),
    ((1, 0), (1, 0)),
    ((0, 0), (0, 0)),
    ((128, 32), (2, 32)),
]
laws = settings(derandomize=True, deadline=None, max_examples=25, print_blob=True)
seeds = st.integers(0, 2**31)
sizes = st.integers(1, 300)
Operand = tuple[Tensor, Tensor]


def operand(seed: int, rows: int, cols: int, region: tuple[int, int]) -> Operand:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator).bfloat16()
    codes, scales = ops.quantize(x, *region, False, "fp32", FLOOR, None)
    return codes, scales


def gemm(
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype = BF16,
    regions: tuple[tuple[int, int], tuple[int, int]] = REGION_PAIRS[0],
) -> Tensor:
    out: Tensor = ops.gemm(*a, *b, *regions[0], *regions[1], out_dtype, "reference")
    return out


def values(x: Operand, region: tuple[int, int]) -> Tensor:
    """Return code * scale in FP64, which is exact: 4 bits by 24 bits."""
    rows, cols = region[0] or x[0].shape[0], region[1] or x[0].shape[1]
    wide = x[1].double().repeat_interleave(rows, 0).repeat_interleave(cols, 1)
    return x[0].double() * wide[: x[0].shape[0], : x[0].shape[1]]


def check_against_fp64(
    a: Operand, b: Operand, regions: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    """Compare with an FP64 product of the dequantized operands.

    With u = 2^-53 and S = sum |a b|: the oracle rounds each of K products and K - 1
    sums, so it is off by at most (K + 1) u S (to first order). Ours is exact within a
    group, then rounds one product and one sum for each of G groups: (G + 1) u S. The
    result is rounded to FP32 (2^-24 of it), then to BF16 (2^-8 of it). One more u S
    and one more 2^-24 cover the second-order terms.
    """
    a_MK, b_NK = values(a, regions[0]), values(b, regions[1])
    oracle, size = a_MK @ b_NK.t(), a_MK.abs() @ b_NK.abs().t()
    k, groups = a[0].shape[1], a[1].shape[1]
    bound = (k + groups + 3) * 2.0**-53 * size
    for dtype, rounding in ((FP64, 0.0), (FP32, 2.0**-24), (BF16, 2**-8 + 2**-23)):
        error = (gemm(a, b, dtype, regions).double() - oracle).abs()
        assert (error <= bound + rounding * (oracle.abs() + bound)).all(), dtype


@laws
@given(seeds, sizes, sizes, sizes, st.sampled_from(REGION_PAIRS))
def test_against_fp64(
    seed: int,
    m: int,
    n: int,
    k: int,
    regions: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    a, b = operand(seed, m, k, regions[0]), operand(seed + 1, n, k, regions[1])
    check_against_fp64(a, b, regions)


@laws
@given(seeds, st.integers(1, 40), st.integers(1, 200), st.integers(1, 300))
def test_is_the_ordered_sum_of_exact_partials(
    seed: int, m: int, n: int, k: int
) -> None:
    # Any finite codes, so that large and tiny products meet; integers of 2^-9 are the
    # oracle.
    generator = torch.Generator().manual_seed(seed)
    codes = []
    for rows in (m, n):
        raw = torch.randint(0, 256, (rows, k), generator=generator, dtype=torch.uint8)
        raw[(raw & 0x7F) == 0x7F] = 0  # NaN
        codes.append(raw.view(torch.float8_e4m3fn))
    groups = -(-k // 128)
    a_scales = torch.rand(m, groups, generator=generator)
    b_scales = torch.rand(-(-n // 128), groups, generator=generator)
    a_int, b_int = ((x.double() * 512).long() for x in codes)
    total = torch.zeros(m, n, dtype=FP64)
    for group in range(groups):
        span = slice(group * 128, (group + 1) * 128)
        part = (a_int[:, span] @ b_int[:, span].t()).double() * 2.0**-18
        scale = b_scales[:, group].double().repeat_interleave(128)[:n]
        total += part * (a_scales[:, group, None].double() * scale)
    out = gemm((codes[0], a_scales), (codes[1], b_scales), FP64)
    assert torch.equal(out, total)
    out = gemm((codes[0], a_scales), (codes[1], b_scales), BF16)
    assert torch.equal(out, total.float().bfloat16())


def test_longest_exact_region() -> None:
    # 2^17 products of 448 * 448, the largest there are, and one of the smallest.
    k = ops.MAX_COLS
    a = torch.full((1, k), 448.0).to(torch.float8_e4m3fn)
    b = a.clone()
    a[0, 0] = b[0, 0] = 2.0**-9
    one = torch.ones(1, 1)
    out = ops.gemm(a, one, b, one, 0, 0, 0, 0, FP64, "reference")
    assert out.item() == (k - 1) * 448**2 + 2.0**-18


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (7, 1024, 4608),
        (129, 1024, 576),
        (1, 128, 18944),
        (7, 192, 53248),
        (1, 151936, 128),
        (16, 1536, 576),
        (129, 576, 1536),
    ],
)
def test_sizes_of_real_models(m: int, n: int, k: int) -> None:
    regions = REGION_PAIRS[0]
    check_against_fp64(
        operand(m, m, k, regions[0]), operand(n, n, k, regions[1]), regions
    )


@pytest.mark.parametrize(("n", "k"), [(576, 576), (192, 1536), (1024, 4608)])
@pytest.mark.parametrize("out_dtype", [BF16, FP32, FP64])
def test_row_does_not_depend_on_the_batch(
    n: int, k: int, out_dtype: torch.dtype
) -> None:
    codes, scales = operand(0, 300, k, (1, 128))
    b = operand(1, n, k, (128, 128))
    whole = gemm((codes, scales), b, out_dtype)
    for m in (*range(1, 18), 31, 32, 33, 64, 127, 128, 129, 255, 299):
        part = gemm((codes[:m], scales[:m]), b, out_dtype)
        assert torch.equal(part, whole[:m])
    for row in (1, 63, 298):
        one = gemm((codes[row : row + 1], scales[row : row + 1]), b, out_dtype)
        assert torch.equal(one[0], whole[row])


def test_slice_of_a_fused_weight_gives_the_same_bits() -> None:
    a = operand(0, 33, 576, (1, 128))
    codes, scales = operand(1, 960, 576, (128, 128))
    whole = gemm(a, (codes, scales), FP64)
    for start, stop in ((0, 128), (128, 640), (640, 960), (896, 960)):
        part = (codes[start:stop], scales[start // 128 : -(-stop // 128)])
        assert torch.equal(gemm(a, part, FP64), whole[:, start:stop])


def test_tiles_do_not_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = operand(0, 100, 300, (1, 128)), operand(1, 500, 300, (128, 128))
    whole = gemm(a, b, FP64)
    monkeypatch.setattr(reference, "_OPERAND_ELEMENTS", 1)
    monkeypatch.setattr(reference, "_TILE_ELEMENTS", 20 * 128)
    assert torch.equal(gemm(a, b, FP64), whole)


def test_threads_do_not_change_bits() -> None:
    a, b = operand(0, 256, 576, (1, 128)), operand(1, 576, 576, (128, 128))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(gemm(a, b, FP64))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize(("n", "k"), [(1024, 4608), (64, 64), (192, 576)])
def test_empty_batch(n: int, k: int) -> None:
    x = torch.empty(0, k, dtype=BF16)
    a = ops.quantize(x, 1, 128, False, "fp32", FLOOR, None)
    assert gemm(a, operand(0, n, k, (128, 128))).shape == (0, n)
    # wgrad: the contraction is empty, so the gradient is zero.
    dy = torch.empty(0, n, dtype=BF16)
    dy_t = ops.quantize(dy, 1, 128, True, "fp32", FLOOR, None)
    x_t = ops.quantize(x, 128, 128, True, "fp32", FLOOR, None)
    assert torch.equal(gemm(dy_t, x_t), torch.zeros(n, k, dtype=BF16))


def test_strides_do_not_matter() -> None:
    a, b = operand(0, 50, 300, (1, 128)), operand(1, 200, 300, (128, 128))
    a_strided = tuple(x.t().contiguous().t() for x in a)
    b_strided = tuple(x.t().contiguous().t() for x in b)
    out = gemm((a_strided[0], a_strided[1]), (b_strided[0], b_strided[1]))
    assert torch.equal(out, gemm(a, b))
    assert out.is_contiguous()


def test_nan_stays_in_its_row() -> None:
    x = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[1, 140] = float("nan")
    x[2, 299] = float("inf")
    a = ops.quantize(x, 1, 128, False, "fp32", FLOOR, None)
    out = gemm(a, operand(1, 200, 300, (128, 128)))
    assert out[[1, 2]].isnan().all()
    assert out[[0, 3]].isfinite().all()


def test_zero_has_no_sign() -> None:
    # Whether a BLAS starts a sum of -0 with +0 is not for us to depend on.
    zeros = torch.zeros(3, 200).to(torch.float8_e4m3fn)
    negative = torch.full((2, 200), -1.0).to(torch.float8_e4m3fn)
    out = gemm((zeros, torch.ones(3, 2)), (negative, torch.ones(1, 2)), FP32)
    assert not out.signbit().any()


def test_three_gemms_of_a_linear_layer() -> None:
    # The three roles against BF16 data: E4M3 keeps each to about 3.7e-2.
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (
        torch.randn(size, generator=generator).bfloat16()
        for size in ((129, 320), (192, 320), (129, 192))
    )

    def q(t: Tensor, rows: int, transpose: bool = False) -> Operand:
        codes, scales = ops.quantize(t, rows, 128, transpose, "fp32", FLOOR, None)
        return codes, scales

    for out, exact in (
        (gemm(q(x, 1), q(w, 128)), x.double() @ w.double().t()),
        (gemm(q(dy, 1), q(w, 128, True)), dy.double() @ w.double()),
        (gemm(q(dy, 1, True), q(x, 128, True)), dy.double().t() @ x.double()),
    ):
        assert out.shape == exact.shape
        assert 0.03 < (out.double() - exact).norm() / exact.norm() < 0.045


@pytest.mark.gpu
def test_gpu_gives_the_same_bits() -> None:
    x = torch.randn(300, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    w = torch.randn(192, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
    results = []
    for device in ("cpu", "cuda"):
        a = ops.quantize(x.to(device), 1, 128, False, "fp32", FLOOR, None)
        b = ops.quantize(w.to(device), 128, 128, False, "ue8m0", FLOOR, None)
        out = ops.gemm(*a, *b, 1, 128, 128, 128, FP64, "reference")
        codes = [t[0].view(torch.uint8).cpu() for t in (a, b)]
        results.append([*codes, a[1].cpu(), b[1].cpu(), out.cpu()])
    for cpu, cuda in zip(*results, strict=True):
        assert torch.equal(cpu, cuda)
