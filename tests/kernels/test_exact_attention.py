"""Attention of exact mode: a query has the same bits in every batch and chunk."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from jetrl_compile.errors import PrecisionFlowError, ProviderError
from jetrl_compile.kernels import attention_kernels, reference_exact, triton_common
from jetrl_compile.kernels.attention_ops import attention, attention_backward

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
KERNELS = [
    "reference",
    pytest.param(
        "triton",
        marks=pytest.mark.skipif(
            triton_common.triton_missing() is not None, reason="no triton"
        ),
    ),
    pytest.param("fa3", marks=pytest.mark.gpu),
]
LENGTH = 700 if ON_GPU else 90
PAGE = 16
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    *([pytest.mark.gpu] if ON_GPU else []),  # on a GPU: tests of its kernels
]


Triple = tuple[Tensor, Tensor, Tensor]


def qkv(
    batch: int,
    length: int,
    heads: int = 3,
    keys: int = 1,
    size: int = 64,
    seed: int = 0,
) -> Triple:
    """As Hugging Face's models make them: (B, H, L, D), a view of (B, L, H, D)."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def one(number: int) -> Tensor:
        shape = (batch, length, number, size)
        x = torch.randn(shape, generator=generator, device=DEVICE)
        return x.bfloat16().transpose(1, 2)

    return one(heads), one(keys), one(keys)


def size_of(kernel: str) -> int:
    return 128 if kernel == "fa3" else 64


def run(q: Tensor, k: Tensor, v: Tensor, kernel: str, **more: Any) -> Tensor:
    mask, positions = more.get("mask"), more.get("positions")
    out, _ = attention(q, k, v, mask, positions, q.shape[-1] ** -0.5, kernel)
    result: Tensor = out
    return result


@pytest.mark.parametrize("kernel", KERNELS)
def test_decode_and_chunks_equal_prefill(kernel: str) -> None:
    q, k, v = qkv(1, LENGTH, size=size_of(kernel))
    whole = run(q, k, v, kernel)
    for start, end in ((0, 1), (5, 6), (63, 65), (0, 40), (40, LENGTH)):
        part = run(q[:, :, start:end], k[:, :, :end], v[:, :, :end], kernel)
        assert torch.equal(part, whole[:, start:end]), (start, end)


@pytest.mark.parametrize("kernel", KERNELS)
def test_batches_padding_and_packing_change_nothing(kernel: str) -> None:
    lengths = [LENGTH, 1, 17, 64]
    alone = [qkv(1, n, size=size_of(kernel), seed=n) for n in lengths]
    wanted = [run(*x, kernel) for x in alone]
    mask = torch.zeros(len(lengths), LENGTH, dtype=torch.bool, device=DEVICE)
    padded = qkv(len(lengths), LENGTH, size=size_of(kernel), seed=99)
    for row, length in enumerate(lengths):
        mask[row, LENGTH - length :] = True
        for whole, own in zip(padded, alone[row], strict=True):
            whole[row, :, LENGTH - length :] = own[0]
    got = run(*padded, kernel, mask=mask)
    for row, length in enumerate(lengths):
        assert torch.equal(got[row, LENGTH - length :], wanted[row][0])
    q, k, v = (torch.cat([x[i] for x in alone], 2) for i in range(3))
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(DEVICE)
    got = run(q, k, v, kernel, positions=positions)
    assert torch.equal(got, torch.cat(wanted, 1))


@pytest.mark.parametrize("kernel", KERNELS[1:])
@pytest.mark.parametrize(("heads", "keys"), [(3, 1), (4, 4), (14, 2)])
def test_kernels_compute_the_reference(kernel: str, heads: int, keys: int) -> None:
    q, k, v = qkv(2, LENGTH, heads, keys, size_of(kernel))
    out, lse = attention(q, k, v, None, None, 0.1, kernel)
    wanted, wanted_lse = reference_exact.attention(q, k, v, None, None, 0.1)
    assert (out.double() - wanted.double()).norm() < 5e-3 * wanted.double().norm()
    assert torch.allclose(lse, wanted_lse, atol=1e-4)


