"""Codes of weights are kept while the weights are what they were, and no longer."""

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jetrl_compile import forget_weights
from jetrl_compile.errors import PrecisionFlowError, ProviderError
from jetrl_compile.kernels import fused_ops, ops, weight_ops
from jetrl_compile.kernels.weight_ops import gemm_weights, kept_codes, weight_counts

# As FSDP2 writes to a gathered parameter.
keep_version: Any = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
BF16 = torch.bfloat16
FLOOR = 1e-10
FLOW: tuple[Any, ...] = (128, 128, "fp32", FLOOR)


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(BF16)


def make_weight(seed: int = 0) -> nn.Parameter:
    return nn.Parameter(randn(256, 128, seed=seed))


def raw(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.uint8)


def is_fresh(*weights: Tensor, transpose: bool = False) -> bool:
    """Whether the codes that are given are those of the weights as they are."""
    codes, scales = kept_codes(weights, transpose, *FLOW)
    parts = [w.detach() for w in weights]
    rows, cols, *rest = FLOW
    wanted = fused_ops.quantize_parts(parts, 0, rows, cols, transpose, *rest, None)
    return torch.equal(raw(codes), raw(wanted[0])) and torch.equal(scales, wanted[1])


@pytest.fixture(autouse=True)
def counts() -> Iterator[Callable[[], dict[str, int]]]:
    """Counts since the test began; nothing is kept from the test before."""
    forget_weights()
    before = weight_counts()
    yield lambda: {k: v - before[k] for k, v in weight_counts().items()}
    forget_weights()


Counts = Callable[[], dict[str, int]]


def test_made_once_a_weight_and_direction(counts: Counts) -> None:
    first, second = make_weight(), make_weight(1)
    for _ in range(3):
        assert is_fresh(first)
        assert is_fresh(first, second)
        assert is_fresh(first, transpose=True)
    assert counts() == {"made": 3, "read": 6}
    rows, cols, _, floor = FLOW
    kept_codes([first], False, rows, cols, "ue8m0", floor)
    kept_codes([first], False, 0, 0, "fp32", floor)
    kept_codes([first], False, rows, cols, "fp32", 1e-4)
    kept_codes([second, first], False, *FLOW)
    assert counts()["made"] == 7


# What ends it ------------------------------------------------------------------------


