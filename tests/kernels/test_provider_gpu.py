"""Every provider on a Hopper GPU: a float64 bound, and bits that no batch changes.

All DeepGEMM kernels are compiled first, several at once, by `warmed`.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from jetrl_compile import formats
from jetrl_compile.kernels import ops, reference
from jetrl_compile.kernels.dispatch import GemmShape, get_provider, select
from jetrl_compile.kernels.layouts import align, empty_quantized, in_order
from jetrl_compile.kernels.provider_deep_gemm import DEEP_GEMM
from jetrl_compile.kernels.warm_up import Call, warm_up

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::SyntaxWarning"),
]
BF16, FP32 = torch.bfloat16, torch.float32
PROVIDERS = ("deep_gemm", "scaled_mm", "triton")
BATCHES = (1, 2, 3, 7, 8, 16, 64, 100, 128, 129, 256, 1000, 8192)
WEIGHTS = ((192, 576), (1024, 1536), (1024, 3584), (192, 4608), (1024, 18944))
VOCABULARY = (151936, 576)
FUSED = (1024, 192)  # rows of the layers of a fused weight, (1216, 576)
TOKENS = (129, 1000, 4096)  # of wgrad, not all multiples of 16
GRADIENT = (1024, 576)
FPROP = GemmShape(
    "fprop", 1024, 576, formats.groups("K"), formats.blocks("K"), device_type="cuda"
)
Operand = tuple[Tensor, Tensor]


def calls() -> Iterator[Call]:
    for n, k in (*WEIGHTS, (sum(FUSED), 576), VOCABULARY):
        for m in BATCHES if (n, k) in WEIGHTS else (1, 129, 256):
            yield Call(m, n, k)
    yield from (Call(m, 1024, 576) for m in (1, 64, 129, 256))
    yield Call(129, 192, 200)
    for tokens in TOKENS:
        for rows, dtype in ((128, "bf16"), (128, "fp32"), (1, "bf16")):
            yield Call(*GRADIENT, tokens, rows, dtype)


def shape_of(call: Call) -> GemmShape:
    """Name a call as a wgrad, whose sizes are all given."""
    b = formats.blocks("M") if call.b_rows == 128 else formats.groups("M")
    a = formats.groups("M")
    return GemmShape(
        "wgrad", call.m, call.n, a, b, call.k, call.out_dtype, device_type="cuda"
    )


@pytest.fixture(scope="module")
def warmed() -> None:
    if DEEP_GEMM.usable() is None:
        done = warm_up(shape_of(call) for call in calls())
        assert not done.failed
        print(f"{done.calls} calls, {done.compiled} kernels, {done.seconds:.0f} s")


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest, warmed: None) -> str:
    name: str = request.param
    needed(name)
    return name


def needed(*names: str) -> None:
    for name in names:
        why = get_provider(name).usable()
        if why is not None:
            pytest.skip(f"{name}: {why}")


def operand(seed: int, rows: int, cols: int, region_rows: int) -> Operand:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator, device="cuda", dtype=BF16)
    made = reference.quantize(x, region_rows, 128, False, "fp32", 1e-10)
    return in_order(*made, region_rows)


def run(
    name: str, a: Operand, b: Operand, out_dtype: torch.dtype = BF16, b_rows: int = 128
) -> Tensor:
    out: Tensor = ops.gemm(*a, *b, 1, 128, b_rows, 128, out_dtype, name)
    return out


def rows_of(a: Operand, start: int, stop: int) -> Operand:
    return in_order(a[0][start:stop], a[1][start:stop], 1)


def blocks_of(b: Operand, start: int, stop: int) -> Operand:
    return b[0][start:stop], b[1][start // 128 : -(-stop // 128)]


def values(x: Operand, region_rows: int) -> Tensor:
    """Return code * scale in FP64, which is exact."""
    rows, cols = x[0].shape
    scales = x[1].double().repeat_interleave(region_rows, 0)[:rows]
    return x[0].double() * scales.repeat_interleave(128, 1)[:, :cols]


def check_against_fp64(out: Tensor, a: Operand, b: Operand, b_rows: int) -> None:
    """Compare with an FP64 product.

    Within a group of 128, the tensor cores make four steps. A step adds 32 exact
    products and the sum so far; each of these 33 is cut off at 2^-13 of the largest,
    which is at most S = sum |a b| of the group: 4 * 33 * 2^-13 S. Each of G groups is
    multiplied by the product of its scales and added in FP32: (G + 2) 2^-24 S. Then the
    result is rounded to BF16 (2^-8 of it: it may be truncated) or stays FP32.

    Errors of single terms have both signs, so the bound is far from reached; their root
    mean square is held to that of BF16's rounding (2^-9 relative at most), twice.
    """
    a_MK, b_NK = values(a, 1), values(b, b_rows)
    exact, size = a_MK @ b_NK.t(), a_MK.abs() @ b_NK.abs().t()
    bound = (4 * 33 * 2.0**-13 + (a[1].shape[1] + 2) * 2.0**-24) * size
    rounding = 2.0**-8 if out.dtype is BF16 else 2.0**-24
    error = (out.double() - exact).abs()
    assert (error <= bound + rounding * (exact.abs() + bound)).all()
    assert error.norm() <= 2.0**-8 * exact.norm()


@pytest.mark.parametrize("m", [1, 129, 256])
@pytest.mark.parametrize(("n", "k"), [*WEIGHTS, VOCABULARY])
def test_against_fp64(provider: str, m: int, n: int, k: int) -> None:
    a, b = operand(0, m, k, 1), operand(1, n, k, 128)
    check_against_fp64(run(provider, a, b), a, b, 128)


@pytest.mark.parametrize(("n", "k"), WEIGHTS)
def test_rows_do_not_depend_on_the_batch(provider: str, n: int, k: int) -> None:
    a, b = operand(0, max(BATCHES), k, 1), operand(1, n, k, 128)
    whole = run(provider, a, b)
    for m in BATCHES:
        assert torch.equal(run(provider, rows_of(a, 0, m), b), whole[:m]), m
    for start, stop in ((5, 6), (100, 229), (7192, 8192)):
        part = run(provider, rows_of(a, start, stop), b)
        assert torch.equal(part, whole[start:stop]), (start, stop)


def test_slices_of_a_fused_weight_give_the_same_bits(provider: str) -> None:
    b = operand(1, sum(FUSED), 576, 128)
    for m in (1, 129, 256):
        a, start = operand(0, m, 576, 1), 0
        whole = run(provider, a, b)
        for n in FUSED:
            part = run(provider, a, blocks_of(b, start, start + n))
            assert torch.equal(part, whole[:, start : start + n]), (m, n)
            start += n


@pytest.mark.parametrize("m", [1, 129, 8192])
def test_two_runs_give_the_same_bits(provider: str, m: int) -> None:
    a, b = operand(0, m, 3584, 1), operand(1, 1024, 3584, 128)
    first = run(provider, a, b)
    assert all(torch.equal(run(provider, a, b), first) for _ in range(3))


@pytest.mark.usefixtures("warmed")
@pytest.mark.parametrize(("n", "k"), WEIGHTS)
def test_deep_gemm_and_scaled_mm_give_the_same_bits(n: int, k: int) -> None:
    needed("deep_gemm", "scaled_mm")
    b = operand(1, n, k, 128)
    for m in BATCHES:
        a = operand(m, m, k, 1)
        assert torch.equal(run("deep_gemm", a, b), run("scaled_mm", a, b)), m


@pytest.mark.usefixtures("warmed")
@pytest.mark.parametrize("name", ["deep_gemm", "triton"])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("b_rows", [1, 128])
@pytest.mark.parametrize("out_dtype", [BF16, FP32])
def test_wgrad(name: str, tokens: int, b_rows: int, out_dtype: torch.dtype) -> None:
    needed(name)
    n, k = GRADIENT
    a, b = operand(0, n, tokens, 1), operand(1, k, tokens, b_rows)
    out = run(name, a, b, out_dtype, b_rows)
    check_against_fp64(out, a, b, b_rows)
    assert torch.equal(run(name, a, b, out_dtype, b_rows), out)
    # Rounding FP32 gives the bits of BF16: the sums are the same.
    assert torch.equal(run(name, a, b, FP32, b_rows).to(BF16), out.to(BF16))


def with_dirty_padding(x: Operand, region_rows: int) -> Operand:
    """Return the same operand; what pads its rows and columns is NaN."""
    rows, cols = x[0].shape
    wide = torch.full((rows, align(cols, 16)), 0x7F, dtype=torch.uint8, device="cuda")
    codes = wide.view(torch.float8_e4m3fn)[:, :cols]
    codes.copy_(x[0])
    if region_rows != 1:
        return codes, x[1]
    groups = x[1].shape[1]
    scales = torch.full((groups, align(rows, 4)), torch.nan, device="cuda").t()[:rows]
    scales.copy_(x[1])
    return codes, scales


@pytest.mark.parametrize("k", [200, 576])
def test_padding_is_not_read(provider: str, k: int) -> None:
    if provider == "scaled_mm" and k == 200:
        pytest.skip("it rejects a contraction that is no multiple of 16")
    a, b = operand(0, 129, k, 1), operand(1, 192, k, 128)
    dirty = with_dirty_padding(a, 1), with_dirty_padding(b, 128)
    assert torch.equal(run(provider, *dirty), run(provider, a, b))
    check_against_fp64(run(provider, *dirty), a, b, 128)


@pytest.mark.usefixtures("warmed")
@pytest.mark.parametrize("b_rows", [1, 128])
def test_padding_is_not_read_in_wgrad(b_rows: int) -> None:
    needed("deep_gemm")
    n, k = GRADIENT
    a, b = operand(0, n, 129, 1), operand(1, k, 129, b_rows)
    dirty = with_dirty_padding(a, 1), with_dirty_padding(b, b_rows)
    for dtype in (BF16, FP32):
        got = run("deep_gemm", *dirty, dtype, b_rows)
        assert torch.equal(got, run("deep_gemm", a, b, dtype, b_rows))


def test_nan_and_infinity_stay_in_their_rows(provider: str) -> None:
    x = torch.randn(129, 576, device="cuda", dtype=BF16)
    x[1, 140] = torch.nan
    x[128, 575] = torch.inf
    a = in_order(*reference.quantize(x, 1, 128, False, "fp32", 1e-10), 1)
    out = run(provider, a, operand(1, 192, 576, 128))
    bad = torch.zeros(129, dtype=torch.bool, device="cuda")
    bad[[1, 128]] = True
    assert out[bad].isnan().all()
    assert out[~bad].isfinite().all()


@pytest.mark.parametrize(("m", "n", "k"), [(0, 192, 576), (8, 192, 0), (8, 0, 576)])
def test_empty(provider: str, m: int, n: int, k: int) -> None:
    device = torch.device("cuda")
    a = empty_quantized((m, k), 1, 128, device)
    b = empty_quantized((n, k), 128, 128, device)
    zeros = torch.zeros(m, n, dtype=BF16, device=device)
    assert torch.equal(run(provider, a, b), zeros)


@pytest.mark.usefixtures("warmed")
@pytest.mark.parametrize(
    ("shape", "chosen", "why"),
    [
        (FPROP, "deep_gemm", ""),
        (replace(FPROP, n=196), "triton", "196 rows of b are no multiple of 8"),
        (replace(FPROP, n=192, k=200), "deep_gemm", ""),
        (replace(FPROP, out_dtype="fp32"), "triton", "it gives bf16, not fp32"),
        (replace(FPROP, out_dtype="fp64"), "reference", "triton: it gives bf16 or"),
    ],
)
def test_next_provider_is_right(shape: GemmShape, chosen: str, why: str) -> None:
    needed(*PROVIDERS)
    choice = select(shape)
    assert choice.provider.name == chosen
    assert why in choice.reason
    a, b = operand(0, 129, shape.k, 1), operand(1, shape.n, shape.k, 128)
    dtype = {"bf16": BF16, "fp32": FP32, "fp64": torch.float64}[shape.out_dtype]
    check_against_fp64(run(chosen, a, b, dtype), a, b, 128)


@pytest.mark.usefixtures("warmed")
@pytest.mark.parametrize("tokens", [129, 1000])
def test_scaled_mm_rejects_wgrad_and_others_run_it(tokens: int) -> None:
    needed(*PROVIDERS)
    wgrad = replace(
        FPROP, role="wgrad", a=formats.groups("M"), b=formats.blocks("M"), k=576
    )
    choice = select(wgrad, ("scaled_mm", "deep_gemm"))
    assert choice.provider.name == "deep_gemm"
    assert "tokens, which wgrad adds over" in choice.reason
    a, b = operand(0, 1024, tokens, 1), operand(1, 576, tokens, 128)
    check_against_fp64(run("deep_gemm", a, b), a, b, 128)


def test_under_a_cuda_graph(provider: str) -> None:
    a, b = operand(0, 129, 576, 1), operand(1, 192, 576, 128)
    want = run(provider, a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(provider, a, b)
    other = operand(5, 129, 576, 1)
    fresh = run(provider, other, b)
    first = [t.clone() for t in a]
    for given, wanted in ((other, fresh), (first, want)):
        for held, new in zip(a, given, strict=True):
            held.copy_(new)
        graph.replay()
        assert torch.equal(out, wanted)