@pytest.mark.skipif(triton_common.triton_missing() is not None, reason="no triton")
@pytest.mark.parametrize("size", [16, 64, 80])
@pytest.mark.parametrize("most_keys", [0, LENGTH])
def test_paged_decode_equals_packed_prefill(
    size: int, most_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jetrl_compile.kernels import triton_attention
    from jetrl_compile.kernels.triton_attention import paged_attention

    monkeypatch.setattr(triton_attention, "CHUNK", 128 if ON_GPU else 64)
    monkeypatch.setattr(triton_attention, "PROGRAMS", 100)

    lengths = [LENGTH, 5, 64]
    parts = [qkv(1, n, size=size, seed=n) for n in lengths]
    wanted = [run(*x, "triton")[0] for x in parts]
    pages = sum(-(-n // PAGE) for n in lengths)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
    cache = torch.randn(pages, 2, PAGE, 1, size, device=DEVICE).bfloat16()
    table = torch.zeros(len(lengths), -(-LENGTH // PAGE), dtype=torch.int32)
    used = 0
    for row, (n, (_, k, v)) in enumerate(zip(lengths, parts, strict=True)):
        own = order[used : used + -(-n // PAGE)]
        used += len(own)
        table[row, : len(own)] = own.int()
        for place in range(n):
            page = own[place // PAGE]
            cache[page, 0, place % PAGE] = k[0, :, place]
            cache[page, 1, place % PAGE] = v[0, :, place]
    key_cache, value_cache = cache.unbind(1)
    for counts in ([1, 1, 1], [LENGTH, 5, 64], [40, 1, 2]):
        q = torch.cat(
            [
                x[0][0, :, n - c :]
                for x, n, c in zip(parts, lengths, counts, strict=True)
            ],
            1,
        ).transpose(0, 1)
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()]).int()
        out = paged_attention(
            q,
            key_cache,
            value_cache,
            torch.empty_like(q, memory_format=torch.contiguous_format),
            starts.to(DEVICE),
            torch.tensor(lengths).int().to(DEVICE),
            table.to(DEVICE),
            max(counts),
            size**-0.5,
            most_keys,
        )
        ends = [w[n - c :] for w, n, c in zip(wanted, lengths, counts, strict=True)]
        assert torch.equal(out, torch.cat(ends))


@pytest.mark.parametrize("kernel", ["reference", *KERNELS[2:]])
def test_gradients(kernel: str) -> None:
    q, k, v = qkv(2, 40, size=size_of(kernel))
    mask = torch.ones(2, 40, dtype=torch.bool, device=DEVICE)
    mask[0, :7] = False
    leaves = tuple(x.detach().clone().requires_grad_() for x in (q, k, v))
    out = run(leaves[0], leaves[1], leaves[2], kernel, mask=mask)
    dy = torch.randn(out.shape, device=DEVICE).bfloat16() * mask[:, :, None, None]
    got = torch.autograd.grad(out, leaves, dy)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    allowed = reference_exact.attention_mask(40, 40, mask, None, q)[:, None]
    plain = torch.nn.functional.scaled_dot_product_attention(
        wide[0],
        wide[1],
        wide[2],
        attn_mask=allowed | ~mask[:, None, :, None],
        enable_gqa=True,
    )
    wanted = torch.autograd.grad(plain.transpose(1, 2), wide, dy.double())
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.dtype is torch.bfloat16
        assert (mine.double() - theirs).norm() < 1e-2 * theirs.norm()


@pytest.mark.parametrize("kernel", KERNELS[2:])
@pytest.mark.parametrize(("rows", "heads", "keys"), [(1, 3, 1), (3, 8, 2), (2, 4, 4)])
def test_gradients_by_cudnn_and_by_flash(
    kernel: str, rows: int, heads: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attention_kernels.has_cudnn_backward()
    leaves = qkv(rows, 333, heads, keys, size_of(kernel))
    wide = [x.double().requires_grad_() for x in leaves]
    for x in leaves:
        x.requires_grad_()
    out = run(*leaves, kernel)
    dy = torch.randn(out.shape, device=DEVICE).bfloat16()
    by_cudnn = torch.autograd.grad(out, leaves, dy)
    monkeypatch.setattr(attention_kernels, "has_cudnn_backward", lambda: False)
    by_flash = torch.autograd.grad(run(*leaves, kernel), leaves, dy)
    plain = torch.nn.functional.scaled_dot_product_attention(
        wide[0], wide[1], wide[2], is_causal=True, enable_gqa=True
    )
    wanted = torch.autograd.grad(plain.transpose(1, 2), wide, dy.double())
    for one, other, theirs in zip(by_cudnn, by_flash, wanted, strict=True):
        assert (one.double() - theirs).norm() < 1e-2 * theirs.norm()
        assert (other.double() - theirs).norm() < 1e-2 * theirs.norm()
        assert one.transpose(1, 2).is_contiguous()


def by_stride_order(x: Tensor) -> list[int]:
    """Strides of the dimensions that have more than one element."""
    strides = zip(x.shape, x.stride(), strict=True)
    return [stride for count, stride in strides if count != 1]


@pytest.mark.skipif(
    triton_common.triton_missing() is not None, reason="runs Triton's kernel"
)
def test_cudnn_gets_one_memory_order(monkeypatch: pytest.MonkeyPatch) -> None:
    # PyTorch finds cuDNN's graph by the strides of q, k and v alone.
    seen = []

    def backward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        seen.append([by_stride_order(x) for x in given[:-1]])
        return torch.empty_like(given[1]), given[2].clone(), given[3].clone()

    monkeypatch.setattr(attention_kernels, "has_cudnn_backward", lambda: True)
    monkeypatch.setattr(attention_kernels, "_cudnn_backward", backward)
    q, k, v = qkv(2, 5, 4, 2)
    wide = q.new_zeros(2, 4, 5, 65)
    wide[..., :64] = q
    for other in (q, q.contiguous(), wide[..., :64], q[:, :1].expand_as(q)):
        leaves = (other.detach().requires_grad_(), k, v)
        for out in (run(*leaves, "triton").sum(), run(*leaves, "triton")[0, 0].sum()):
            (dq,) = torch.autograd.grad(out, leaves[0])
            assert dq.shape == q.shape
    assert len(seen) == 8
    assert all(one == seen[0] for one in seen)


@pytest.mark.parametrize("kernel", KERNELS[1:])
def test_gradients_of_one_token(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # cuDNN has no kernel for them, and not everywhere one for larger heads.
    monkeypatch.setattr(attention_kernels, "has_cudnn_backward", lambda: True)
    fits = attention_kernels.fits_cudnn
    assert fits(2, 4, 2, 64)
    assert fits(1, 1, 8192, 128)
    assert not fits(2, 4, 1, 64)
    assert not fits(2, 4, 2, 256)
    assert not fits(2, 4, 2, 100)
    assert not fits(65536, 4, 2, 64)
    if not ON_GPU:
        return
    leaves = qkv(3, 1, 4, 2, size_of(kernel))
    for x in leaves:
        x.requires_grad_()
    dq, dk, dv = torch.autograd.grad(run(*leaves, kernel).sum(), leaves)
    assert torch.equal(dv, torch.full_like(dv, 2.0))
    assert dq.abs().max() < 0.05
    assert dk.abs().max() < 0.05


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 1, 1),
        (2, 4, 2, 5, 5),
        (1, 4, 4, 3, 7),
        (3, 2, 2, 0, 0),
        (2, 4, 2, 0, 5),
    ],
)
def test_traced_strides_are_those_that_come(
    kernel: str, shape: tuple[int, ...]
) -> None:
    rows, heads, groups, queries, keys = shape
    if kernel != "reference" and not (ON_GPU or not rows * queries):
        return
    size = size_of(kernel)

    def orders(number: int, length: int) -> list[Tensor]:
        x = torch.randn(rows, length, number, size, device=DEVICE).bfloat16()
        plain = x.transpose(1, 2)
        return [plain, plain.contiguous(), plain[:, :1].expand_as(plain)]

    for q in orders(heads, queries):
        for k in orders(groups, keys):
            inputs = (q, k, k.clone(), None, None, 0.125, kernel)
            results = attention(*inputs)
            dy = torch.randn(results[0].shape, device=DEVICE).bfloat16()
            args = (dy, *inputs[:3], *results, *inputs[3:])
            made = (*results, *attention_backward(*args))
            with FakeTensorMode() as mode:
                args = tuple(
                    mode.from_tensor(x) if isinstance(x, Tensor) else x for x in args
                )
                traced = (*attention(*args[1:4], *args[6:]), *attention_backward(*args))
            for one, other in zip(made, traced, strict=True):
                assert one.shape == other.shape
                assert by_stride_order(one) == by_stride_order(other)


@pytest.mark.gpu
def test_importing_flash_attention_keeps_cudnn() -> None:
    script = (
        "import torch; from jetrl_compile.kernels import attention_kernels as a\n"
        "a._fa3_library(); assert torch.backends.cuda.cudnn_sdp_enabled()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("rows", "queries", "keys"), [(1, 0, 0), (0, 3, 3), (2, 0, 5)])
def test_empty_batches(kernel: str, rows: int, queries: int, keys: int) -> None:
    size = size_of(kernel)
    q = torch.zeros(rows, 4, queries, size, dtype=torch.bfloat16, device=DEVICE)
    k = torch.zeros(rows, 2, keys, size, dtype=torch.bfloat16, device=DEVICE)
    leaves = [x.requires_grad_() for x in (q, k, k.clone())]
    out, lse = attention(*leaves, None, None, 0.125, kernel)
    assert out.shape == (rows, queries, 4, size)
    assert lse.shape == (rows, 4, queries)
    for x, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert torch.equal(grad, torch.zeros_like(x))


def test_registration() -> None:
    q, k, v = qkv(1, 8)
    args = (q, k, v, None, None, 0.1, "reference")
    torch.library.opcheck(
        attention, args, test_utils=("test_schema", "test_faketensor")
    )


def test_which_kernel() -> None:
    assert attention_kernels.attention_kernel("cpu", 128) == "reference"
    assert attention_kernels.attention_kernel("cuda", 64) == "triton"
    assert attention_kernels.attention_kernel("cuda", 128) == "fa3"
    attention_kernels.check_kernel("triton")


@pytest.mark.skipif(ON_GPU, reason="vLLM may be installed there")
def test_a_trainer_without_vllm_says_what_is_missing() -> None:
    message = "head size 128 runs FlashAttention 3: vllm is not installed"
    with pytest.raises(ProviderError, match=message):
        run(*qkv(1, 8, size=128), "fa3")


def test_what_is_refused() -> None:
    q, k, v = qkv(1, 8)
    with pytest.raises(PrecisionFlowError, match="exact mode needs"):
        run(q.float(), k, v, "reference")
    with pytest.raises(PrecisionFlowError, match="got the kernel 'sdpa'"):
        run(q, k, v, "sdpa")
    with pytest.raises(PrecisionFlowError, match="is longer than 256"):
        run(*qkv(1, 8, size=512), "triton")
