"""Layouts of fused and sharded layers, their storage, and the state of a push."""

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from jetrl_compile.errors import ModelError, PrecisionFlowError, RefitError
from jetrl_compile.formats import blocks
from jetrl_compile.integrations.vllm import storage
from jetrl_compile.integrations.vllm.layout import (
    LayerLayout,
    kind_of,
    make_layout,
    part_names,
)
from jetrl_compile.integrations.vllm.settings import read_settings
from jetrl_compile.integrations.vllm.weight_state import WeightState
from jetrl_compile.kernels import ops, reference
from jetrl_compile.kernels.gemm_parts import gemm_parts, split_scales

FLOW = blocks("K")


class ColumnParallelLinear(nn.Module):
    def __init__(self, rank: int = 0, ranks: int = 1, copies: int = 1) -> None:
        super().__init__()
        self.tp_rank, self.tp_size, self.num_kv_head_replicas = rank, ranks, copies


class QKVParallelLinear(ColumnParallelLinear):
    pass


class RowParallelLinear(ColumnParallelLinear):
    pass


class ReplicatedLinear(ColumnParallelLinear):
    pass


def layout(layer: nn.Module, sizes: list[int], cols: int, leaf: str) -> LayerLayout:
    return make_layout(layer, f"m.0.{leaf}", sizes, cols, {}, FLOW)


def test_kinds() -> None:
    assert kind_of(QKVParallelLinear()) == "qkv"
    assert kind_of(RowParallelLinear()) == "row"
    assert kind_of(ReplicatedLinear()) == "column"  # the first base that is known
    with pytest.raises(ModelError, match="none of vLLM's linear layers"):
        kind_of(nn.Linear(2, 2))


def test_parts_of_qkv() -> None:
    found = layout(QKVParallelLinear(), [192, 64, 64], 192, "qkv_proj")
    assert [(p.name, p.key, p.low, p.scale_low) for p in found.parts] == [
        ("m.0.q_proj", "q", 0, 0),
        ("m.0.k_proj", "k", 192, 2),
        ("m.0.v_proj", "v", 256, 3),
    ]
    assert (found.rows, found.scale_shape) == (320, (4, 2))
    assert not found.is_one_matrix
    with pytest.raises(ModelError, match="no part 'x'; its parts are q, k, v"):
        found.part("x")


def test_shards_of_rank_1() -> None:
    found = layout(QKVParallelLinear(1, 2), [256, 128, 128], 512, "qkv_proj")
    assert [p.source[0] for p in found.parts] == [
        slice(256, 512),
        slice(128, 256),
        slice(128, 256),
    ]
    assert found.parts[0].shape == (512, 512)
    copied = layout(QKVParallelLinear(3, 4, 2), [256, 128, 128], 512, "qkv_proj")
    assert copied.parts[0].source[0] == slice(768, 1024)
    assert copied.parts[1].source[0] == slice(128, 256)  # two ranks have one copy
    assert copied.parts[1].shape == (256, 512)
    row = layout(RowParallelLinear(1, 2), [512], 256, "down_proj")
    assert row.parts[0].source == (slice(0, 512), slice(256, 512))
    assert row.parts[0].shape == (512, 512)


@pytest.mark.parametrize(
    ("layer", "sizes", "cols", "leaf", "why"),
    [
        (QKVParallelLinear(0, 2), [256, 64, 64], 256, "qkv_proj", "k_proj has 64 rows"),
        (RowParallelLinear(0, 2), [256], 192, "down_proj", "down_proj has 192 columns"),
        (ColumnParallelLinear(0, 2), [96], 256, "up", r"m\.0\.up has 96 rows"),
    ],
)
def test_shards_across_blocks_are_refused(
    layer: nn.Module, sizes: list[int], cols: int, leaf: str, why: str
) -> None:
    with pytest.raises(ModelError, match=why):
        layout(layer, sizes, cols, leaf)


def test_part_names() -> None:
    assert part_names("m.a.x", 1, {}) == ["m.a.x"]
    assert part_names("m.a.x", 2, {"x": ["y", "z"]}) == ["m.a.y", "m.a.z"]
    with pytest.raises(ModelError, match="holds 2 layers, and the model names 0"):
        part_names("m.a.x", 2, {})


def stored(sizes: list[int], cols: int) -> tuple[Any, WeightState, torch.Tensor]:
    layer: Any = QKVParallelLinear()
    state = WeightState()
    found = layout(layer, sizes, cols, "qkv_proj")
    setattr(layer, storage.LAYOUT, found)
    setattr(layer, storage.LOADED, {"q", "k", "v"})
    state.add(found)
    torch.manual_seed(0)
    weight = torch.randn(sum(sizes), cols).to(torch.bfloat16)
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    storage.store(layer, state)
    return layer, state, weight


