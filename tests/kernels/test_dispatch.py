"""The choice of a provider, and what it says about it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from jetrl_compile import formats
from jetrl_compile.errors import ProviderError
from jetrl_compile.kernels import dispatch, ops
from jetrl_compile.kernels.dispatch import GemmShape, Provider, select

SHAPE = GemmShape("fprop", 192, 576, formats.groups("K"), formats.blocks("K"))


def ones(a: Tensor, a_scales: Tensor, b: Tensor, *rest: object) -> Tensor:
    return torch.ones(a.shape[0], b.shape[0], dtype=torch.bfloat16)


WIDE = Provider(
    name="wide",
    gemm=ones,
    batch_invariant=False,
    numerics="ones",
    usable=lambda: None,
    rejects=lambda shape: f"N={shape.n} is below 256" if shape.n < 256 else None,
)
ABSENT = replace(WIDE, name="absent", usable=lambda: "package absent is not installed")


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    for provider in (WIDE, ABSENT):
        monkeypatch.setitem(dispatch._REGISTRY, provider.name, provider)


def test_default_is_the_reference() -> None:
    choice = select(SHAPE)
    assert choice.provider is dispatch.REFERENCE
    assert choice.provider.batch_invariant
    assert choice.reason == "first choice"


@pytest.mark.usefixtures("three")
def test_first_accepting_provider_runs_and_the_others_have_reasons() -> None:
    order = ("absent", "wide", "reference")
    choice = select(SHAPE, order)
    assert choice.provider.name == "reference"
    assert choice.passed_over == (
        ("absent", "package absent is not installed"),
        ("wide", "N=192 is below 256"),
    )
    assert choice.reason == (
        "absent: package absent is not installed; wide: N=192 is below 256"
    )
    assert select(replace(SHAPE, n=256), order).provider is WIDE
    assert select(SHAPE, ("reference", "wide")).passed_over == ()
    assert select(SHAPE, "reference").provider.name == "reference"


@pytest.mark.usefixtures("three")
def test_statuses_tell_why_not() -> None:
    lines = [str(status) for status in dispatch.provider_statuses()]
    assert lines[0] == "reference: usable"
    assert lines[-2:] == [
        "wide: usable",
        "absent: not usable: package absent is not installed",
    ]


@pytest.mark.usefixtures("three")
def test_nobody_accepts() -> None:
    message = "no provider accepts fprop M=any N=192 K=576 on cpu.*wide: N=192 is below"
    with pytest.raises(ProviderError, match=message):
        select(SHAPE, ("wide",))


def test_empty_list() -> None:
    with pytest.raises(ProviderError, match="list at least one of reference"):
        select(SHAPE, ())


def test_unknown_name_behind_the_chosen_one_is_an_error() -> None:
    with pytest.raises(ProviderError, match="'refrence' is unknown; did you mean"):
        select(SHAPE, ("reference", "refrence"))
    with pytest.raises(ProviderError, match="'cutlass' is unknown; known: reference"):
        dispatch.get_provider("cutlass")


def test_reference_rejects_what_is_not_quantized() -> None:
    plain = replace(SHAPE, a=formats.Flow("bf16"))
    with pytest.raises(ProviderError, match="an operand is not quantized"):
        select(plain)
    e5m2 = replace(SHAPE, a=replace(SHAPE.a, dtype="e5m2"))
    with pytest.raises(ProviderError, match="operands are e5m2 and e4m3"):
        select(e5m2)


def test_sizes_by_role() -> None:
    sizes = [replace(SHAPE, role=role, m=7).sizes for role in dispatch.ROLES]
    assert sizes == [(7, 192, 576), (7, 576, 192), (192, 576, 7)]
    with pytest.raises(ProviderError, match="GEMM role 'forward' is unknown"):
        replace(SHAPE, role="forward")


def test_names_are_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_REGISTRY", dict(dispatch._REGISTRY))
    assert dispatch.register_provider(dispatch.REFERENCE) is dispatch.REFERENCE
    with pytest.raises(ProviderError, match="a different provider named 'reference'"):
        dispatch.register_provider(replace(WIDE, name="reference"))


@pytest.mark.usefixtures("three")
def test_op_runs_the_named_provider() -> None:
    x = torch.randn(5, 128).bfloat16()
    a = ops.quantize(x, 1, 128, False, "fp32", 1e-10, None)
    out = ops.gemm(*a, *a, 1, 128, 1, 128, torch.bfloat16, "wide")
    assert torch.equal(out, torch.ones(5, 5, dtype=torch.bfloat16))
