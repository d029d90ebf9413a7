"""The rollout's end of a weight sync: BF16 and codes, whole and on two ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm_engine_model import EngineModel, make_trainer

from jetrl_compile.digests import StoredLayer
from jetrl_compile.errors import ModelError, RefitError
from jetrl_compile.integrations.vllm.live_model import config_of
from jetrl_compile.integrations.vllm.stored import expert_paths, stored_tensors
from jetrl_compile.integrations.vllm.sync_receiver import SyncReceiver
from jetrl_compile.recipe import JETRL

SIZES = {"num_key_value_heads": 4, "intermediate_size": 512}
UP = "model.layers.1.mlp.up_proj.weight"


def new_weights(trainer: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() * 1.5 + 0.001 for n, p in trainer.named_parameters()}


def as_codes(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    assert JETRL.flows is not None
    layer = StoredLayer(JETRL.flows.fprop_w, transposed=False)
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        path, _, leaf = name.rpartition(".")
        if path.endswith("_proj") and leaf == "weight":
            codes, scales = layer.quantize(weight)
            found |= {name: codes, f"{path}.{layer.scale_leaf}": scales}
        else:
            found[name] = weight
    return found


def push(model: Any, weights: dict[str, Tensor], size: int = 5) -> SyncReceiver:
    """A sync in buckets."""
    receiver = SyncReceiver(model)
    receiver.begin(1)
    items = list(weights.items())
    for start in range(0, len(items), size):
        bucket = [(name, tensor.clone()) for name, tensor in items[start:][:size]]
        model.load_weights(receiver.take(bucket))
        for _, tensor in bucket:  # the buffer of a bucket is used again
            tensor.zero_()
    return receiver


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_codes_give_the_bytes_of_bf16(kind: str, ranks: int) -> None:
    trainer = make_trainer(kind, **SIZES)
    weights = new_weights(trainer)
    for rank in range(ranks):
        pair = [EngineModel(trainer, rank=rank, ranks=ranks) for _ in range(2)]
        for model, given in zip(pair, (weights, as_codes(weights)), strict=True):
            push(model, given).release()
            config_of(model).state.check()
        for one, other in zip(*(m.named_parameters() for m in pair), strict=True):
            same = one[1].view(torch.uint8).equal(other[1].view(torch.uint8))
            assert same, one[0]


def test_names_and_places_of_a_rank() -> None:
    trainer = make_trainer("qwen2", **SIZES)
    found = {
        item.name: item
        for item in stored_tensors(EngineModel(trainer, rank=1, ranks=2))
    }
    named = dict(trainer.named_parameters())
    scales = {name for name in found if name.endswith("weight_scale_inv")}
    assert set(found) - scales == set(named)
    assert len(scales) == 14
    for name, item in found.items():
        if name in named:
            assert item.shape == tuple(named[name].shape)
    assert found[UP].bounds == ((256, 512), (0, 256))
    down = "model.layers.1.mlp.down_proj.weight_scale_inv"
    assert found[down].bounds == ((0, 2), (2, 4))
    assert found["model.layers.0.self_attn.k_proj.bias"].bounds == ((128, 256),)
    assert found["model.norm.weight"].bounds == ()
    assert expert_paths(EngineModel(trainer)) == ()


def test_what_does_not_come() -> None:
    trainer = make_trainer("llama", **SIZES)
    model = EngineModel(trainer)
    codes = as_codes(new_weights(trainer))
    for name in ("model.norm.weight", UP, f"{UP}_scale_inv"):
        given = {key: tensor for key, tensor in codes.items() if key != name}
        receiver = push(model, given)
        with pytest.raises(RefitError, match=f"step 1 left out .*{name}"):
            receiver.release()
        with pytest.raises(RefitError, match="sync of step 1 was not finished"):
            config_of(model).state.check()
    push(model, codes).release()
    config_of(model).state.check()


def test_loaders_that_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's models skip names that they do not know."""
    trainer = make_trainer("llama", **SIZES)
    model = EngineModel(trainer)
    with monkeypatch.context() as patched:
        patched.setattr(model, "load_weights", lambda _: None)
        receiver = push(model, new_weights(trainer))
    with pytest.raises(RefitError, match="did not write all FP8 layers"):
        receiver.release()
    with pytest.raises(RefitError, match="sync of step 1 was not finished"):
        config_of(model).state.check()
    push(model, new_weights(trainer)).release()
    config_of(model).state.check()


def test_what_does_not_fit() -> None:
    trainer = make_trainer("llama", **SIZES)
    model = EngineModel(trainer)
    codes = as_codes(new_weights(trainer))
    receiver = SyncReceiver(model)
    receiver.begin(1)
    with pytest.raises(RefitError, match=r"e4m3 \(511, 256\), the engine stores e4m3"):
        receiver.take([(UP, codes[UP][:511])])
    scales = codes[f"{UP}_scale_inv"]
    with pytest.raises(RefitError, match=r"scale_inv came as bf16 \(4, 2\)"):
        receiver.take([(f"{UP}_scale_inv", scales.bfloat16())])
    wrong = {**codes, f"{UP}_scale_inv": scales * float("nan")}
    with pytest.raises(RefitError, match=r"NaN.*up_proj"):
        push(model, wrong)
    with pytest.raises(ModelError, match="without quantization='jetrl'"):
        SyncReceiver(nn.Linear(2, 2))
