"""The operators of exact mode: their kernels, gradients, and rows in any batch."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from jetrl_compile.errors import PrecisionFlowError, ProviderError
from jetrl_compile.kernels import (
    exact_kernels,
    exact_ops,
    launch_plans,
    reference_exact,
    triton_common,
)

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
GEMM = "deep_gemm" if ON_GPU else "reference"
NEEDS_TRITON = pytest.mark.skipif(
    triton_common.triton_missing() is not None, reason="triton is not installed"
)
QUIET = pytest.mark.filterwarnings("ignore::RuntimeWarning")
HIDDEN = 4096 if ON_GPU else 576
ROWS = (1, 2, 7, 33, 64)
# On a GPU these are tests of its kernels.
pytestmark = [pytest.mark.gpu] if ON_GPU else []


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(shape, generator=generator, device=DEVICE)
    return x.mul_(std).bfloat16()


def subsets(total: int) -> list[Tensor]:
    """Rows of a batch as batches of their own: slices, and scattered ones."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for rows in ROWS:
        start = int(torch.randint(total - rows + 1, (1,), generator=generator))
        found.append(torch.arange(start, start + rows))
        found.append(torch.randperm(total, generator=generator)[:rows])
    return [index.to(DEVICE) for index in found]


@pytest.mark.parametrize("cols", [64, 128, HIDDEN])
def test_rms_norm_of_a_row_is_the_same_in_every_batch(cols: int) -> None:
    x, weight = normal(100, cols), normal(cols, seed=1)
    y, rstd = exact_ops.rms_norm(x, weight, 1e-6, None)
    for index in subsets(100):
        part, factor = exact_ops.rms_norm(x[index], weight, 1e-6, None)
        assert torch.equal(part, y[index])
        assert torch.equal(factor, rstd[index])


def test_silu_mul_of_a_row_is_the_same_in_every_batch() -> None:
    both = normal(100, 2 * HIDDEN, std=4.0)
    gate, up = both.chunk(2, -1)
    y = exact_ops.silu_mul(gate, up)
    for index in subsets(100):
        assert torch.equal(exact_ops.silu_mul(gate[index], up[index]), y[index])


def test_rope_of_a_row_is_the_same_in_every_batch() -> None:
    x = normal(1, 100, 4, 64).transpose(1, 2)
    cos, sin = normal(1, 1, 100, 64, seed=1), normal(1, 1, 100, 64, seed=2)
    y = exact_ops.rope(x, cos, sin)
    assert y.stride() == x.stride()
    assert torch.equal(y, reference_exact.rope(x, cos, sin))
    for index in subsets(100):
        tokens = x.transpose(1, 2)[0, index]  # (tokens, heads, size), as vLLM has it
        table = cos[0, 0, index].unsqueeze(1), sin[0, 0, index].unsqueeze(1)
        part = exact_ops.rope(tokens, *table)
        assert torch.equal(part.transpose(0, 1), y[0, :, index])


def test_bf16_gemm_of_a_row_is_the_same_in_every_batch() -> None:
    x, w = normal(100, HIDDEN), normal(256, HIDDEN, seed=1)
    y = exact_ops.bf16_gemm(x, w, GEMM)
    for index in subsets(100):
        assert torch.equal(exact_ops.bf16_gemm(x[index], w, GEMM), y[index])


@pytest.mark.parametrize("vocabulary", [1, 4, 250, 1001])
def test_bf16_gemm_of_any_vocabulary(vocabulary: int) -> None:
    x, w = normal(7, HIDDEN), normal(1008, HIDDEN, seed=1)
    y = exact_ops.bf16_gemm(x, w[:vocabulary], GEMM)
    assert y.is_contiguous()
    assert torch.equal(y, exact_ops.bf16_gemm(x, w, GEMM)[:, :vocabulary])


class FakeDeepGemm:
    """Checks what DeepGEMM would be given, and multiplies with the reference."""

    @staticmethod
    def bf16_gemm_nt(x: Tensor, w: Tensor, out: Tensor) -> None:
        assert x.is_contiguous()
        assert w.is_contiguous()
        assert out.stride(1) == 1
        assert out.stride(0) % 8 == 0
        out[:] = reference_exact.bf16_gemm(x, w)


@pytest.mark.skipif(ON_GPU, reason="DeepGEMM itself runs")
@pytest.mark.parametrize("k", [0, 8, 64])
@pytest.mark.parametrize("n", [0, 1, 8, 13])
@pytest.mark.parametrize("m", [0, 1, 7])
def test_bf16_gemm_gives_deep_gemm_what_it_reads(
    m: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact_kernels, "library", lambda: FakeDeepGemm)
    monkeypatch.setattr(launch_plans, "_device", lambda tensors: 0)
    launch_plans.forget_plans()
    for seed in range(3):  # recorded where nothing is copied, then repeated
        x, w = normal(m, 2 * k, seed=seed)[:, :k], normal(k, n, seed=seed).t()
        y = exact_ops.bf16_gemm(x.contiguous(), w.contiguous(), "deep_gemm")
        assert y.is_contiguous()
        assert torch.equal(y, reference_exact.bf16_gemm(x, w))
        assert torch.equal(y, exact_ops.bf16_gemm(x, w, "deep_gemm"))
    launch_plans.forget_plans()


