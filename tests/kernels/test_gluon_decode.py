"""The GEMM of few rows in Gluon: with DeepGEMM's bits, on a GPU."""

import importlib
import random
from pathlib import Path

import pytest
import torch
from kernels_compiled import printed_by
from torch import Tensor

from jetrl_compile.kernels import ops
from jetrl_compile.kernels.triton_common import triton_missing

pytestmark = pytest.mark.skipif(
    triton_missing() is not None, reason="triton is not installed"
)
SHAPES = [
    (6144, 4096),
    (4096, 12288),
    (1216, 1536),
    (200, 2560),
    (3072, 768),
    (24576, 4096),  # more programs than multiprocessors, from here
    (12288, 12288),
    (40000, 1024),
    (16384, 32768),
]


def operands(m: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(m + n + k)

    def random(rows: int) -> Tensor:
        x = torch.randn(rows, k, generator=generator, device="cuda")
        return x.to(torch.bfloat16)

    a = ops.quantize(random(m), 1, 128, False, "fp32", 1e-10, None)
    return (*a, *ops.quantize(random(n), 128, 128, False, "fp32", 1e-10, None))


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_bits_are_those_of_deep_gemm(n: int, k: int) -> None:
    from jetrl_compile.kernels import gluon_decode, provider_deep_gemm

    for m in (1, 2, 7, 8, 9, 16):
        given = operands(m, n, k)
        a, a_scales, b, b_scales = given
        got = gluon_decode.gemm(*given)
        want = torch.empty_like(got)
        rest = ((1, 128, 128), "nk")
        provider_deep_gemm._fp8_gemm_nt(a, a_scales, b, b_scales, want, None, *rest)
        assert torch.equal(got, want), (m, n, k)
        assert torch.equal(gluon_decode.gemm(*given), got)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_any_sizes_and_values(seed: int) -> None:
    """Bits are DeepGEMM's for sizes at random, and values of all magnitudes."""
    from jetrl_compile.kernels import gluon_decode, provider_deep_gemm

    rng = random.Random(seed)
    m, n, k = rng.randint(1, 16), 8 * rng.randint(1, 700), 256 * rng.randint(1, 30)
    print(f"seed {seed}: {m}x{n}x{k}")
    a, a_scales, b, b_scales = operands(m, n, k)
    codes = torch.randint(0, 256, b.shape, device="cuda", dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # no NaN: its bits may be any
    b = codes.view(torch.float8_e4m3fn)
    b_scales = b_scales * torch.logspace(-8, 3, b_scales.numel(), device="cuda").view(
        b_scales.shape
    )
    got = gluon_decode.gemm(a, a_scales, b, b_scales)
    want = torch.empty_like(got)
    rest = ((1, 128, 128), "nk")
    provider_deep_gemm._fp8_gemm_nt(a, a_scales, b, b_scales, want, None, *rest)
    assert torch.equal(got, want)


@pytest.mark.gpu
def test_the_provider_takes_it_and_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has the same bits in a batch of 16 and in one of 40, for DeepGEMM."""
    from jetrl_compile.kernels import gluon_decode, launch_plans

    launch_plans.forget_plans()
    calls: list[int] = []
    run = gluon_decode.gemm

    def counted(a: Tensor, *rest: Tensor) -> Tensor:
        calls.append(a.shape[0])
        return run(a, *rest)

    monkeypatch.setattr(gluon_decode, "gemm", counted)
    a, a_scales, b, b_scales = operands(40, 6144, 4096)
    rest = (b, b_scales, 1, 128, 128, 128, torch.bfloat16, "deep_gemm")
    whole = ops.gemm(a, a_scales, *rest)
    assert not calls
    for m in (1, 3, 8, 16, 3, 1):  # the second time from what was recorded
        scales = a_scales[:m].t().contiguous().t()
        assert torch.equal(ops.gemm(a[:m], scales, *rest), whole[:m]), m
    assert calls == [1, 3, 8, 16]


def test_it_compiles_for_hopper() -> None:
    """It waits before it reads, uses the tensor cores, and spills no register."""
    from jetrl_compile.kernels.provider_deep_gemm import _has_gluon

    if not _has_gluon():
        pytest.skip("this Triton's Gluon is another one")
    kernels = printed_by(Path(__file__).parent / "compile_decode.py")
    assert [rows for rows, _, _ in kernels] == [8] * 4 + [16] * 4
    for _, local, instructions in kernels:
        assert local == 0
        assert instructions == [
            "griddepcontrol.wait",
            "griddepcontrol.launch_dependents",
            "cp.async.cg",
            "ld.global",
            "wgmma.mma_async",
            "cp.async.cg",
            "st.global",
        ]


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("groups", [2, 6, 12, 20, 32, 96, 148, 256])
@pytest.mark.parametrize("programs", [1, 64, 96, 132, 133, 384, 3000])
def test_chunks_fit_into_shared_memory(rows: int, groups: int, programs: int) -> None:
    from jetrl_compile.kernels.gluon_decode import chunks_of

    chunks, chunk = chunks_of(rows, groups, programs, 132)
    scales = 4 * rows * (1 << (groups - 1).bit_length())
    used = chunks * chunk * 128 * (64 + rows) + scales
    assert chunks >= 2
    assert groups % chunk == 0
    assert used <= 227 * 1024


def test_which_gemms_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from jetrl_compile.kernels import provider_deep_gemm as provider

    monkeypatch.setattr(provider, "_has_gluon", lambda: True)
    assert all(provider.decodes(m, 8, 256) for m in range(1, 17))
    for m, n, k in ((17, 8, 256), (0, 8, 256), (8, 0, 256), (8, 8, 0), (8, 8, 384)):
        assert not provider.decodes(m, n, k)
    assert provider.decodes(8, 8, 2**15)
    assert not provider.decodes(8, 8, 2**15 + 256)
    monkeypatch.setattr(provider, "_has_gluon", lambda: False)
    assert not provider.decodes(8, 8, 256)


@pytest.mark.parametrize(
    ("version", "known"),
    [("3.6.0", True), ("3.6.1+git1", True), ("3.5.9", False), ("3.7.0", False)],
)
def test_other_tritons_leave_it_to_deep_gemm(
    version: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jetrl_compile.kernels import provider_deep_gemm as provider

    monkeypatch.setattr(importlib.import_module("triton"), "__version__", version)
    provider._has_gluon.cache_clear()
    try:
        assert provider._has_gluon() is known
    finally:
        provider._has_gluon.cache_clear()
