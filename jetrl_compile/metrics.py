"""How far a rollout policy is from the trainer's, under the metric names of verl.

Source: verl, `verl/utils/debug/metrics.py` (`calculate_debug_metrics`) and
`verl/trainer/ppo/rollout_corr_helper.py` (`compute_offpolicy_metrics`). The definitions
are the same, so curves line up; the arithmetic here is in float64, because in FP32 the
rounding of `exp(r) - r - 1` exceeds a k3_kl below 1e-7. Three things differ where verl
has no number: a masked-out NaN is ignored everywhere, the standard deviation of a
single token is 0, and a NaN or infinite log-prob is an error.
"""

import torch
from torch import Tensor

from jetrl_compile.errors import MetricsError

# verl's SAFETY_BOUND: log ratios are clamped to it before the chi-squared estimates.
LOG_RATIO_BOUND = 20.0


def mismatch_metrics(
    train_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor
) -> dict[str, float]:
    """Return every mismatch metric of one batch of sampled tokens.

    Args:
        train_log_probs: (B, T), floating, any memory order: log-prob in nats that the
            trainer gives each sampled token.
        rollout_log_probs: (B, T), floating: log-prob in nats under which the rollout
            model sampled it.
        mask: (B, T), bool: which tokens were sampled. Others are not read.

    Returns:
        The metrics `training/rollout_probs_diff_*` and `rollout_corr/*`, by name.

    Raises:
        MetricsError: Shapes or dtypes differ from those above, no token is selected, or
            a selected log-prob is NaN or infinite.
    """
    train, rollout, mask = _checked(train_log_probs, rollout_log_probs, mask)
    values = {**probability_differences(train, rollout, mask)}
    values |= off_policy_metrics(train, rollout, mask)
    return values


def probability_differences(
    train_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor
) -> dict[str, float]:
    """Return mean, max and standard deviation of |p_train - p_rollout| over tokens.

    Args:
        train_log_probs: As for `mismatch_metrics`.
        rollout_log_probs: As for `mismatch_metrics`.
        mask: As for `mismatch_metrics`.

    Returns:
        `training/rollout_probs_diff_{mean,max,std}`; the deviation is the unbiased one.

    Raises:
        MetricsError: As for `mismatch_metrics`.
    """
    train, rollout, mask = _checked(train_log_probs, rollout_log_probs, mask)
    diff = (train[mask].exp() - rollout[mask].exp()).abs()
    std = diff.std().item() if diff.numel() > 1 else 0.0
    return {
        "training/rollout_probs_diff_mean": diff.mean().item(),
        "training/rollout_probs_diff_max": diff.max().item(),
        "training/rollout_probs_diff_std": std,
    }


def off_policy_metrics(
    train_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor
) -> dict[str, float]:
    """Return verl's off-policy diagnostics, each under its name `rollout_corr/...`.

    With r = log p_train - log p_rollout of a token, `kl` is the mean of -r, `k3_kl` of
    exp(r) - r - 1, and `chi2_token` of exp(2r), less 1; `chi2_seq` is the same with r
    summed over each sequence. `log_ppl` and `ppl` are made from each sequence's mean
    log-prob, then averaged over sequences; a sequence without tokens has mean 0.

    Args:
        train_log_probs: As for `mismatch_metrics`.
        rollout_log_probs: As for `mismatch_metrics`.
        mask: As for `mismatch_metrics`.

    Raises:
        MetricsError: As for `mismatch_metrics`.
    """
    train, rollout, mask = _checked(train_log_probs, rollout_log_probs, mask)
    log_ratio = train - rollout
    bounded = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    sequence = log_ratio.sum(dim=-1).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    train_mean, rollout_mean = _row_mean(train, mask), _row_mean(rollout, mask)
    gap = rollout_mean - train_mean
    values = {
        "training_ppl": (-train_mean).exp().mean(),
        "training_log_ppl": (-train_mean).mean(),
        "kl": -log_ratio[mask].mean(),
        "k3_kl": (log_ratio.expm1() - log_ratio)[mask].mean(),
        "rollout_ppl": (-rollout_mean).exp().mean(),
        "rollout_log_ppl": (-rollout_mean).mean(),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": gap.abs().mean(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(),
        "ppl_ratio": gap.exp().mean(),
        "chi2_token": (2.0 * bounded).expm1()[mask].mean(),
        "chi2_seq": (2.0 * sequence).expm1().mean(),
    }
    # `+ 0.0` makes a negative zero positive.
    return {
        f"rollout_corr/{name}": value.item() + 0.0 for name, value in values.items()
    }


def _row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each row's selected elements, 0 for a row with none."""
    return values.sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)


def _checked(train: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Return both log-probs in float64 with zeros where masked out, and the mask."""
    shapes = [tuple(tensor.shape) for tensor in (train, rollout, mask)]
    if len(set(shapes)) > 1 or len(shapes[0]) != 2:
        raise MetricsError(
            f"trainer log-probs, rollout log-probs and mask have shapes {shapes[0]}, "
            f"{shapes[1]} and {shapes[2]}; needed is one shape (batch, tokens)"
        )
    if mask.dtype != torch.bool:
        raise MetricsError(f"the mask is {mask.dtype}; pass mask.bool()")
    if not (train.is_floating_point() and rollout.is_floating_point()):
        raise MetricsError(
            f"log-probs are {train.dtype} and {rollout.dtype}; needed is a floating "
            "dtype, best torch.float32"
        )
    if not mask.any():
        raise MetricsError("the mask selects no token; pass at least one sampled token")
    mask = mask.detach().cpu()
    result = []
    for side, tensor in (("trainer", train), ("rollout", rollout)):
        values = tensor.detach().cpu().double()
        values = values.where(mask, torch.zeros_like(values))
        if not values.isfinite().all():
            row, column = (~values.isfinite()).nonzero()[0].tolist()
            raise MetricsError(
                f"the {side} log-prob of token ({row}, {column}) is "
                f"{values[row, column].item()}; look for NaN or Inf in the {side} model"
            )
        result.append(values)
    return result[0], result[1], mask