def test_bf16_gemm_of_a_hidden_size_that_deep_gemm_does_not_read() -> None:
    with pytest.raises(ProviderError, match="4x4x12; it reads rows of multiples of 8"):
        exact_ops.bf16_gemm(normal(4, 12), normal(4, 12), "deep_gemm")


@pytest.mark.parametrize("vocabulary", [1000, 49152])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kernel", ["aten", "blocks"])
def test_log_probs_of_a_row_are_the_same_in_every_batch(
    vocabulary: int, temperature: float, kernel: str
) -> None:
    logits = normal(100, vocabulary, std=3.0)
    labels = torch.arange(100, device=DEVICE) * 9 % vocabulary
    scores = exact_ops.log_probs(logits, labels, temperature, kernel)
    divisor = torch.full((100, 1), temperature, device=DEVICE)
    sampler = logits.float().div_(divisor).log_softmax(-1, dtype=torch.float32)
    sampler = sampler.gather(1, labels[:, None])[:, 0]
    assert torch.allclose(scores, sampler, atol=1e-5)
    assert kernel == "blocks" or torch.equal(scores, sampler)
    for index in subsets(100):
        part = exact_ops.log_probs(logits[index], labels[index], temperature, kernel)
        assert torch.equal(part, scores[index])


def kernels() -> Any:
    from jetrl_compile.kernels import triton_exact

    return triton_exact


@NEEDS_TRITON
@QUIET
@pytest.mark.parametrize("cols", [8, 64, 100, 128, 320, 576])
def test_norm_kernels_compute_the_reference(cols: int) -> None:
    x, weight = normal(2, 3, 5, cols).transpose(1, 2), normal(cols, seed=1)
    y, rstd = kernels().rms_norm(x, weight, 1e-5)
    wanted, factor = reference_exact.rms_norm(x, weight, 1e-5)
    assert torch.allclose(rstd, factor, rtol=1e-6)
    assert ((y - wanted).abs() <= 2**-7 * wanted.abs()).all()
    assert (y != wanted).float().mean() < 0.01


@NEEDS_TRITON
@QUIET
@pytest.mark.parametrize("size", [8, 64, 96])
def test_rope_kernel_is_the_reference(size: int) -> None:
    x = normal(2, 5, 3, size).transpose(1, 2)
    cos, sin = normal(2, 1, 5, size, seed=1), normal(2, 1, 5, size, seed=2)
    got = kernels().rope(x, cos, sin)
    assert torch.equal(got, reference_exact.rope(x, cos, sin))
    tokens, table = x[0].transpose(0, 1), (cos[0, 0, :, None], sin[0, 0, :, None])
    assert torch.equal(
        kernels().rope(tokens, *table), reference_exact.rope(tokens, *table)
    )


@NEEDS_TRITON
@QUIET
@pytest.mark.parametrize(
    "x",
    [
        normal(3, 8, 5).transpose(1, 2),
        normal(8, 5).t(),
        normal(2, 3, 4, 5, 2, 8).permute(3, 1, 0, 2, 4, 5),
        normal(2, 16)[:, ::2],
        normal(1, 1, 8).expand(3, 5, 8),
    ],
    ids=lambda x: str(x.stride()),
)
def test_rope_kernel_with_any_strides(x: Tensor) -> None:
    cos, sin = normal(8, seed=1), normal(8, seed=2)
    got = kernels().rope(x, cos, sin)
    assert torch.equal(got, reference_exact.rope(x, cos, sin))
    assert got.stride() == torch.empty_like(x).stride()


@NEEDS_TRITON
@QUIET
def test_silu_kernel_computes_the_reference() -> None:
    gate, up = normal(6, 2 * 320, std=4.0).chunk(2, -1)
    y, wanted = kernels().silu_mul(gate, up), reference_exact.silu_mul(gate, up)
    assert ((y - wanted).abs() <= 2**-6 * wanted.abs()).all()
    assert (y != wanted).float().mean() < 0.01


@NEEDS_TRITON
@QUIET
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_kernel_computes_the_reference(temperature: float) -> None:
    logits, labels = normal(5, 2500, std=3.0), torch.arange(5, device=DEVICE) * 600
    got = kernels().log_probs(logits, labels, temperature)
    wanted = reference_exact.log_softmax(logits, temperature)
    assert torch.allclose(got, wanted.gather(1, labels[:, None])[:, 0], atol=1e-5)