def step(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> Any:
    def change(w: nn.Parameter) -> None:
        w.grad = torch.ones_like(w)
        optimizer([w], lr=0.1, **options).step()

    return change


def in_place(w: nn.Parameter) -> None:
    with torch.no_grad():
        w.mul_(1.5)


def detached(w: nn.Parameter) -> None:
    w.detach().mul_(1.5)


def part(w: nn.Parameter) -> None:
    with torch.no_grad():
        w[3:5, 7].fill_(9)


def foreach(w: nn.Parameter) -> None:
    with torch.no_grad():
        torch._foreach_mul_([w], 1.5)


def inference_mode(w: nn.Parameter) -> None:
    with torch.inference_mode():
        w.mul_(1.5)


def other_data(w: nn.Parameter) -> None:
    w.data = w.data * 1.5


def other_data_at_its_address(w: nn.Parameter) -> None:
    # The second tensor gets the memory of the one that was kept.
    for _ in range(2):
        w.data = w.data * 1.5


def forgotten(w: nn.Parameter) -> None:
    w.data.copy_(w.data * 1.5)
    forget_weights()


def gathered(w: nn.Parameter) -> None:
    # As FSDP2 gathers a parameter after its optimizer changed the shards.
    shard = nn.Parameter(torch.zeros(4))
    step(torch.optim.SGD)(shard)
    with keep_version(w), torch.no_grad():
        w.mul_(1.5)


def freed_and_gathered(w: nn.Parameter) -> None:
    size = w.untyped_storage().nbytes()
    shard = nn.Parameter(torch.zeros(4))
    step(torch.optim.AdamW)(shard)
    w.untyped_storage().resize_(0)
    w.untyped_storage().resize_(size)
    with keep_version(w), torch.no_grad():
        w.copy_(randn(256, 128, seed=9))


def compiled_write(w: nn.Parameter) -> None:
    with torch.no_grad():
        torch.compile(lambda t: t.mul_(1.5), backend="aot_eager")(w)


CHANGES: dict[str, Callable[[nn.Parameter], None]] = {
    "SGD": step(torch.optim.SGD),
    "SGD foreach": step(torch.optim.SGD, foreach=True),
    "AdamW": step(torch.optim.AdamW),
    "AdamW foreach": step(torch.optim.AdamW, foreach=True),
    "AdamW fused": step(torch.optim.AdamW, fused=True),
    **{
        change.__name__: change
        for change in (
            in_place,
            detached,
            part,
            foreach,
            inference_mode,
            other_data,
            other_data_at_its_address,
            forgotten,
            gathered,
            freed_and_gathered,
            compiled_write,
        )
    },
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_never_stale(change: str, counts: Counts) -> None:
    w, before = make_weight(), make_weight()
    assert is_fresh(w)
    for _ in range(3):
        assert is_fresh(w)
        CHANGES[change](w)
        assert not torch.equal(w, before)
        assert is_fresh(w), change
        assert is_fresh(w)
    assert counts()["made"] == 4
    torch._dynamo.reset()


def test_second_weight_of_two_changes() -> None:
    first, second = make_weight(), make_weight(1)
    assert is_fresh(first, second)
    in_place(second)
    assert is_fresh(first, second)


def test_load_state_dict() -> None:
    layer = nn.Linear(128, 256, bias=False).to(BF16)
    assert is_fresh(layer.weight)
    for assign in (False, True):
        state = {"weight": randn(256, 128, seed=5 + assign)}
        layer.load_state_dict(state, assign=assign)
        assert torch.equal(layer.weight, state["weight"])
        assert is_fresh(layer.weight)
    layer.to(torch.float32)
    with torch.no_grad():
        layer.weight.add_(0.01)
    layer.to(BF16)
    assert is_fresh(layer.weight)
    layer.weight = make_weight(8)
    assert is_fresh(layer.weight)


def test_write_into_data_needs_forget_weights() -> None:
    # The one change that nothing shows, as `cache_weights` says.
    w = make_weight()
    assert is_fresh(w)
    w.data.copy_(w.data * 1.5)
    assert not is_fresh(w)
    forget_weights()
    assert is_fresh(w)


def test_another_model_at_the_same_address(counts: Counts) -> None:
    addresses = set()
    for seed in range(30):
        w = make_weight(seed)
        addresses.add((id(w), w.data_ptr()))
        assert is_fresh(w)
        del w
    gc.collect()
    assert len(addresses) < 30, "an address came twice"
    assert counts() == {"made": 30, "read": 0}
    assert not weight_ops._KEPT, "codes go with their weights"


def test_two_models_and_copies(counts: Counts) -> None:
    first = make_weight()
    second = copy.deepcopy(first)
    assert is_fresh(first)
    assert is_fresh(second)
    in_place(second)
    for _ in range(2):
        assert is_fresh(first)
        assert is_fresh(second)
    assert counts() == {"made": 3, "read": 3}


def test_two_names_of_one_storage() -> None:
    w = make_weight()
    alias = w.detach()
    assert is_fresh(w)
    assert is_fresh(alias)
    in_place(w)
    assert is_fresh(alias)
    assert is_fresh(w)


def test_tensors_of_inference_mode_are_not_kept(counts: Counts) -> None:
    with torch.inference_mode():
        w = randn(256, 128)
        assert is_fresh(w)
        w.mul_(1.5)
        assert is_fresh(w)
    assert counts() == {"made": 2, "read": 0}
    # Codes that are made there serve training afterwards.
    p, a = make_weight(), randn(8, 128)
    args = gemm_args(a, [p])
    with torch.inference_mode():
        first = gemm_weights(*args)
    assert torch.equal(first, gemm_weights(*args))
    assert counts()["read"] == 1


# The operator ------------------------------------------------------------------------


def gemm_args(
    x: Tensor, given: list[Any], transposed: bool = False, **changes: Any
) -> tuple[Any, ...]:
    a, a_scales = ops.quantize(x, 1, 128, False, "fp32", FLOOR, None)
    named = {
        "a": a,
        "a_scales": a_scales,
        "weights": given,
        "transpose": transposed,
        "a_rows": 1,
        "a_cols": 128,
        "b_rows": 128,
        "b_cols": 128,
        "scale_format": "fp32",
        "amax_floor": FLOOR,
        "out_dtype": BF16,
        "provider": "reference",
    }
    return tuple({**named, **changes}.values())


SHAPES = ((37, 256), (0, 256), (1, 256), (5, 100))


@pytest.mark.parametrize(("m", "k"), SHAPES)
@pytest.mark.parametrize("transpose", [False, True])
def test_same_bits_as_the_gemm_of_codes(m: int, k: int, transpose: bool) -> None:
    weights = [randn(128, k), randn(72, k, seed=1)]
    x = randn(m, 200 if transpose else k, seed=2)
    args = gemm_args(x, weights, transpose)
    b = fused_ops.quantize_parts(weights, 0, 128, 128, transpose, "fp32", FLOOR, None)
    wanted = ops.gemm(args[0], args[1], *b, 1, 128, 128, 128, BF16, "reference")
    for _ in range(2):
        got = gemm_weights(*args)
        assert got.shape == (m, k if transpose else 200)
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("transpose", [False, True])
def test_opcheck(transpose: bool) -> None:
    x = randn(37, 256 if transpose else 128)
    args = gemm_args(x, [randn(128, 128), randn(128, 128, seed=1)], transpose)
    tests = ["test_autograd_registration", "test_faketensor"]
    torch.library.opcheck(
        gemm_weights, args, test_utils=[*tests, "test_aot_dispatch_dynamic"]
    )
    empty = gemm_args(x[:0], [randn(128, 128), randn(128, 128)], transpose)
    torch.library.opcheck(gemm_weights, empty, test_utils=tests)


def test_result_is_no_kept_memory() -> None:
    w = make_weight()
    args = gemm_args(randn(8, 128), [w])
    results = [gemm_weights(*args) for _ in range(2)]
    assert results[0].data_ptr() != results[1].data_ptr()
    (kept,) = weight_ops._KEPT.values()
    storages = {t.untyped_storage().data_ptr() for t in (kept.codes, kept.scales)}
    assert storages.isdisjoint(t.untyped_storage().data_ptr() for t in results)
    assert not kept.codes.requires_grad


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": [randn(256, 100)]}, r"weights \(256, 100\), transposed: False"),
        ({"weights": [randn(128, 128), randn(128, 64)]}, "the contraction needs one"),
        ({"transpose": True}, r"transposed: True; the contraction needs one size: 256"),
        ({"a": randn(8, 128)}, "a of shape .* in bf16; it needs a matrix of e4m3"),
        ({"a_rows": 128}, "regions of 128x128 need fp32 scales"),
        ({"b_rows": -1}, "regions of -1x128"),
        ({"scale_format": "fp8"}, "scale format 'fp8'; use one of fp32, ue8m0"),
        ({"amax_floor": 0.0}, "amax floor 0; it needs at least"),
        ({"out_dtype": torch.float16}, "result dtype fp16; use one of"),
        ({"weights": [randn(256, 128).half()]}, "convert the model to BF16"),
    ],
)
def test_errors(changes: dict[str, Any], message: str) -> None:
    args = gemm_args(randn(8, 128), [make_weight()], **changes)
    with pytest.raises(PrecisionFlowError, match=message):
        gemm_weights(*args)
    meta = torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to("meta"), args)
    with pytest.raises(PrecisionFlowError, match=message):
        gemm_weights(*meta)


def test_unknown_provider() -> None:
    args = gemm_args(randn(8, 128), [make_weight()], provider="referense")
    with pytest.raises(ProviderError, match="did you mean 'reference'"):
        gemm_weights(*args)
