"""Group relative policy optimization: advantages, loss and optimizer steps.

Source: DeepSeekMath (arXiv 2402.03300), section 4.1, without its KL term; the loss is
PPO's clipped one (arXiv 1707.06347), averaged over all sampled tokens of the batch.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_compile.errors import ModelError
from jetrl_compile.examples.sampling import Progress, Rollouts, token_log_probs

# As verl's: added to a group's standard deviation.
EPSILON = 1e-6


@dataclass(frozen=True)
class Step:
    """What one optimizer step did.

    Attributes:
        loss: The clipped loss before the step.
        clipped: Fraction of tokens whose ratio was clipped.
        grad_norm: L2 norm of all gradients before they were clipped; 0 without any, as
            when no group has both good and bad responses.
    """

    loss: float
    clipped: float
    grad_norm: float


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Return each response's reward relative to its group's.

    Args:
        rewards: (B,), floating; the responses to a prompt are neighbours.
        group_size: Responses to each prompt.

    Returns:
        (B,), same dtype: reward less the group's mean, over its standard deviation.

    Raises:
        ModelError: B is no multiple of `group_size`, or that is below 2.
    """
    if group_size < 2 or rewards.numel() % group_size:
        raise ModelError(
            f"{rewards.numel()} rewards in groups of {group_size}; needed are whole "
            "groups of at least 2"
        )
    groups = rewards.reshape(-1, group_size)
    centered = groups - groups.mean(dim=1, keepdim=True)
    deviation = groups.std(dim=1, keepdim=True)
    # Equal rewards teach nothing, although their mean may round to another number.
    centered = centered.where(deviation > EPSILON, 0.0)
    return (centered / (deviation + EPSILON)).reshape(rewards.shape)


def clipped_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float = 0.2,
) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped policy loss, and the fraction of tokens that it clipped.

    Args:
        log_probs: (B, T), FP32, nats: of the policy that is trained; differentiable.
        old_log_probs: (B, T), FP32, nats: of the same tokens before this batch's first
            step.
        advantages: (B,), FP32: one for all tokens of a response.
        mask: (B, T), bool: the sampled tokens.
        clip: The ratio stays within 1 - clip and 1 + clip.
    """
    ratio = torch.exp(log_probs - old_log_probs)
    gain = advantages.unsqueeze(1)
    plain, bounded = ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain
    losses = -torch.minimum(plain, bounded)
    count = mask.sum()
    clipped = ((bounded < plain) & mask).sum() / count
    return losses.where(mask, 0.0).sum() / count, clipped


class Trainer:
    """Takes GRPO steps on a policy, with AdamW on FP32 master weights.

    Two ways to keep them, by the dtype of the policy's parameters. FP32 parameters are
    the master weights themselves; forward and backward run under `torch.autocast` in
    BF16. For BF16 parameters the trainer keeps FP32 copies: gradients go to them, and
    after a step they are rounded back into the parameters. (An optimizer on BF16
    weights alone would lose most updates: below 1/512 of a weight they round to none.)

    Attributes:
        policy: The model that is trained.
        masters: The FP32 master weight of each trained parameter, by name.
    """

    def __init__(
        self,
        policy: nn.Module,
        run: Callable[..., Any] | None = None,
        *,
        learning_rate: float = 1e-6,
        clip: float = 0.2,
        max_grad_norm: float = 1.0,
        micro_batch: int | None = None,
    ) -> None:
        """Make the master weights and the optimizer.

        Args:
            policy: The model whose parameters are trained.
            run: What is called for a forward: the compiled policy; None for the policy.
            learning_rate: Of AdamW.
            clip: See `clipped_loss`.
            max_grad_norm: Gradients are scaled down to this L2 norm.
            micro_batch: Rows of one forward and backward, whose gradients add up; None
                for all rows at once.
        """
        self.policy = policy
        self.run: Callable[..., Any] = policy if run is None else run
        self.clip, self.max_grad_norm = clip, max_grad_norm
        self.micro_batch = micro_batch
        trained = {n: p for n, p in policy.named_parameters() if p.requires_grad}
        self.masters = {
            name: p if p.dtype != torch.bfloat16 else nn.Parameter(p.detach().float())
            for name, p in trained.items()
        }
        self._pairs = [(trained[n], m) for n, m in self.masters.items()]
        self.optimizer = torch.optim.AdamW(
            self.masters.values(), lr=learning_rate, weight_decay=0.0
        )

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Compute in BF16 where parameters are FP32."""
        first, _ = self._pairs[0]
        is_master = first.dtype == torch.float32
        with torch.autocast(first.device.type, torch.bfloat16, enabled=is_master):
            yield

    def log_probs(self, rollouts: Rollouts, progress: Progress | None = None) -> Tensor:
        """Return the policy's log-probs of the sampled tokens, without gradients.

        Args:
            rollouts: The sampled responses.
            progress: Called after each micro-batch with how many are done, and of how
                many.

        Returns:
            (B, T), FP32, nats; 0 where masked out.
        """
        batches = self._micro_batches(torch.arange(len(rollouts.tokens)))
        parts = []
        for done, rows in enumerate(batches, 1):
            with torch.no_grad(), self.autocast():
                parts.append(token_log_probs(self.run, *_rows(rollouts, rows)))
            if progress is not None:
                progress(done, len(batches))
        return torch.cat(parts)

    def step(
        self,
        rollouts: Rollouts,
        old_log_probs: Tensor,
        advantages: Tensor,
        progress: Progress | None = None,
    ) -> Step:
        """Take one optimizer step on a batch.

        Rows whose advantage is 0 give no gradient and are not run.

        Args:
            rollouts: The sampled responses.
            old_log_probs: (B, T), FP32, nats: by the trainer, before the first step.
            advantages: (B,), FP32.
            progress: Called after each micro-batch with how many are done, and of how
                many.
        """
        for parameter, _ in self._pairs:
            parameter.grad = None
        total = rollouts.response_mask.sum().item()
        loss_sum = clipped_sum = 0.0
        batches = self._micro_batches(advantages.nonzero().flatten())
        for done, rows in enumerate(batches, 1):
            tokens, attention_mask, mask = _rows(rollouts, rows)
            with self.autocast():
                new = token_log_probs(self.run, tokens, attention_mask, mask)
            loss, clipped = clipped_loss(
                new, old_log_probs[rows], advantages[rows], mask, self.clip
            )
            share = mask.sum().item() / total
            torch.autograd.backward(loss * share)
            loss_sum += loss.item() * share
            clipped_sum += clipped.item() * share
            if progress is not None:
                progress(done, len(batches))
        return Step(loss_sum, clipped_sum, self._update() if batches else 0.0)

    def _update(self) -> float:
        """Bring gradients to the master weights, step, and round back; return norm."""
        for parameter, master in self._pairs:
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.to(master.dtype)
                parameter.grad = None
        masters = list(self.masters.values())
        norm: float = nn.utils.clip_grad_norm_(masters, self.max_grad_norm).item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, master in self._pairs:
                if master is not parameter:
                    parameter.copy_(master)
        return norm

    def _micro_batches(self, rows: Tensor) -> list[Tensor]:
        """Return row numbers in portions."""
        size = self.micro_batch or max(len(rows), 1)
        return [rows[start : start + size] for start in range(0, len(rows), size)]


def _rows(rollouts: Rollouts, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        rollouts.tokens[rows],
        rollouts.attention_mask[rows],
        rollouts.response_mask[rows],
    )