def gradients(run: Any, *inputs: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = run(*leaves)
    dy = normal(*y.shape, seed=9).to(y.dtype)
    found: list[Tensor] = list(torch.autograd.grad(y, leaves, dy))
    return found


def check_gradients(op: Any, plain: Any, *inputs: Tensor) -> None:
    """Against autograd of the formula in FP64; BF16 rounds each step."""
    got = gradients(op, *inputs)
    wanted = gradients(plain, *(x.double() for x in inputs))
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.dtype is torch.bfloat16
        assert (mine.double() - theirs).norm() < 2e-2 * theirs.norm()


def test_gradients() -> None:
    x, weight = normal(3, 9, 64), normal(64, seed=1)

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    check_gradients(
        lambda a, b: exact_ops.rms_norm(a, b, 1e-6, None)[0], norm, x, weight
    )
    up = normal(3, 9, 64, seed=2)
    check_gradients(
        exact_ops.silu_mul, lambda a, b: torch.nn.functional.silu(a) * b, x, up
    )
    table = normal(9, 64, seed=3), normal(9, 64, seed=4)
    wide = [t.double() for t in table]
    check_gradients(
        lambda a: exact_ops.rope(a, *table),
        lambda a: reference_exact.rope(a, *wide),
        x,
    )
    check_gradients(
        lambda a, b: exact_ops.bf16_gemm(a, b, GEMM),
        lambda a, b: a @ b.t(),
        x[0],
        normal(128, 64, seed=5),
    )
    labels = torch.arange(9, device=DEVICE)
    check_gradients(
        lambda a: exact_ops.log_probs(a, labels, 0.7, "aten"),
        lambda a: (a / 0.7).log_softmax(-1).gather(1, labels[:, None])[:, 0],
        x[0],
    )


def test_registration() -> None:
    x, w = normal(4, 64), normal(64, seed=1)
    cases: list[tuple[Any, tuple[Any, ...]]] = [
        (exact_ops.rms_norm, (x, w, 1e-6, None)),
        (exact_ops.silu_mul, (x, x)),
        (exact_ops.rope, (x, x, x)),
        (exact_ops.bf16_gemm, (x, x, GEMM)),
        (exact_ops.log_probs, (x, torch.arange(4, device=DEVICE), 1.0, "aten")),
    ]
    for op, args in cases:
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


def test_what_is_refused() -> None:
    x = normal(4, 64)
    with pytest.raises(PrecisionFlowError, match="exact mode needs BF16"):
        exact_ops.rms_norm(x.float(), x[0], 1e-6, None)
    with pytest.raises(PrecisionFlowError, match="last dimensions need to be equal"):
        exact_ops.bf16_gemm(x, x[:, :32], GEMM)
    with pytest.raises(PrecisionFlowError, match="temperature 0; it needs to be above"):
        exact_ops.log_probs(x, x[:, 0].long(), 0.0, "aten")
    with pytest.raises(PrecisionFlowError, match="log_probs got the kernel 'x'"):
        exact_ops.log_probs(x, x[:, 0].long(), 1.0, "x")
    with pytest.raises(ProviderError, match="has no batch-invariant BF16 GEMM"):
        exact_ops.bf16_gemm(x, x, "scaled_mm")


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [576, 3584, 4096])
def test_norm_is_what_the_fused_kernel_quantizes(cols: int) -> None:
    from jetrl_compile.kernels import triton_norm

    x, weight = normal(300, cols), normal(cols, seed=1)
    y, rstd = exact_ops.rms_norm(x, weight, 1e-6, None)
    for scale_format in ("fp32", "ue8m0"):
        for residual in (None, torch.zeros_like(x)):
            for kept in (None, torch.empty_like(x)):
                flow = (1, 128, -1, 0, scale_format, 1e-10)
                made = triton_norm.rms_norm_quantize(
                    x, residual, weight, 1e-6, *flow, kept
                )
                assert kept is None or torch.equal(kept, y)
                assert torch.equal(made[4], rstd)


@pytest.mark.gpu
def test_silu_mul_is_what_the_fused_kernel_quantizes() -> None:
    from jetrl_compile.kernels import ops, quantizers

    gate, up = normal(300, 2 * 4096, std=4.0).chunk(2, -1)
    y = exact_ops.silu_mul(gate, up)
    fused = quantizers.silu_mul_quantize(gate, up, 1, 128, -1, 0, "fp32", 1e-10)
    codes, scales = ops.quantize(y, 1, 128, False, "fp32", 1e-10, None)
    assert torch.equal(fused[0].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(fused[1], scales)


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [1.0, -0.3125])
def test_silu_mul_of_every_gate_is_what_the_fused_kernel_quantizes(
    factor: float,
) -> None:
    from jetrl_compile.kernels import triton_silu

    bits = torch.arange(1 << 16, dtype=torch.int32, device=DEVICE).to(torch.int16)
    gate = bits.view(torch.bfloat16).view(512, 128)
    up = torch.full_like(gate, factor)
    kept = torch.empty_like(gate)
    flow = (1, 128, -1, 0, "fp32", 1e-10)
    triton_silu.silu_mul_quantize(gate, up, *flow, kept)
    own = exact_ops.silu_mul(gate, up)
    assert torch.equal(own.view(torch.int16), kept.view(torch.int16))


@pytest.mark.gpu
def test_log_probs_refuse_rows_that_begin_anywhere() -> None:
    logits = normal(4, 1001)
    with pytest.raises(PrecisionFlowError, match="needs a multiple of 4"):
        exact_ops.log_probs(logits, logits[:, 0].long(), 1.0, "aten")
