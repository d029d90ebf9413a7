"""The fused operators: values, memory order, fakes, symbolic sizes, errors."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from jetrl_compile.errors import PrecisionFlowError
from jetrl_compile.granularity import Granularity
from jetrl_compile.kernels import fused_ops, ops, reference, reference_fused
from jetrl_compile.kernels.layouts import code_strides, scale_strides

BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
FLOOR = 1e-10
END: tuple[Any, ...] = ("fp32", FLOOR)
GROUP, BLOCK, NONE = (1, 128), (128, 128), (-1, 0)


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(BF16)


def kept(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = ops.quantize(x, 1, 128, False, "fp32", FLOOR, None)
    return codes, scales


X = randn(3, 7, 192)
WIDE = randn(21, 512, seed=2)
GATE, UP = WIDE[:, :256], WIDE[:, 256:]  # the halves of a fused GEMM's result
DY = randn(21, 256, seed=3)
WEIGHT = randn(192, seed=4)
RSTD = torch.rand(3, 7, 1) + 0.5
TWO = [randn(37, 128), randn(37, 192, seed=1)]
BELOW = [randn(128, 192), randn(256, 192, seed=1), randn(40, 192, seed=2)]
CODES = (*kept(GATE), *kept(UP))
BACK = (*GROUP, *GROUP, *BLOCK, *END)
NORM, SCALE = fused_ops.rms_norm_quantize, fused_ops.scale_rows_quantize
GATED, GATED_BACK = fused_ops.silu_mul_quantize, fused_ops.silu_mul_backward_quantize
PARTS, TWICE = fused_ops.quantize_parts, fused_ops.quantize_twice
CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "parts below": (PARTS, (BELOW, 0, *BLOCK, False, *END, None)),
    "parts below, turned": (PARTS, (BELOW, 0, *BLOCK, True, *END, X)),
    "parts beside": (PARTS, (TWO, 1, *GROUP, False, "ue8m0", FLOOR, None)),
    "one part": (PARTS, (TWO[:1], 1, *GROUP, True, *END, None)),
    "parts of no rows": (PARTS, ([t[:0] for t in TWO], 1, *GROUP, True, *END, None)),
    "twice": (TWICE, (TWO, 1, *GROUP, *GROUP, *END)),
    "twice, blocks": (TWICE, ([TWO[0].t()], 0, *GROUP, *BLOCK, *END)),
    "once": (TWICE, (TWO, 1, *GROUP, *NONE, *END)),
    "norm": (NORM, (X, None, WEIGHT, 1e-6, None, *GROUP, *NONE, *END)),
    "norm of a sum": (NORM, (X, X.flip(0), WEIGHT, 1e-6, None, *GROUP, *BLOCK, *END)),
    "norm of one row": (
        NORM,
        (X[:1, :1], None, WEIGHT, 0.1, None, *GROUP, *GROUP, *END),
    ),
    "norm of no rows": (NORM, (X[:0], X[:0], WEIGHT, 0.1, None, *GROUP, *BLOCK, *END)),
    "eps as a tensor": (
        NORM,
        (
            X,
            None,
            WEIGHT,
            0.0,
            torch.tensor(1e-6, dtype=torch.float64),
            *GROUP,
            *NONE,
            *END,
        ),
    ),
    "scale": (SCALE, (X, RSTD, WEIGHT, *BLOCK, True, *END, X)),
    "scale, straight": (SCALE, (X[0], RSTD[0], WEIGHT, *GROUP, False, *END, None)),
    "gated": (GATED, (GATE, UP, *GROUP, *NONE, *END)),
    "gated, twice": (GATED, (X, X.flip(0), *GROUP, *BLOCK, *END)),
    "gated, no rows": (GATED, (DY[:0], DY[:0], *GROUP, *BLOCK, *END)),
    "gated backward": (GATED_BACK, (DY, GATE, UP, None, None, *BACK)),
    "gated backward of codes": (
        GATED_BACK,
        (DY.view(3, 7, 256), CODES[0], CODES[2], CODES[1], CODES[3], *BACK),
    ),
    "gated backward, one row": (
        GATED_BACK,
        (DY[:1], GATE[:1], UP[:1], None, None, *BACK),
    ),
}
names = pytest.mark.parametrize("name", list(CALLS))


def raw(t: Tensor) -> Tensor:
    """Return the bytes, which torch can compare for E4M3 too."""
    return t.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def tensors(value: Any) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]


def on_meta(args: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.to("meta"), args)


@names
def test_opcheck(name: str) -> None:
    op, args = CALLS[name]
    tests = ["test_autograd_registration", "test_faketensor"]
    tests += ["test_aot_dispatch_dynamic"]
    torch.library.opcheck(op, args, test_utils=tests)


@names
def test_no_mutation_and_no_aliasing(name: str) -> None:
    # What opcheck's test_schema checks; its torch.allclose knows no E4M3.
    op, args = CALLS[name]
    given = tensors(args)
    before = [raw(t).clone() for t in given]
    results = tensors(op(*args))
    for t, bytes_before in zip(given, before, strict=True):
        assert torch.equal(raw(t), bytes_before)
    filled = [t for t in results if t.numel()]
    storages = {t.untyped_storage().data_ptr() for t in filled}
    assert len(storages) == len(filled)
    assert storages.isdisjoint(t.untyped_storage().data_ptr() for t in given)
    assert not op._schema.is_mutable
    assert {torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag} <= set(op.tags)


@names
def test_meta_agrees(name: str) -> None:
    op, args = CALLS[name]
    pairs = zip(tensors(op(*args)), tensors(op(*on_meta(args))), strict=True)
    for real, fake in pairs:
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
        assert fake.stride() == real.stride()


def expected(name: str) -> tuple[Any, list[tuple[int, bool]]]:
    """What the reference says; and rows of regions, turned or not, of each pair."""
    op, args = CALLS[name]
    made: Any
    if op is PARTS:
        return reference_fused.quantize_parts(*args[:-1]), [(args[2], args[4])]
    if op is TWICE:
        return reference_fused.quantize_twice(*args), [
            (args[2], False),
            (args[4], True),
        ]
    if op is NORM:
        x, residual, weight, eps, eps_tensor, *rest = args
        eps = eps if eps_tensor is None else float(eps_tensor)
        made = reference_fused.rms_norm_quantize(x, residual, weight, eps, *rest)
        return made, [(rest[0], False), (rest[2], True)]
    if op is SCALE:
        return reference_fused.scale_rows_quantize(*args[:-1]), [(args[3], args[5])]
    if op is GATED:
        made = reference_fused.silu_mul_quantize(*args)
        return made, [(args[2], False), (args[4], True)]
    rows, turned, x_rows = args[5], args[7], args[9]
    made = reference_fused.silu_mul_backward_quantize(*args)
    return made, [(rows, False), (turned, True), (x_rows, True)]


@names
def test_values_and_memory_order(name: str) -> None:
    op, args = CALLS[name]
    wanted, pairs = expected(name)
    results = tensors(op(*args))
    assert len(results) == len(wanted)
    for got, right in zip(results, wanted, strict=True):
        assert torch.equal(raw(got), raw(right))
    for i, (rows, turned) in enumerate(pairs):
        codes, scales = results[2 * i : 2 * i + 2]
        high, wide = codes.shape
        if rows < 0:
            assert codes.shape == scales.shape == (0, 0)
            continue
        assert codes.stride() == code_strides(high, wide, bool(turned))
        assert scales.stride() == scale_strides(
            (scales.shape[0], scales.shape[1]), rows
        )
        assert scales.shape == Granularity(rows, 128).scale_shape((high, wide))


# What they stand for, written out ------------------------------------------------


def same(pair: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    assert torch.equal(raw(pair[0]), raw(wanted[0]))
    assert torch.equal(pair[1], wanted[1])


def test_parts_are_one_matrix() -> None:
    for parts, dim in ((BELOW, 0), (TWO, 1)):
        whole = torch.cat(parts, dim)
        for transpose, region in itertools.product((False, True), (GROUP, BLOCK)):
            made = PARTS(parts, dim, *region, transpose, *END, None)
            same(made, ops.quantize(whole, *region, transpose, *END, None))
    straight = PARTS(TWO, 1, *GROUP, False, *END, None)
    turned = PARTS(TWO, 1, *BLOCK, True, *END, None)
    twice = TWICE(TWO, 1, *GROUP, *BLOCK, *END)
    same(twice[:2], straight)
    same(twice[2:], turned)


def test_whole_blocks_of_parts_are_those_of_each() -> None:
    # Why siblings may be merged: no block belongs to two layers.
    codes, scales = PARTS(BELOW, 0, *BLOCK, False, *END, None)
    at = 0
    for part in BELOW:
        mine, my_scales = ops.quantize(part, *BLOCK, False, *END, None)
        rows = slice(at, at + len(part))
        blocks = slice(at // 128, at // 128 + len(my_scales))
        same((codes[rows], scales[blocks]), (mine, my_scales))
        at += len(part)


def test_norm_and_its_remake() -> None:
    total = X + X.flip(0)
    y, rstd = reference_fused.rms_norm(total, WEIGHT, 1e-6)
    made = NORM(X, X.flip(0), WEIGHT, 1e-6, None, *GROUP, *BLOCK, *END)
    flat = y.reshape(-1, 192)
    same(made[:2], ops.quantize(flat, *GROUP, False, *END, None))
    same(made[2:4], ops.quantize(flat, *BLOCK, True, *END, None))
    assert torch.equal(made[4], rstd)
    assert torch.equal(made[5], total)
    remade = SCALE(made[5], made[4], WEIGHT, *BLOCK, True, *END, made[0])
    same(remade, made[2:4])
    # As Hugging Face writes it: the factor in FP32, the rest rounded to BF16.
    wide = total.float()
    factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(y, WEIGHT * (wide * factor).to(BF16))


def test_gated_and_its_backward() -> None:
    gate, up = (t.float().requires_grad_() for t in (GATE, UP))
    product = torch.nn.functional.silu(gate) * up
    torch.autograd.backward(product, DY.float())
    made = GATED_BACK(DY, GATE, UP, None, None, *BACK)
    assert gate.grad is not None
    assert up.grad is not None
    exact = torch.cat([gate.grad, up.grad], 1)
    got = reference.dequantize(made[0], made[1], *GROUP, FP32)
    assert (got - exact).norm() < 0.04 * exact.norm()
    turned = reference.dequantize(made[2], made[3], *GROUP, FP32)
    assert (turned.t() - exact).norm() < 0.04 * exact.norm()
    same(made[4:], GATED(GATE, UP, *GROUP, *BLOCK, *END)[2:])
    remade = reference.dequantize(made[4], made[5], *BLOCK, FP32)
    assert (remade.t() - product).norm() < 0.04 * product.norm()


def test_codes_of_gate_and_up_are_dequantized() -> None:
    gate, up = (
        reference.dequantize(codes, scales, 1, 128, BF16)
        for codes, scales in (CODES[:2], CODES[2:])
    )
    wanted = GATED_BACK(DY, gate, up, None, None, *BACK)
    args = (CODES[0], CODES[2], CODES[1], CODES[3])
    made = GATED_BACK(DY, *args, *BACK)
    for a, b in zip(made, wanted, strict=True):
        assert torch.equal(raw(a), raw(b))


def test_nan_and_inf_propagate() -> None:
    x = X.clone()
    x[0, 0, 5], x[1, 1, 130] = float("nan"), float("inf")
    codes, scales, *_ = NORM(x, None, WEIGHT, 1e-6, None, *GROUP, *NONE, *END)
    assert scales[0].isnan().all(), "a NaN spoils its row"
    assert codes[0].float().isnan().all()
    assert scales[1].isfinite().all()
    up = UP.clone()
    up[2, 3] = float("nan")
    codes, scales, *_ = GATED(GATE, up, *GROUP, *NONE, *END)
    assert scales[2].isnan().tolist() == [True, False]
    assert GATED(GATE * 0, UP * 0, *GROUP, *NONE, *END)[0].float().eq(0).all()


def symbolic(x: Tensor, mode: FakeTensorMode, dims: int = 1) -> Any:
    sizes = [DimDynamic.DYNAMIC] * dims + [DimDynamic.STATIC] * (x.dim() - dims)
    context: Any = StatelessSymbolicContext(sizes)
    return mode.from_tensor(x, symbolic_context=context)


def test_symbolic_rows_need_no_guard() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = symbolic(X, mode, 2)
    weight = mode.from_tensor(WEIGHT, static_shapes=True)
    gate = symbolic(randn(21, 256), mode)
    with mode:
        norm = NORM(x, x, weight, 1e-6, None, *GROUP, *BLOCK, *END)
        SCALE(x, norm[4], weight, *BLOCK, True, *END, norm[0])
        gated = GATED(gate, gate, *GROUP, *BLOCK, *END)
        back = GATED_BACK(gate, gate, gate, None, None, *BACK)
        TWICE([gate, gate], 1, *GROUP, *GROUP, *END)
        codes, scales = ops.quantize(gate, 1, 128, False, *END, None)
        GATED_BACK(gate, codes, codes, scales, scales, *BACK)
    assert norm[0].shape[0] == x.shape[0] * x.shape[1]
    assert norm[4].shape == (*x.shape[:2], 1)
    assert gated[2].shape[1] == gate.shape[0]
    assert back[0].shape[1] == 512
    assert mode.shape_env is not None
    assert not mode.shape_env.guards


# Errors --------------------------------------------------------------------------


ERRORS: list[tuple[str, dict[int, Any], str]] = [
    ("parts below", {0: []}, "got 0 parts along dimension 0; it needs at least one"),
    ("parts below", {1: 2}, "3 parts along dimension 2; .*along 0 or 1"),
    ("parts below", {0: TWO}, r"parts of shapes \(37, 128\), \(37, 192\); beside dim"),
    ("parts below", {0: [X]}, "needs a matrix"),
    ("parts below", {0: [TWO[0].half()]}, "convert the model to BF16"),
    ("parts below", {5: "fp8"}, "scale format 'fp8'; use one of fp32, ue8m0"),
    ("parts below", {2: -1}, "regions of -1x128"),
    ("twice", {0: [TWO[0], TWO[1][:3]]}, "they need the same size"),
    ("twice", {6: "e5m2"}, "scale format 'e5m2'"),
    ("twice", {7: 0.0}, "amax floor 0; it needs at least"),
    ("norm", {0: X.float()}, "rms_norm_quantize got fp32 of shape .*needs BF16"),
    ("norm of a sum", {1: X[:2]}, "same numbers of rows and columns"),
    ("norm of a sum", {1: X[..., :64]}, "same numbers of rows and columns"),
    ("norm", {2: WEIGHT[:1]}, r"a weight of shape \(1,\) in bf16 for x .*needs 192"),
    ("norm", {2: WEIGHT.float()}, "in fp32 for x"),
    ("norm", {9: "fp8"}, "scale format 'fp8'"),
    ("norm", {10: -1.0}, "amax floor -1"),
    ("scale", {1: RSTD[:1]}, "one FP32 number a row"),
    ("scale", {1: RSTD.bfloat16()}, r"a factor of shape \(3, 7, 1\) in bf16"),
    ("scale", {2: WEIGHT[:64]}, "a weight of shape"),
    ("scale", {6: "fp8"}, "scale format 'fp8'"),
    ("gated", {1: UP[:4]}, r"got shapes \(21, 256\), \(4, 256\); they need the same"),
    ("gated", {1: UP[:, :1]}, "they need the same numbers of rows and columns"),
    ("gated", {0: GATE.float()}, "silu_mul_quantize got fp32"),
    ("gated", {6: "fp8"}, "scale format 'fp8'"),
    ("gated backward", {0: DY[:4]}, "the same numbers of rows and columns"),
    ("gated backward", {1: CODES[0]}, "got e4m3 of shape .*; it needs BF16"),
    ("gated backward", {3: CODES[1]}, "scales of one of gate and up"),
    ("gated backward of codes", {4: None}, "scales of one of gate and up"),
    ("gated backward of codes", {1: GATE}, "gate of shape .* in bf16; it needs a matr"),
    ("gated backward of codes", {3: CODES[1][:, :1]}, "gate .*regions of 1x128 need"),
    ("gated backward", {11: "fp8"}, "scale format 'fp8'"),
    ("gated backward", {12: float("inf")}, "amax floor inf"),
]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    ERRORS,
    ids=[
        f"{name}-{next(iter(changes))}-{i}"
        for i, (name, changes, _) in enumerate(ERRORS)
    ],
)
def test_errors(name: str, changes: dict[int, Any], message: str) -> None:
    op, given = CALLS[name]
    args = list(given)
    for at, value in changes.items():
        args[at] = value
    with pytest.raises(PrecisionFlowError, match=message):
        op(*args)
    with pytest.raises(PrecisionFlowError, match=message):
        op(*on_meta(args))
