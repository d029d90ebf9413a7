"""The rollout model: stored bytes, refit, and bit-equal log-probs with the trainer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from jetrl_compile.bytes_check import check_bytes
from jetrl_compile.errors import ModelError, RefitError
from jetrl_compile.rollout import QuantizedLinear, make_rollout_model, refit


def tiny_llama(**more: Any) -> Any:
    """Tails everywhere: hidden 192, kv 64, intermediate 320."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=128,
        **more,
    )
    return LlamaForCausalLM(config)


def tiny_qwen2() -> Any:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=256,
            hidden_size=192,
            intermediate_size=320,
            num_hidden_layers=1,
            num_attention_heads=3,
            num_key_value_heads=1,
        )
    )


def tiny_gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_embd=192, n_layer=1, n_head=3, n_positions=128)
    )


def logits(model: nn.Module, tokens: Tensor, phase: str, recipe: str) -> Tensor:
    torch._dynamo.reset()
    options: dict[str, Any] = {"lowering": "aot", "phase": phase, "recipe": recipe}
    compiled = torch.compile(model, backend="jetrl", fullgraph=True, options=options)
    with torch.set_grad_enabled(phase == "train"):
        result: Tensor = compiled(input_ids=tokens, use_cache=False).logits.detach()
    return result


def step(model: nn.Module, tokens: Tensor) -> None:
    """One optimizer step on FP32 masters, large enough to change codes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    output = model(input_ids=tokens, labels=None, use_cache=False).logits
    output.float().logsumexp(-1).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2, tiny_gpt2])
@pytest.mark.parametrize("recipe", ["jetrl", "jetrl_ue8m0"])
def test_log_probs_are_equal_bit_for_bit_after_each_refit(
    make: Callable[[], nn.Module], recipe: str
) -> None:
    trainer = make().to(torch.bfloat16).eval()
    rollout: Any = make_rollout_model(trainer, recipe)
    tokens = torch.randint(256, (2, 20))
    first = logits(rollout, tokens, "rollout", recipe)
    assert torch.equal(first, logits(trainer, tokens, "train", recipe))
    step(trainer, tokens)
    assert not torch.equal(first, logits(trainer, tokens, "train", recipe))
    refit(rollout, trainer.named_parameters())
    second = logits(rollout, tokens, "rollout", recipe)
    assert torch.equal(second, logits(trainer, tokens, "train", recipe))
    assert check_bytes(trainer, rollout)[0].status == "passed"


def test_only_codes_and_scales_are_stored() -> None:
    rollout: Any = make_rollout_model(tiny_llama())
    layers = [m for m in rollout.modules() if isinstance(m, QuantizedLinear)]
    assert len(layers) == 14
    for layer in layers:
        stored = [*layer.parameters(), *layer.buffers()]
        weights = sum(t.numel() * t.element_size() for t in stored)
        assert weights <= 0.52 * 2 * layer.weight.numel()
    down = rollout.get_submodule("model.layers.0.mlp.down_proj")
    assert tuple(down.weight.shape) == (192, 320)
    assert tuple(down.scales.shape) == (2, 3), "tails have blocks of their own"


def test_masters_in_fp32_are_rounded_to_bf16_first() -> None:
    """Case 3: quantizing the FP32 master would change codes after a step only."""
    trainer = tiny_llama()
    trainer.load_state_dict(
        {k: v.to(torch.bfloat16).float() for k, v in trainer.state_dict().items()}
    )
    name = "model.layers.0.mlp.up_proj"

    def differing() -> float:
        layer = rollout.get_submodule(name)
        assert isinstance(layer, QuantizedLinear)
        master = trainer.get_submodule(name).weight.detach()
        block = master[:128, :128]  # quantized from FP32, as a faulty trainer would
        scale = block.abs().max() / 448
        codes = (block / scale).to(torch.float8_e4m3fn)
        stored = layer.weight[:128, :128]
        return float((codes.float() != stored.float()).float().mean())

    rollout: Any = make_rollout_model(trainer)
    assert differing() == 0.0, "equal at step 0: BF16 weights"
    step(trainer, torch.randint(256, (2, 20)))
    refit(rollout, trainer.named_parameters())
    assert 0.01 < differing() < 0.05
    assert check_bytes(trainer, rollout)[0].status == "passed"


def corrupt_layout(layer: QuantizedLinear) -> None:
    """Case 4: the codes in another memory order, shape and dtype kept."""
    codes = layer.weight.view(torch.uint8)
    scrambled = codes.t().contiguous().view(-1).view(codes.shape)
    layer.weight.copy_(scrambled.view(torch.float8_e4m3fn))


def transpose_storage(layer: QuantizedLinear) -> None:
    """Case 4, equal values but column-major storage."""
    layer.weight = (
        layer.weight.view(torch.uint8).t().contiguous().t().view(layer.weight.dtype)
    )


def round_scales_up(layer: QuantizedLinear) -> None:
    """Case 5: scales become powers of two, codes stay."""
    layer.scales.copy_(torch.exp2(torch.ceil(torch.log2(layer.scales))))


def flip_one_bit(layer: QuantizedLinear) -> None:
    layer.weight.view(torch.uint8)[3, 5] ^= 1


@pytest.mark.parametrize(
    ("damage", "attribute", "tensor"),
    [
        (corrupt_layout, "bytes", "weight"),
        (transpose_storage, "memory order", "weight"),
        (round_scales_up, "bytes", "weight_scale_inv"),
        (flip_one_bit, "bytes", "weight"),
    ],
)
def test_damaged_storage_fails_level_3_and_is_named(
    damage: Callable[[QuantizedLinear], None], attribute: str, tensor: str
) -> None:
    trainer = tiny_llama()
    rollout: Any = make_rollout_model(trainer)
    layer = rollout.get_submodule("model.layers.1.self_attn.k_proj")
    assert isinstance(layer, QuantizedLinear)
    damage(layer)
    result, differences = check_bytes(trainer, rollout)
    assert result.status == "failed"
    assert [d.attribute for d in differences] == [attribute]
    assert f"model.layers.1.self_attn.k_proj.{tensor}:" in differences[0].message


def test_a_stale_rollout_model_fails_level_3() -> None:
    trainer = tiny_llama()
    rollout: Any = make_rollout_model(trainer)
    with torch.no_grad():
        trainer.get_submodule("model.norm").weight.add_(1)
    _, differences = check_bytes(trainer, rollout)
    assert [d.operator for d in differences] == ["model.norm.weight"]


BAD_WEIGHTS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (
        lambda w: w.pop("model.norm.weight"),
        "1 of .* are missing, first model",
    ),
    "unknown": (lambda w: w.update(x=torch.ones(1)), "has no parameter x"),
    "shape": (
        lambda w: w.update({"model.norm.weight": torch.ones(3)}),
        r"model.norm.weight has shape \(3,\), the rollout model stores \(192,\)",
    ),
    "FP16": (
        lambda w: w.update({"model.norm.weight": torch.ones(192).half()}),
        "is float16; needed is BF16 or FP32",
    ),
    "NaN": (
        lambda w: w.update({"model.norm.weight": torch.full((192,), torch.nan)}),
        "holds NaN or infinity",
    ),
}


@pytest.mark.parametrize("kind", list(BAD_WEIGHTS))
def test_a_failed_refit_writes_nothing(kind: str) -> None:
    trainer = tiny_llama()
    rollout: Any = make_rollout_model(trainer)
    before = {k: v.clone() for k, v in rollout.state_dict().items()}
    change, message = BAD_WEIGHTS[kind]
    weights = {k: v.detach() * 2 for k, v in trainer.named_parameters()}
    change(weights)
    with pytest.raises(RefitError, match=message):
        refit(rollout, weights)
    after = rollout.state_dict()
    for name, value in before.items():
        assert torch.equal(after[name].view(torch.uint8), value.view(torch.uint8)), name


def test_refit_keeps_the_storage() -> None:
    trainer = tiny_llama()
    rollout: Any = make_rollout_model(trainer)
    before = {name: value.data_ptr() for name, value in rollout.state_dict().items()}
    refit(rollout, {k: v.detach() * 2 for k, v in trainer.named_parameters()})
    after = {name: value.data_ptr() for name, value in rollout.state_dict().items()}
    assert after == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ModelError, match=r"needed is BF16 or FP32: convert the model"):
        make_rollout_model(tiny_llama().to(dtype))


def test_nan_weights_are_refused() -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.get_submodule("model.layers.1.mlp.up_proj").weight[0, 0] = torch.nan
    with pytest.raises(ModelError, match=r"layers.1.mlp.up_proj.weight holds NaN"):
        make_rollout_model(model)


def test_a_tied_weight_stays_bf16_and_may_come_once() -> None:
    """Case 7."""
    trainer = tiny_llama(tie_word_embeddings=True)
    rollout: Any = make_rollout_model(trainer)
    head = rollout.get_submodule("lm_head")
    table = rollout.get_submodule("model.embed_tokens")
    assert isinstance(head, nn.Linear)
    assert head.weight.dtype == torch.bfloat16
    assert head.weight is table.weight
    weights = {k: v.detach() * 2 for k, v in trainer.named_parameters()}
    assert "lm_head.weight" not in weights
    refit(rollout, weights)
    wanted = (trainer.get_submodule("model.embed_tokens").weight * 2).bfloat16()
    assert torch.equal(head.weight, wanted)