@pytest.mark.parametrize("sizes", [[256, 128, 128], [192, 64, 64], [130, 7, 1]])
def test_parts_have_their_own_blocks(sizes: list[int]) -> None:
    layer, state, weight = stored(sizes, 192)
    assert set(dict(layer.named_parameters())) == {"weight", "weight_scale_inv"}
    scales = split_scales(storage.scales_of(layer), sizes, 128, 128)
    for part, codes, own in zip(
        torch.split(weight, sizes),
        torch.split(layer.weight, sizes),
        scales,
        strict=True,
    ):
        wanted = reference.quantize(part, 128, 128, False, "fp32", 1e-10)
        assert torch.equal(codes.view(torch.uint8), wanted[0].view(torch.uint8))
        assert torch.equal(own, wanted[1])
    state.check()


def test_a_second_model_is_loaded_later() -> None:
    """As a draft model that shares the config: loading it is no push."""
    _, state, _ = stored([128, 128, 128], 128)
    state.check()
    other = layout(ColumnParallelLinear(), [256], 128, "up")
    state.add(other)
    state.wrote(other.parts[0], torch.ones(2, 1))
    state.check()
    state.wrote(other.parts[0], torch.ones(2, 1))
    with pytest.raises(RefitError, match="wrote 1 of 4"):
        state.check()


def test_incomplete_layer_is_refused() -> None:
    layer, _, weight = stored([128, 128, 128], 128)
    setattr(layer, storage.LOADED, {"q", "v"})
    layer.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(ModelError, match=r"without m\.0\.k_proj"):
        storage.store(layer, WeightState())


def reload(layer: Any, state: WeightState, weight: torch.Tensor, keys: str) -> None:
    """As vLLM's layerwise reload: another BF16 weight, and the layer is stored anew."""
    del layer.weight, layer.weight_scale_inv
    layer.weight = nn.Parameter(weight, requires_grad=False)
    setattr(layer, storage.LOADED, set(keys))
    storage.store(layer, state)


def test_reload_of_some_parts_is_refused_later() -> None:
    layer, state, weight = stored([128, 128, 128], 128)
    garbage = weight.clone()
    garbage[128:] = float("nan")  # memory that no loader wrote
    reload(layer, state, garbage, "q")
    assert storage.scales_of(layer).isfinite().all()
    with pytest.raises(RefitError, match=r"wrote 1 of 3 FP8 layers, and not m\.0\.k"):
        state.check()
    reload(layer, state, weight, "qkv")
    state.check()


def test_reload_of_nan_is_refused_later() -> None:
    layer, state, weight = stored([128, 128, 128], 128)
    wrong = weight.clone()
    wrong[200, 3] = float("inf")
    reload(layer, state, wrong, "qkv")
    with pytest.raises(RefitError, match=r"NaN or infinity, first m\.0\.k_proj"):
        state.check()
    reload(layer, state, weight, "qkv")
    state.check()


def test_write_that_fails_makes_it_refuse() -> None:
    layer, state, weight = stored([128, 128, 128], 128)
    pushed = weight[:128] * 2
    made = storage.quantize_part(pushed, FLOW)
    part = getattr(layer, storage.LAYOUT).parts[0]
    wrong = (made[0], made[1].repeat(3, 1))
    into = layer.weight.data, storage.scales_of(layer)
    with pytest.raises(RuntimeError):  # scales of another size
        storage.write(part, wrong, *into, state)
    with pytest.raises(RefitError, match=r"writing m\.0\.q_proj failed"):
        state.check()
    layer.weight.weight_loader(layer.weight, weight)
    state.check()


