"""The ops as torch.compile, FakeTensorMode and careless callers see them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from jetrl_compile.errors import PrecisionFlowError, ProviderError
from jetrl_compile.kernels import ops
from jetrl_compile.kernels.layouts import code_strides, scale_strides

FLOOR = 1e-10
BF16, FP32 = torch.bfloat16, torch.float32
X = torch.randn(37, 320, generator=torch.Generator().manual_seed(0)).bfloat16()
W = torch.randn(192, 320, generator=torch.Generator().manual_seed(1)).bfloat16()
A, A_SCALES = ops.quantize(X, 1, 128, False, "fp32", FLOOR, None)
B, B_SCALES = ops.quantize(W, 128, 128, False, "fp32", FLOOR, None)
GEMM = (A, A_SCALES, B, B_SCALES, 1, 128, 128, 128, BF16, "reference")
CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (ops.quantize, (X, 1, 128, False, "fp32", FLOOR, None)),
    (ops.quantize, (X.float(), 1, 128, True, "ue8m0", FLOOR, W)),
    (ops.quantize, (X.t(), 128, 128, False, "fp32", FLOOR, None)),
    (ops.quantize, (X[:0], 128, 128, True, "fp32", FLOOR, None)),
    (ops.requantize, (A, A_SCALES, 1, 128, 1, 128, True, "fp32", FLOOR, None)),
    (ops.requantize, (B, B_SCALES, 128, 128, 128, 128, False, "ue8m0", FLOOR, None)),
    (ops.dequantize, (A, A_SCALES, 1, 128, BF16)),
    (ops.dequantize, (B, B_SCALES, 128, 128, FP32)),
    (ops.gemm, GEMM),
    (ops.gemm, (A[:0], A_SCALES[:0], *GEMM[2:])),
]


def raw(t: Tensor) -> Tensor:
    """Return the bytes, which torch can compare for E4M3 too."""
    return t.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def tensors(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def linear(x: Tensor, w: Tensor) -> Tensor:
    # Literals: with dynamic=True, Dynamo makes a global float symbolic at first.
    a, a_scales = ops.quantize(x, 1, 128, False, "fp32", 1e-10, None)
    b, b_scales = ops.quantize(w, 128, 128, False, "fp32", 1e-10, a)
    out: Tensor = ops.gemm(
        a, a_scales, b, b_scales, 1, 128, 128, 128, BF16, "reference"
    )
    return out


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    a, a_scales = ops.quantize(dy, 1, 128, True, "fp32", 1e-10, None)
    b, b_scales = ops.quantize(x, 128, 128, True, "fp32", 1e-10, None)
    out: Tensor = ops.gemm(
        a, a_scales, b, b_scales, 1, 128, 128, 128, BF16, "reference"
    )
    return out


@pytest.mark.parametrize(("op", "args"), CALLS)
def test_opcheck(op: Any, args: tuple[Any, ...]) -> None:
    tests = ["test_autograd_registration", "test_faketensor"]
    tests += ["test_aot_dispatch_dynamic"]
    if all(t.dtype != torch.float8_e4m3fn for t in args if isinstance(t, Tensor)):
        tests += ["test_schema"]  # its torch.allclose knows no E4M3: see the next test
    torch.library.opcheck(op, args, test_utils=tests)


@pytest.mark.parametrize(("op", "args"), CALLS)
def test_no_mutation_and_no_aliasing(op: Any, args: tuple[Any, ...]) -> None:
    given = [t for t in args if isinstance(t, Tensor)]
    before = [raw(t).clone() for t in given]
    results = tensors(op(*args))
    for t, bytes_before in zip(given, before, strict=True):
        assert torch.equal(raw(t), bytes_before)
    filled = [t for t in results if t.numel()]
    storages = {t.untyped_storage().data_ptr() for t in filled}
    assert len(storages) == len(filled)
    assert storages.isdisjoint(t.untyped_storage().data_ptr() for t in given)
    regions = [1] * len(results)
    if op is not ops.dequantize and op is not ops.gemm:
        regions[1] = args[{"quantize": 1, "requantize": 4}[op._opname]]
    for t, rows in zip(results, regions, strict=True):
        shape = (t.shape[0], t.shape[1])
        if t.dtype is torch.float8_e4m3fn:
            assert t.stride() == code_strides(*shape, any(a is True for a in args))
        elif len(results) == 2:
            assert t.stride() == scale_strides(shape, rows)
        else:
            assert t.is_contiguous()


@pytest.mark.parametrize(("op", "args"), CALLS)
def test_meta_agrees(op: Any, args: tuple[Any, ...]) -> None:
    meta = [t.to("meta") if isinstance(t, Tensor) else t for t in args]
    for real, fake in zip(tensors(op(*args)), tensors(op(*meta)), strict=True):
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
        assert fake.stride() == real.stride()


@pytest.mark.parametrize("name", ["quantize", "requantize", "dequantize", "gemm"])
def test_tags(name: str) -> None:
    op = getattr(ops, name)
    assert op is getattr(torch.ops.jetrl, name).default
    assert torch.Tag.needs_exact_strides in op.tags
    assert torch.Tag.pt2_compliant_tag in op.tags


def test_symbolic_rows_keep_their_symbol() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    rows_only: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(X, symbolic_context=rows_only)
    assert isinstance(x.shape[0], torch.SymInt)
    w = mode.from_tensor(W, static_shapes=True)
    with mode:
        out = linear(x, w)
        dw = weight_gradient(out, x)
    assert out.shape[0] == x.shape[0]
    assert dw.shape == (192, 320)
    assert mode.shape_env is not None
    assert not mode.shape_env.guards


# Inductor's own import of torch.utils.mkldnn warns (torch 2.11 to 2.13).
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_inductor_with_dynamic_rows_compiles_once() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(linear, backend=counter, fullgraph=True, dynamic=True)
    for m in (37, 5, 129, 2):
        x = X[:1].expand(m, -1) * torch.arange(m)[:, None]
        assert torch.equal(compiled(x, W), linear(x, W))
    assert counter.frame_count == 1
    assert torch.equal(compiled(X.t().contiguous().t(), W), linear(X, W))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_inductor_compiles_wgrad_again_for_one_group_of_tokens() -> None:
    # AOTAutograd asks whether the scales are contiguous, and for that whether their
    # ceil(M / 128) columns are one: M <= 128 and M > 128 are two graphs, no more.
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(
        weight_gradient, backend=counter, fullgraph=True, dynamic=True
    )
    for m in (300, 129, 1000, 128, 5, 256):
        x = X[:1].expand(m, -1) * torch.arange(m)[:, None]
        dy = x[:, :200] + 1
        assert torch.equal(compiled(dy, x), weight_gradient(dy, x))
    assert counter.frame_count == 2


def test_after_is_read_by_nobody() -> None:
    for after in (None, W, A, torch.tensor(float("nan"))):
        codes, scales = ops.quantize(X, 1, 128, False, "fp32", FLOOR, after)
        assert torch.equal(raw(codes), raw(A))
        assert torch.equal(scales, A_SCALES)
        again, _ = ops.requantize(
            A, A_SCALES, 1, 128, 1, 128, False, "fp32", 1e-9, after
        )
        assert torch.equal(raw(again), raw(A))


def test_source_dtype_is_checked() -> None:
    message = r"FP16.*needs BF16.*convert the model to BF16"
    with pytest.raises(PrecisionFlowError, match=message):
        ops.quantize(X.half(), 1, 128, False, "fp32", FLOOR, None)
    with pytest.raises(PrecisionFlowError, match=r"INT64.*cast it to BF16"):
        ops.quantize(X.long(), 1, 128, False, "fp32", FLOOR, None)
    with pytest.raises(PrecisionFlowError, match=message):
        ops.quantize(X.half().to("meta"), 1, 128, False, "fp32", FLOOR, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: X[0]}, "needs a matrix"),
        ({1: -1}, "regions of -1x128"),
        ({4: "fp8"}, "scale format 'fp8'; use one of fp32, ue8m0"),
        ({5: 0.0}, "amax floor 0; it needs at least"),
        ({5: float("nan")}, "amax floor nan"),
    ],
)
def test_quantize_rejects(change: dict[int, Any], message: str) -> None:
    args: list[Any] = [X, 1, 128, False, "fp32", FLOOR, None]
    for at, value in change.items():
        args[at] = value
    with pytest.raises(PrecisionFlowError, match=message):
        ops.quantize(*args)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: X}, "a of shape .* in bf16; it needs a matrix of e4m3 codes"),
        ({1: A_SCALES[:, :2]}, r"regions of 1x128 need fp32 scales of shape \(37, 3\)"),
        ({1: A_SCALES.double()}, "scales of shape .* in fp64 for a"),
        ({3: B_SCALES.t()}, r"b \(192, 320\); regions of 128x128 .* \(2, 3\)"),
        ({2: B[:, :300]}, "both need the same number of columns"),
        ({5: 64}, "every 64 for a and every 128 for b"),
        ({4: -1}, "regions of -1x128 for a"),
        ({8: torch.float16}, "result dtype fp16; use one of bf16, fp32, fp64"),
    ],
)
def test_gemm_rejects(change: dict[int, Any], message: str) -> None:
    args: list[Any] = list(GEMM)
    for at, value in change.items():
        args[at] = value
    with pytest.raises(PrecisionFlowError, match=message):
        ops.gemm(*args)
    meta = [t.to("meta") if isinstance(t, Tensor) else t for t in args]
    with pytest.raises(PrecisionFlowError, match=message):
        ops.gemm(*meta)


def test_gemm_rejects_regions_too_long_to_add_exactly() -> None:
    codes = torch.zeros(1, ops.MAX_COLS + 1).to(torch.float8_e4m3fn)
    one = torch.ones(1, 1)
    with pytest.raises(PrecisionFlowError, match="at most 131072 can be added exactly"):
        ops.gemm(codes, one, codes, one, 0, 0, 0, 0, BF16, "reference")


def test_gemm_rejects_unknown_provider() -> None:
    for device in ("cpu", "meta"):
        args = [t.to(device) if isinstance(t, Tensor) else t for t in GEMM[:-1]]
        with pytest.raises(ProviderError, match="did you mean 'reference'"):
            ops.gemm(*args, "referense")


def test_requantize_and_dequantize_reject_wrong_scales() -> None:
    with pytest.raises(PrecisionFlowError, match="requantize got scales of shape"):
        ops.requantize(A, B_SCALES, 1, 128, 1, 128, True, "fp32", FLOOR, None)
    with pytest.raises(PrecisionFlowError, match="dequantize got scales of shape"):
        ops.dequantize(A, B_SCALES, 1, 128, BF16)
    with pytest.raises(PrecisionFlowError, match="got the result dtype e4m3"):
        ops.dequantize(A, A_SCALES, 1, 128, torch.float8_e4m3fn)
