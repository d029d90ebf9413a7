import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from jetrl_compile.errors import ModelError
from jetrl_compile.examples.grpo import Trainer, clipped_loss, group_advantages
from jetrl_compile.examples.sampling import left_pad, sample


def test_advantages() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5])
    advantages = group_advantages(rewards, 4)
    deviation = math.sqrt(4 * 0.25 / 3)
    expected = torch.tensor([1.0, -1.0, -1.0, 1.0]) * 0.5 / deviation
    torch.testing.assert_close(advantages[:4], expected, rtol=1e-5, atol=0)
    assert advantages[4:].eq(0).all(), "equal rewards teach nothing"


@pytest.mark.parametrize("size", [1, 3])
def test_groups_are_whole(size: int) -> None:
    with pytest.raises(ModelError, match="groups of"):
        group_advantages(torch.zeros(4), size)


def test_loss_by_hand() -> None:
    # Ratios 2, 0.5, 1.1 and one masked token, for advantages 1 and -1.
    old = torch.zeros(2, 2)
    new = torch.tensor([[2.0, 1.1], [0.5, 9.0]]).log().requires_grad_()
    mask = torch.tensor([[True, True], [True, False]])
    loss, clipped = clipped_loss(new, old, torch.tensor([1.0, -1.0]), mask, clip=0.2)
    assert loss.item() == pytest.approx(-(1.2 + 1.1 - 0.8) / 3)
    assert clipped.item() == pytest.approx(2 / 3)
    torch.autograd.backward(loss)
    assert new.grad is not None
    expected = torch.tensor([[0.0, -1.1 / 3], [0.0, 0.0]])
    torch.testing.assert_close(new.grad, expected)


def test_loss_at_the_old_policy_is_the_policy_gradient() -> None:
    new = torch.randn(3, 4).clamp(max=0).requires_grad_()
    mask = torch.ones(3, 4, dtype=torch.bool)
    advantages = torch.tensor([1.0, -2.0, 0.5])
    loss, clipped = clipped_loss(new, new.detach(), advantages, mask)
    torch.autograd.backward(loss)
    assert new.grad is not None
    torch.testing.assert_close(new.grad, -advantages.unsqueeze(1).expand(3, 4) / 12)
    assert clipped.item() == 0


def tiny() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def batch(policy: Any, seed: int) -> Any:
    tokens, mask = left_pad([[5, 6, 7], [9]], pad=0)
    return sample(
        policy,
        tokens,
        mask,
        max_new_tokens=5,
        stop=[2],
        pad=0,
        samples=8,
        generator=torch.Generator().manual_seed(seed),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_raise_the_reward(dtype: torch.dtype) -> None:
    policy = tiny().to(dtype)
    trainer = Trainer(policy, learning_rate=3e-3, micro_batch=5)
    means = []
    for step in range(10):
        rollouts = batch(policy, step)
        rewards = torch.tensor(
            [float(11 in response) for response in rollouts.responses]
        )
        means.append(rewards.mean().item())
        old = trainer.log_probs(rollouts)
        for _ in range(2):
            done = trainer.step(rollouts, old, group_advantages(rewards, 8))
            assert math.isfinite(done.loss)
            assert done.grad_norm >= 0
    assert sum(means[-3:]) > sum(means[:3]) + 0.5
    assert {p.dtype for p in policy.parameters()} == {dtype}


def test_micro_batches_add_up() -> None:
    results = []
    for micro_batch in (None, 3):
        policy = tiny().double()
        trainer = Trainer(policy, micro_batch=micro_batch, max_grad_norm=1e9)
        rollouts = batch(policy, 0)
        old = trainer.log_probs(rollouts) - 0.1
        advantages = torch.linspace(-1, 1, 16)
        done = trainer.step(rollouts, old, advantages)
        weights = [p.detach() for p in policy.parameters()]
        results.append((done, weights))
    (whole, weights), (parts, other) = results
    # Log-probs are FP32, whatever the model is.
    assert parts.loss == pytest.approx(whole.loss, abs=1e-6)
    assert parts.clipped == pytest.approx(whole.clipped)
    assert parts.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4)
    torch.testing.assert_close(other, weights, rtol=1e-6, atol=1e-8)


def test_masters_keep_what_bf16_would_lose() -> None:
    policy = tiny().to(torch.bfloat16)
    trainer = Trainer(policy, learning_rate=1e-5)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    rollouts = batch(policy, 0)
    old = trainer.log_probs(rollouts)
    for _ in range(3):
        trainer.step(rollouts, old, torch.linspace(-1, 1, 16))
    for name, parameter in policy.named_parameters():
        master = trainer.masters[name]
        assert master.dtype == torch.float32
        assert not torch.equal(master, before[name].float()), name
        assert torch.equal(parameter, master.to(torch.bfloat16)), name
        assert parameter.grad is None


def test_rows_without_advantage_are_not_run() -> None:
    policy, rows = tiny(), []

    def run(**kwargs: Any) -> Any:
        rows.append(len(kwargs["input_ids"]))
        return policy(**kwargs)

    trainer = Trainer(policy, run)
    rollouts = batch(policy, 0)
    old = trainer.log_probs(rollouts)
    advantages = torch.zeros(16)
    done = trainer.step(rollouts, old, advantages)
    assert (done.loss, done.grad_norm, rows) == (0.0, 0.0, [16])
    advantages[3] = 1.0
    assert trainer.step(rollouts, old, advantages).grad_norm > 0
    assert rows == [16, 1]


def test_the_compiled_policy_is_what_runs() -> None:
    policy, calls = tiny(), []

    def run(**kwargs: Any) -> Any:
        calls.append(torch.is_autocast_enabled("cpu"))
        return policy(**kwargs)

    trainer = Trainer(policy, run)
    rollouts = batch(policy, 0)
    old = trainer.log_probs(rollouts)
    trainer.step(rollouts, old, torch.ones(16))
    assert calls == [True, True], "FP32 master weights compute under autocast"
