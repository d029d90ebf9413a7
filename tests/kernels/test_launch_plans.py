"""Recorded calls: what is repeated, and what is not recorded."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl_compile.kernels import launch_plans
from jetrl_compile.kernels.launch_plans import (
    forget_plans,
    plan_counts,
    planned,
)
from jetrl_compile.kernels.launch_recorder import call_library, launch_kernel


class FakeKernel:
    """Copies bytes, as a Triton kernel is launched: once by tensors, then by address.

    It is run without PyTorch's operators, which a recorder would see.
    """

    def __init__(self, compiles: bool = True) -> None:
        self.compiles = compiles
        self.slow = self.fast = 0

    @staticmethod
    def fn(x: Any, out: Any, count: int, extra: Any = None, FLAG: bool = False) -> None:
        """The signature of its source."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def first(x: Tensor, out: Tensor, count: int, num_warps: int, **_: Any) -> Any:
            self.slow += 1
            assert num_warps == 4
            ctypes.memmove(out.data_ptr(), x.data_ptr(), count)
            return FakeCompiled(self) if self.compiles else None

        return first


class FakeCompiled:
    def __init__(self, kernel: FakeKernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert grid == (3, 1, 1)

        def later(x: int, out: int, count: int, extra: Any, FLAG: bool) -> None:
            self.kernel.fast += 1
            assert (extra, FLAG) == (None, True)
            ctypes.memmove(out, x, count)

        return later


@pytest.fixture(autouse=True)
def cpu_counts_as_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def device(tensors: list[Tensor]) -> int | None:
        return 0 if tensors else None

    monkeypatch.setattr(launch_plans, "_device", device)
    forget_plans()
    yield
    forget_plans()


def copier(kernel: FakeKernel, before: Callable[[Tensor], Tensor] = lambda x: x) -> Any:
    """Return an operator that copies a matrix, and its second row once more."""

    @planned("copier")
    def copy(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        x = before(x)
        whole = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        twice = x.new_empty((4, x.shape[1]))
        options: dict[str, Any] = {"FLAG": True, "num_warps": 4}
        launch_kernel(kernel, (3,))(x, whole, x.numel() * 4, **options)
        launch_kernel(kernel, (3,))(x, twice[1:], x.shape[1] * 4, **options)
        return whole, twice

    return copy


def test_a_second_call_repeats_the_first_on_its_own_tensors() -> None:
    kernel = FakeKernel()
    copy = copier(kernel)
    before = plan_counts()
    for _ in range(3):
        x = torch.randn(2, 8)
        whole, twice = copy(x)
        assert torch.equal(whole, x)
        assert torch.equal(twice[1], x[0])
        assert twice.shape == (4, 8)
        assert whole.data_ptr() != x.data_ptr()
    assert (kernel.slow, kernel.fast) == (2, 4)
    after = plan_counts()
    assert after["recorded"] - before["recorded"] == 1
    assert after["repeated"] - before["repeated"] == 2


@pytest.mark.parametrize(
    "other",
    [
        lambda: (torch.randn(3, 8),),
        lambda: (torch.randn(8, 2).t(),),
        lambda: (torch.randn(2, 8).bfloat16().float(), 1),
        lambda: (torch.randn(17)[1:].view(2, 8),),  # begins elsewhere
        lambda: (torch.randn(2, 8), torch.randn(1)),
        lambda: (torch.randn(2, 8), [torch.randn(1)]),
        lambda: (torch.randint(9, (2, 8), dtype=torch.int32),),
    ],
)
def test_another_kind_is_recorded_anew(other: Callable[[], tuple[Any, ...]]) -> None:
    kernel = FakeKernel()
    copy = copier(kernel)
    copy(torch.randn(2, 8))
    args = other()
    whole, _ = copy(*args)
    assert torch.equal(whole, args[0])
    assert (kernel.slow, kernel.fast) == (4, 0)


@pytest.mark.parametrize(
    "change",
    [torch.clone, lambda x: x + 0, lambda x: x.to(torch.float64).float()],
)
def test_a_call_that_computes_is_not_recorded(
    change: Callable[[Tensor], Tensor],
) -> None:
    kernel = FakeKernel()
    copy = copier(kernel, change)
    before = plan_counts()["refused"]
    for _ in range(2):
        x = torch.randn(2, 8)
        assert torch.equal(copy(x)[0], x)
    assert (kernel.slow, kernel.fast) == (4, 0)
    assert plan_counts()["refused"] == before + 1


def test_views_of_an_argument_are_recorded() -> None:
    kernel = FakeKernel()
    copy = copier(kernel, lambda x: x.view(1, 16).view(2, 8))
    for _ in range(2):
        x = torch.randn(2, 8)
        assert torch.equal(copy(x)[0], x)
    assert kernel.fast == 2


def test_a_part_of_an_argument_is_not_recorded() -> None:
    kernel = FakeKernel()
    copy = copier(kernel, lambda x: x[1:])
    for _ in range(2):
        x = torch.randn(3, 8)
        assert torch.equal(copy(x)[0], x[1:])
    assert kernel.fast == 0


def test_aliased_arguments_are_not_recorded() -> None:
    kernel = FakeKernel()
    copy = copier(kernel)
    x = torch.randn(2, 8)
    for _ in range(2):
        copy(x, x)
    assert kernel.fast == 0
    # Nor do they keep other tensors from it.
    for _ in range(2):
        assert torch.equal(copy(x, torch.randn(2, 8))[0], x)
    assert kernel.fast == 2


def test_which_optional_argument_was_given() -> None:
    kernel = FakeKernel()

    @planned("optional")
    def copy(a: Tensor | None, b: Tensor | None, x: Tensor) -> Tensor:
        out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        source = x if a is None else a
        launch_kernel(kernel, (3,))(source, out, 64, FLAG=True, num_warps=4)
        return out

    x, y = torch.randn(2, 8), torch.randn(2, 8)
    for _ in range(2):
        assert torch.equal(copy(y, None, x), y)
        assert torch.equal(copy(None, y, x), x)
    assert (kernel.slow, kernel.fast) == (2, 2)


def test_the_interpreter_is_not_recorded() -> None:
    kernel = FakeKernel(compiles=False)
    copy = copier(kernel)
    for _ in range(2):
        copy(torch.randn(2, 8))
    assert (kernel.slow, kernel.fast) == (4, 0)


def test_a_result_that_is_no_new_tensor_is_not_recorded() -> None:
    kernel = FakeKernel()
    own = torch.empty(2, 8)

    @planned("own")
    def copy(x: Tensor) -> Tensor:
        launch_kernel(kernel, (3,))(x, own, 64, FLAG=True, num_warps=4)
        return own

    for _ in range(2):
        x = torch.randn(2, 8)
        assert torch.equal(copy(x), x)
    assert kernel.fast == 0


def test_a_library_gets_the_tensors_themselves() -> None:
    seen: list[tuple[Any, ...]] = []

    def multiply(a: Tensor, b: Tensor, out: Tensor, c: None, word: str) -> None:
        seen.append((a, b, out, c, word))
        torch.mm(a, b, out=out)  # what a library does is not looked at

    @planned("library")
    def gemm(parts: list[Tensor], scale: float) -> Tensor:
        out = parts[0].new_empty((parts[0].shape[0], parts[1].shape[1]))
        call_library(multiply, (*parts, out, None), "nk")
        return out

    for _ in range(3):
        a, b = torch.randn(2, 3), torch.randn(3, 4)
        out = gemm([a, b], 1.0)
        assert torch.equal(out, a @ b)
        assert all(g is t for g, t in zip(seen[-1], (a, b, out), strict=False))
        assert seen[-1][3:] == (None, "nk")
    assert len(seen) == 3


def test_no_elements() -> None:
    kernel = FakeKernel()
    copy = copier(kernel)
    for _ in range(2):
        whole, twice = copy(torch.randn(2, 0))
        assert (whole.shape, twice.shape) == ((2, 0), (4, 0))


def test_an_error_leaves_nothing_behind() -> None:
    kernel = FakeKernel()

    def fail(x: Tensor) -> Tensor:
        if x.shape[0] == 5:
            raise ValueError("five rows")
        return x

    copy = copier(kernel, fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="five"):
            copy(torch.randn(5, 8))
    for _ in range(2):
        copy(torch.randn(2, 8))
    assert kernel.fast == 2


def test_too_many_kinds_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_plans, "MOST_PLANS", 3)
    copy = copier(FakeKernel())
    for rows in range(2, 9):
        copy(torch.randn(rows, 8))
        assert len(launch_plans._PLANS) <= 3


def test_a_call_inside_of_another_is_part_of_its_record() -> None:
    inner_kernel, outer_kernel = FakeKernel(), FakeKernel()

    def copy(kernel: FakeKernel, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        launch_kernel(kernel, (3,))(x, out, x.numel() * 4, FLAG=True, num_warps=4)
        return out

    inner = planned("inner of two")(lambda x: copy(inner_kernel, x))
    outer = planned("outer of two")(lambda x: copy(outer_kernel, inner(x)))
    for count in range(3):
        x = torch.randn(8)
        assert torch.equal(outer(x), x)
        assert (inner_kernel.slow, outer_kernel.slow) == (1, 1)
        assert (inner_kernel.fast, outer_kernel.fast) == (count, count)
