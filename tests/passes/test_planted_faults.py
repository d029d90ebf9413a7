"""A pass that does the wrong thing is caught before anything runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import activations, backward, compiled, make_mlp
from torch._dynamo.exc import BackendCompilerFailed

from jetrl_compile import pipeline
from jetrl_compile.gemm_sites import GemmSites
from jetrl_compile.kernels import dispatch
from jetrl_compile.kernels.dispatch import GemmShape, Provider
from jetrl_compile.passes import insert_quantize, lower_gemm
from jetrl_compile.passes.context import Context
from jetrl_compile.recipe import get_recipe

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
FAULT = "fault of the compiler"


@pytest.fixture(
    autouse=True,
    params=[{}, {"fuse": True, "cache_weights": True}],
    ids=["plain", "fused"],
)
def common(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Options of all compilations of a test: faults show whatever is fused."""
    chosen: dict[str, Any] = request.param
    monkeypatch.setitem(OPTIONS, "common", chosen)
    return chosen


OPTIONS: dict[str, dict[str, Any]] = {"common": {}}


def compile_mlp(**options: Any) -> None:
    options = {**OPTIONS["common"], **options}
    backward(compiled(make_mlp(), **options)(activations(64, 192)))


@pytest.mark.parametrize("role", ["fprop", "dgrad", "wgrad"])
def test_gemm_that_stays_raises(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = lower_gemm._lower

    def skip(context: Context, name: str, *rest: Any) -> None:
        if name != f"up_proj:{role}":
            original(context, name, *rest)

    monkeypatch.setattr(lower_gemm, "_lower", skip)
    message = rf"1 GEMMs that recipe 'jetrl' names were not lowered: up_proj:{role};"
    with pytest.raises(BackendCompilerFailed, match=message):
        compile_mlp()


def test_gradient_of_a_weight_that_is_not_recognized_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = GemmSites._wgrad

    def blind(self: GemmSites, index: int, node: Any) -> Any:
        site = original(self, index, node)
        if site is None or site.module != "up_proj":
            return site
        self._lose(node)
        assert set(self.lost) == {"gate_proj", "up_proj"}  # both read its x
        self.lost.clear()
        return None

    monkeypatch.setattr(GemmSites, "_wgrad", blind)
    message = "reads the input of (gate|up)_proj, which is FP8, and was not recognized"
    with pytest.raises(BackendCompilerFailed, match=message):
        compile_mlp()


def test_gemm_that_is_never_quantized_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(context: Context) -> int:
        count = insert_quantize.insert_quantize(context)
        context.operands.popitem()
        return count

    replaced = [
        (name, forgetful if name == "insert_quantize" else run)
        for name, run in pipeline.PASSES
    ]
    monkeypatch.setattr(pipeline, "PASSES", tuple(replaced))
    with pytest.raises(BackendCompilerFailed, match="1 GEMMs that recipe 'jetrl'"):
        compile_mlp()


def other_floor(args: list[Any]) -> None:
    args[5] = 1e-4


def other_granularity(args: list[Any]) -> None:
    args[1], args[2] = 1, 64


def other_scale_format(args: list[Any]) -> None:
    args[4] = "ue8m0"


@pytest.mark.parametrize("edit", [other_floor, other_granularity, other_scale_format])
def test_wrong_quantizer_is_caught(
    edit: Callable[[list[Any]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = insert_quantize._Inserter._emit
    seen: list[int] = []

    def wrong(self: Any, target: Any, args: tuple[Any, ...], anchor: Any) -> Any:
        seen.append(0)
        changed = list(args)
        if len(seen) == 4:
            edit(changed)
        return original(self, target, tuple(changed), anchor)

    monkeypatch.setattr(insert_quantize._Inserter, "_emit", wrong)
    # A granularity that the GEMM is not told of fails in the operator itself.
    expected = "regions of|fault of the compiler"
    with pytest.raises(BackendCompilerFailed, match=expected):
        compile_mlp()


def test_flow_of_another_recipe_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # Quantizer and GEMM agree with each other, but not with the recipe.
    annotate = dict(pipeline.PASSES)["annotate_precision"]

    def wrong(context: Context) -> int:
        count = annotate(context)
        wanted = context.annotated
        context.recipe = get_recipe("jetrl_ue8m0")
        annotate(context)
        insert_quantize.insert_quantize(context)
        lower_gemm.lower_gemm(context)
        context.annotated = wanted
        return count

    replaced = {**dict(pipeline.PASSES), "annotate_precision": wrong}
    monkeypatch.setattr(pipeline, "PASSES", tuple(replaced.items()))
    with pytest.raises(BackendCompilerFailed, match=f"scale ue8m0.*{FAULT}"):
        compile_mlp()


def test_wrong_tensor_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = insert_quantize._Inserter.operands

    def swapped(self: Any, name: str, site: Any) -> Any:
        x, w = original(self, name, site)
        if name == "up_proj:fprop":  # reads the weight of its sibling
            return x, self.gate_w
        if name == "gate_proj:fprop":
            self.gate_w = w
        return x, w

    monkeypatch.setattr(insert_quantize._Inserter, "operands", swapped)
    with pytest.raises(BackendCompilerFailed, match=r"LoweringError: .*up_proj"):
        compile_mlp()


def test_x_quantized_in_backward_is_caught(
    monkeypatch: pytest.MonkeyPatch, common: dict[str, Any]
) -> None:
    # wgrad's x quantized in backward instead of forward: BF16 would be kept.
    monkeypatch.setattr(insert_quantize._Inserter, "_wgrad_in_forward", lambda *_: None)
    if common:  # fused kernels may remake x in backward
        return compile_mlp()
    with pytest.raises(BackendCompilerFailed, match=r"saved e4m3.*saved bf16"):
        compile_mlp()


def test_provider_that_rejects_is_named_and_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rejects(shape: GemmShape) -> str | None:
        return "no wgrad here" if shape.role == "wgrad" else None

    picky = Provider(
        name="picky",
        gemm=dispatch.REFERENCE.gemm,
        batch_invariant=True,
        numerics="fp64_groups",
        usable=lambda: None,
        rejects=rejects,
    )
    monkeypatch.setitem(dispatch._REGISTRY, "picky", picky)
    found: list[Any] = []
    compile_mlp(providers=("picky", "reference"), report=found.append)
    chosen = found[0].providers
    assert chosen["up_proj:dgrad"] == "picky: first choice"
    assert chosen["up_proj:wgrad"] == "reference: picky: no wgrad here"
    providers = {op.name: op.provider for op in found[0].graph.gemms()}
    assert providers["up_proj:fprop"] == "picky"
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match=r"no provider accepts wgrad"):
        compile_mlp(providers=("picky",))