def test_weights_that_cannot_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    _, state, _ = stored([128, 128, 128], 128)

    def fail(_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(torch, "isfinite", fail)
        with pytest.raises(MemoryError):
            state.wrote_all({"a": torch.ones(3)})
    with pytest.raises(RefitError, match="were not checked"):
        state.check()
    state.wrote_all({"a": torch.ones(3)})
    state.check()


def test_a_part_that_comes_again_begins_another_push() -> None:
    layer, state, weight = stored([128, 128, 128], 128)
    parts = torch.split(weight, 128)
    load = layer.weight.weight_loader
    for key in ("q", "k", "q", "k"):  # the first push ended here
        load(layer.weight, parts["qkv".index(key)], key)
    with pytest.raises(RefitError, match=r"wrote 2 of 3"):
        state.check()
    load(layer.weight, parts[2], "v")
    state.check()


@pytest.mark.parametrize("lost", ["q", "k", "v"])
@pytest.mark.parametrize("asked", [True, False], ids=["refused", "not asked"])
def test_complete_push_heals(lost: str, asked: bool) -> None:
    """Whichever part an earlier push left out."""
    layer, state, weight = stored([128, 128, 128], 128)
    parts = dict(zip("qkv", torch.split(weight, 128), strict=True))

    def push(keys: str) -> None:
        for key in keys:
            layer.weight.weight_loader(layer.weight, parts[key], key)

    push("qkv".replace(lost, ""))
    if asked:
        with pytest.raises(RefitError, match=rf"wrote 2 of 3.*m\.0\.{lost}_proj"):
            state.check()
    push("qkv")
    if not asked:  # which parts are of which push is not known, if one comes too late
        with contextlib.suppress(RefitError):
            state.check()
        push("qkv")
    state.check()
    push("q")
    with pytest.raises(RefitError, match=r"wrote 1 of 3"):
        state.check()


def test_part_of_the_next_push_is_refused() -> None:
    layer, state, weight = stored([128, 128, 128], 128)
    parts = dict(zip("qkv", torch.split(weight, 128), strict=True))
    for keys in ("qk", "v", "q", "kv"):  # chunks of two pushes
        for key in keys:
            layer.weight.weight_loader(layer.weight, parts[key], key)
        if keys in ("qk", "q"):
            with pytest.raises(RefitError, match="refuses"):
                state.check()
        else:
            state.check()


def test_pushed_shard_goes_to_its_place() -> None:
    layer, state, weight = stored([128, 128, 128], 128)
    pushed = torch.randn(128, 128).to(torch.bfloat16)
    layer.weight.weight_loader(layer.weight, pushed, "k")
    wanted, scales = reference.quantize(pushed, 128, 128, False, "fp32", 1e-10)
    got = layer.weight[128:256]
    assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(storage.scales_of(layer)[1:2], scales)
    with pytest.raises(RefitError, match=r"wrote 1 of 3 FP8 layers, and not m\.0\.q"):
        state.check()
    layer.weight.weight_loader(layer.weight, weight)  # all parts at once
    state.check()
    with pytest.raises(RefitError, match=r"shape \(64, 128\)"):
        layer.weight.weight_loader(layer.weight, pushed[:64], "q")


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_gemm_of_parts_is_the_gemms(rows: int) -> None:
    sizes = [192, 64, 64]
    layer, _, weight = stored(sizes, 192)
    x = torch.randn(rows, 192).to(torch.bfloat16)
    codes, scales = ops.quantize(x, 1, 128, False, "fp32", 1e-10, None)
    numbers = (1, 128, 128, 128, torch.bfloat16, "reference")
    b, b_scales = layer.weight.data, storage.scales_of(layer).data
    got = gemm_parts(codes, scales, b, b_scales, sizes, *numbers)
    wanted = []
    for part in torch.split(weight, sizes):
        made = ops.quantize(part, 128, 128, False, "fp32", 1e-10, None)
        wanted.append(ops.gemm(codes, scales, *made, *numbers))
    assert torch.equal(got, torch.cat(wanted, 1))
    with pytest.raises(PrecisionFlowError, match="3 rows of scales"):
        gemm_parts(codes, scales, b, b_scales[:3], sizes, *numbers)
    with pytest.raises(PrecisionFlowError, match="as many rows as its parts"):
        gemm_parts(codes, scales, b, b_scales, [192, 64], *numbers)


def test_settings() -> None:
    class Load:
        load_format = "dummy"

    class Engine:
        additional_config = {"jetrl": {"recipe": "rollout_only", "fuse": False}}  # noqa: RUF012
        load_config = Load()

    found = read_settings({"recipe": "bf16"}, Engine())
    assert (found.recipe.name, found.fuse, found.dummy) == ("rollout_only", False, True)
    Engine.additional_config = {"jetrl": {"recipes": "jetrl"}}
    with pytest.raises(Exception, match="did you mean 'recipe'"):
        read_settings({}, Engine())
    Engine.additional_config = {}
    for key in ("fuse", "exact"):  # text is true to Python, "false" too
        with pytest.raises(Exception, match=f"setting {key}='false' is unknown"):
            read_settings({key: "false"}, Engine())
