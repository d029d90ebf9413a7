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
from jetrl_compile.examples.sampling import Rollouts, token_log_probs

# As verl: keeps a group of equal rewards from being divided by zero.
EPSILON = 1e-6


@dataclass(frozen=True)
class Step:
    """What one optimizer step did.

    Attributes:
        loss: The clipped loss before the step.
        clipped: Fraction of tokens whose ratio was clipped.
        grad_norm: L2 norm of all gradients before they were clipped.
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
    """Takes GRPO steps on a policy, with AdamW.

    Two ways to keep weights, by the dtype of the policy's parameters: FP32 master
    weights, with forward and backward under `torch.autocast` in BF16, or BF16
    parameters that the optimizer updates in BF16.
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
        """Make the optimizer.

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
        self.parameters = [p for p in policy.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=learning_rate, weight_decay=0.0
        )

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Compute in BF16 where parameters are FP32."""
        first = self.parameters[0]
        master = first.dtype == torch.float32
        with torch.autocast(first.device.type, torch.bfloat16, enabled=master):
            yield

    def log_probs(self, rollouts: Rollouts) -> Tensor:
        """Return the policy's log-probs of the sampled tokens, without gradients.

        Returns:
            (B, T), FP32, nats; 0 where masked out.
        """
        with torch.no_grad(), self.autocast():
            parts = [
                token_log_probs(self.run, *_rows(rollouts, rows))
                for rows in self._micro_batches(rollouts)
            ]
        return torch.cat(parts)

    def step(
        self, rollouts: Rollouts, old_log_probs: Tensor, advantages: Tensor
    ) -> Step:
        """Take one optimizer step on a batch.

        Args:
            rollouts: The sampled responses.
            old_log_probs: (B, T), FP32, nats: by the trainer, before the first step.
            advantages: (B,), FP32.
        """
        self.optimizer.zero_grad(set_to_none=True)
        total = rollouts.response_mask.sum().item()
        loss_sum = clipped_sum = 0.0
        for rows in self._micro_batches(rollouts):
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
        norm = nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        self.optimizer.step()
        return Step(loss_sum, clipped_sum, norm.item())

    def _micro_batches(self, rollouts: Rollouts) -> Iterator[slice]:
        """Yield the rows of each micro-batch."""
        batch = rollouts.tokens.shape[0]
        size = self.micro_batch or batch
        for start in range(0, batch, size):
            yield slice(start, min(start + size, batch))


def _rows(rollouts: Rollouts, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    return (
        rollouts.tokens[rows],
        rollouts.attention_mask[rows],
        rollouts.response_mask[rows],
    )
