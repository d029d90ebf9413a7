"""What each provider accepts, and the Triton kernel's logic, without a GPU."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl_compile import formats
from jetrl_compile.errors import ProviderError
from jetrl_compile.kernels import (
    dispatch,
    provider_deep_gemm,
    triton_common,
)
from jetrl_compile.kernels.deep_gemm_cache import add_token_counts, token_counts
from jetrl_compile.kernels.dispatch import GemmShape, MeasuredClass, Provider, select
from jetrl_compile.kernels.layouts import empty_quantized, in_order
from jetrl_compile.kernels.provider_deep_gemm import DEEP_GEMM, compiled_dims
from jetrl_compile.kernels.provider_scaled_mm import SCALED_MM
from jetrl_compile.kernels.provider_triton import TRITON
from jetrl_compile.kernels.reference import gemm as reference_gemm
from jetrl_compile.kernels.reference import quantize
from jetrl_compile.kernels.triton_common import interpreted, triton_missing

BF16, FP32 = torch.bfloat16, torch.float32
FPROP = GemmShape(
    "fprop", 1024, 576, formats.groups("K"), formats.blocks("K"), device_type="cuda"
)
DGRAD = replace(FPROP, role="dgrad", a=formats.groups("N"), b=formats.blocks("N"))
WGRAD = replace(FPROP, role="wgrad", a=formats.groups("M"), b=formats.blocks("M"))
PAPER = replace(WGRAD, b=formats.groups("M"))
needs_interpreter = pytest.mark.skipif(
    triton_missing() is not None or not interpreted(),
    reason="needs triton and TRITON_INTERPRET=1",
)


@pytest.mark.parametrize("provider", [DEEP_GEMM, SCALED_MM, TRITON])
@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (replace(FPROP, a=formats.Flow("bf16")), "an operand is not quantized"),
        (replace(FPROP, a=replace(FPROP.a, dtype="e5m2")), "operands are e5m2 and"),
        (replace(FPROP, a=formats.blocks("K")), "regions are 128x128 by 128x128, not"),
        (replace(FPROP, out_dtype="fp64"), "it gives bf16.*, not fp64"),
    ],
)
def test_none_accepts(provider: Provider, shape: GemmShape, why: str) -> None:
    assert re.search(why, provider.rejects(shape) or "")


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (FPROP, None),
        (DGRAD, None),
        (WGRAD, None),
        (replace(WGRAD, out_dtype="fp32"), None),
        (PAPER, None),
        (replace(PAPER, out_dtype="fp32", m=7), None),
        (replace(FPROP, n=151936), None),
        (replace(FPROP, n=-1), None),
        (replace(FPROP, n=196), "196 rows of b are no multiple of 8"),
        (replace(DGRAD, k=100), "100 rows of b are no multiple of 8"),
        (replace(DGRAD, n=100), None),
        (replace(FPROP, out_dtype="fp32"), "the number of its rows is not known"),
        (replace(PAPER, n=32), "32 rows of a are fewer than 33"),
        (replace(FPROP, device_type="cpu"), "it runs on cuda, not on cpu"),
    ],
)
def test_deep_gemm_accepts(shape: GemmShape, why: str | None) -> None:
    assert_reason(DEEP_GEMM.rejects(shape), why)


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (FPROP, None),
        (DGRAD, None),
        (replace(FPROP, n=151936), None),
        (replace(FPROP, n=200), "200 rows of b are no multiple of 16"),
        (replace(FPROP, k=584), "584 of contraction are no multiple of 16"),
        (replace(FPROP, k=-1), "the number of contraction is not known"),
        (WGRAD, "tokens, which wgrad adds over"),
        (PAPER, "regions are 1x128 by 1x128, not 1x128 by 128x128"),
        (replace(FPROP, out_dtype="fp32"), "it gives bf16, not fp32"),
    ],
)
def test_scaled_mm_accepts(shape: GemmShape, why: str | None) -> None:
    assert_reason(SCALED_MM.rejects(shape), why)


def test_triton_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in (FPROP, DGRAD, WGRAD, PAPER, replace(FPROP, n=7, k=3)):
        for out_dtype in ("bf16", "fp32"):
            assert TRITON.rejects(replace(shape, out_dtype=out_dtype)) is None
    on_cpu = replace(FPROP, device_type="cpu")
    for interpreting, why in ((False, "it runs on cuda, not on cpu"), (True, None)):
        monkeypatch.setattr(triton_common, "interpreted", lambda on=interpreting: on)
        assert TRITON.rejects(on_cpu) == why


def assert_reason(reason: str | None, why: str | None) -> None:
    assert reason is None if why is None else why in (reason or "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nothing_of_a_gpu_is_usable_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_common, "interpreted", lambda: False)
    reasons = {p.name: p.usable() for p in (DEEP_GEMM, SCALED_MM, TRITON)}
    assert all(reasons.values())
    assert "no GPU" in (reasons["scaled_mm"] or "")
    assert select(FPROP).provider is dispatch.REFERENCE
    reason = select(FPROP).reason
    assert all(f"{name}: {why}" in reason for name, why in reasons.items())


def test_order_by_device() -> None:
    assert dispatch.default_providers("cpu") == ("reference",)
    assert dispatch.default_providers("meta") == ("reference",)
    order = dispatch.default_providers("cuda")
    assert order == ("deep_gemm", "scaled_mm", "triton", "reference")
    assert set(order) == set(dispatch.PROVIDERS)


def usable(monkeypatch: pytest.MonkeyPatch, *providers: Provider) -> None:
    for provider in providers:
        ready = replace(provider, usable=lambda: None)
        monkeypatch.setitem(dispatch._REGISTRY, provider.name, ready)


def test_next_provider_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    usable(monkeypatch, DEEP_GEMM, SCALED_MM, TRITON)
    assert select(FPROP).provider.name == "deep_gemm"
    choice = select(replace(FPROP, n=196))
    assert choice.provider.name == "triton"
    assert [name for name, _ in choice.passed_over] == ["deep_gemm", "scaled_mm"]
    assert select(replace(FPROP, device_type="cpu")).provider.name == "reference"


def test_measured_class(monkeypatch: pytest.MonkeyPatch) -> None:
    usable(monkeypatch, DEEP_GEMM, SCALED_MM, TRITON)
    order = ("scaled_mm", "deep_gemm", "triton", "reference")
    decode = MeasuredClass("decode", ("fprop",), (1, 16), order, "H200, a date")
    monkeypatch.setattr(dispatch, "MEASURED", (decode,))
    choice = select(replace(FPROP, m=16))
    assert choice.provider.name == "scaled_mm"
    assert choice.reason == "decode: H200, a date"
    for other in (FPROP, replace(FPROP, m=17), replace(DGRAD, m=1)):
        assert select(other).provider.name == "deep_gemm"
        assert select(other).reason == "first choice"
    assert select(replace(FPROP, m=1), ("deep_gemm",)).measured is None


def test_measured_classes_change_no_bits() -> None:
    for known in dispatch.MEASURED:
        default = dispatch.default_providers(known.device_type)
        assert set(known.order) == set(default)
        for old, new in zip(default, known.order, strict=True):
            assert (
                dispatch.get_provider(old).numerics
                == dispatch.get_provider(new).numerics
            )


def operands(
    m: int, n: int, k: int, b_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + n + k)
    a = torch.randn(m, k, generator=generator)
    b = torch.randn(n, k, generator=generator)
    return (
        *in_order(*quantize(a, 1, 128, False, "fp32", 1e-10), 1),
        *in_order(*quantize(b, b_rows, 128, False, "fp32", 1e-10), b_rows),
    )


@needs_interpreter
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 1), (3, 200, 130), (65, 129, 256), (70, 64, 300), (130, 140, 128)],
)
@pytest.mark.parametrize("b_rows", [1, 128])
@pytest.mark.parametrize("out_dtype", [BF16, FP32])
def test_triton_kernel(
    m: int, n: int, k: int, b_rows: int, out_dtype: torch.dtype
) -> None:
    """The interpreter multiplies in FP32, so no more than FP32's rounding is lost.

    With u = 2^-24 and S = sum |a b|: a group's 128 products and sums, the product of
    scales, and one product and sum a group: (131 + groups) u S; then the result's
    rounding, which for BF16 the interpreter does by truncation: 2^-7. One more u S
    covers second-order terms.
    """
    x = operands(m, n, k, b_rows)
    regions = (1, 128, b_rows, 128)
    got = TRITON.gemm(*x, *regions, out_dtype)
    exact = reference_gemm(*x, *regions, torch.float64)
    absolute = (x[0].float().abs().to(x[0].dtype), x[2].float().abs().to(x[2].dtype))
    size = reference_gemm(absolute[0], x[1], absolute[1], x[3], *regions, torch.float64)
    assert got.dtype is out_dtype
    rounding = 2.0**-24 if out_dtype is FP32 else 2.0**-7
    bound = (132 + x[1].shape[1]) * 2.0**-24 * size
    assert (
        (got.double() - exact).abs() <= bound + rounding * (exact.abs() + bound)
    ).all()


@needs_interpreter
def test_triton_takes_any_strides() -> None:
    x = operands(70, 130, 300, 128)
    want = TRITON.gemm(*x, 1, 128, 128, 128, BF16)
    turned = [t.t().contiguous().t() for t in x]
    assert torch.equal(TRITON.gemm(*turned, 1, 128, 128, 128, BF16), want)


@pytest.mark.parametrize("gemm", [DEEP_GEMM.gemm, SCALED_MM.gemm])
@pytest.mark.parametrize(("m", "n", "k"), [(0, 16, 128), (8, 0, 128), (8, 16, 0)])
def test_empty(gemm: Any, m: int, n: int, k: int) -> None:
    device = torch.device("cpu")
    a = empty_quantized((m, k), 1, 128, device)
    b = empty_quantized((n, k), 128, 128, device)
    out = gemm(*a, *b, 1, 128, 128, 128, BF16)
    assert torch.equal(out, torch.zeros(m, n, dtype=BF16))


def test_deep_gemm_refuses_what_it_would_crash_on() -> None:
    x = operands(5, 12, 128, 128)
    with pytest.raises(ProviderError, match="12 rows of b are no multiple of 8"):
        DEEP_GEMM.gemm(*x, 1, 128, 128, 128, BF16)
    x = operands(32, 12, 128, 1)
    with pytest.raises(ProviderError, match="32 rows of a are fewer than 33"):
        DEEP_GEMM.gemm(*x, 1, 128, 1, 128, BF16)
    with pytest.raises(ProviderError, match="regions of 1x128 by 64x128"):
        DEEP_GEMM.gemm(*x, 1, 128, 64, 128, BF16)


def test_deep_gemm_compiles_no_number_of_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))
    token_counts.cache_clear()
    device = torch.device("cpu")
    for k in (100, 128, 4096):
        straight, _ = empty_quantized((40, k), 1, 128, device)
        over_tokens, _ = empty_quantized((40, k), 1, 128, device, True)
        assert compiled_dims(straight) == compiled_dims(straight.contiguous()) == "nk"
        assert compiled_dims(over_tokens) == "n"
    add_token_counts([4096, 8192])
    assert compiled_dims(over_tokens) == "nk"
    assert token_counts() == {4096, 8192}
    (tmp_path / "jetrl_token_counts.json").write_text("{")
    token_counts.cache_clear()
    with pytest.raises(ProviderError, match=r"cannot be read.*delete it"):
        token_counts()
    token_counts.cache_clear()


class _FakeDeepGemm:
    """Checks what DeepGEMM would be given, and multiplies with the reference."""

    def fp8_gemm_nt(
        self,
        a: tuple[Tensor, Tensor],
        b: tuple[Tensor, Tensor],
        d: Tensor,
        c: Tensor | None,
        recipe: tuple[int, int, int],
        compiled_dims: str,
        disable_ue8m0_cast: bool,
    ) -> None:
        for codes, scales, rows in ((*a, 1), (*b, recipe[1])):
            assert codes.data_ptr() % 16 == scales.data_ptr() % 16 == 0
            assert codes.stride(0) % 16 == 0
            assert codes.stride(1) == 1
            if recipe[1] == 1:
                assert codes.stride(0) == codes.shape[1]
            if rows == 1:
                assert scales.stride() == (1, -(-codes.shape[0] // 4) * 4)
            else:
                assert scales.is_contiguous()
        assert (c is None) == (d.dtype is BF16)
        assert d.stride(0) * d.element_size() % 16 == 0
        assert c is None or (c is d and not d.any())
        assert compiled_dims == "nk"
        assert disable_ue8m0_cast
        d.copy_(reference_gemm(*a, *b, 1, 128, recipe[1], 128, d.dtype))


@pytest.mark.parametrize(
    ("m", "n", "k", "b_rows", "out_dtype"),
    [
        (5, 16, 100, 128, BF16),
        (40, 130, 100, 1, BF16),
        (40, 131, 128, 1, FP32),
        (40, 136, 300, 128, FP32),
        (1, 8, 16, 128, BF16),
    ],
)
def test_deep_gemm_gets_its_memory_order(
    monkeypatch: pytest.MonkeyPatch,
    m: int,
    n: int,
    k: int,
    b_rows: int,
    out_dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(provider_deep_gemm, "library", _FakeDeepGemm)
    x = operands(m, n, k, b_rows)
    want = reference_gemm(*x, 1, 128, b_rows, 128, FP32).to(out_dtype)
    shifted = [torch.cat([t[:1], t])[1:] for t in x]
    turned = [t.t().contiguous().t() for t in x]
    for given in (list(x), shifted, turned):
        got = DEEP_GEMM.gemm(*given, 1, 128, b_rows, 128, out_dtype)
        assert got.is_contiguous()
        assert torch.equal(got, want)
