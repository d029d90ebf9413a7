import math

import pytest
import torch
from torch import Tensor

from jetrl_compile.errors import MetricsError
from jetrl_compile.metrics import mismatch_metrics


def literal(train: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, float]:
    """The definitions once more, token by token, in Python floats."""
    rows, diffs, ratios = [], [], []
    for b in range(mask.shape[0]):
        picked = [t for t in range(mask.shape[1]) if mask[b, t]]
        p = [float(train[b, t]) for t in picked]
        q = [float(rollout[b, t]) for t in picked]
        diffs += [abs(math.exp(x) - math.exp(y)) for x, y in zip(p, q, strict=True)]
        row = [x - y for x, y in zip(p, q, strict=True)]
        ratios += row
        n = max(len(picked), 1)
        rows.append((sum(p) / n, sum(q) / n, sum(row)))
    mean = sum(diffs) / len(diffs)
    variance = sum((d - mean) ** 2 for d in diffs) / max(len(diffs) - 1, 1)

    def average(values: list[float]) -> float:
        return sum(values) / len(values)

    def clamp(value: float) -> float:
        return min(max(value, -20.0), 20.0)

    gaps = [q - p for p, q, _ in rows]
    return {
        "training/rollout_probs_diff_mean": mean,
        "training/rollout_probs_diff_max": max(diffs),
        "training/rollout_probs_diff_std": math.sqrt(variance),
        "rollout_corr/training_ppl": average([math.exp(-p) for p, _, _ in rows]),
        "rollout_corr/training_log_ppl": average([-p for p, _, _ in rows]),
        "rollout_corr/kl": average([-r for r in ratios]),
        "rollout_corr/k3_kl": average([math.exp(r) - r - 1 for r in ratios]),
        "rollout_corr/rollout_ppl": average([math.exp(-q) for _, q, _ in rows]),
        "rollout_corr/rollout_log_ppl": average([-q for _, q, _ in rows]),
        "rollout_corr/log_ppl_diff": average(gaps),
        "rollout_corr/log_ppl_abs_diff": average([abs(g) for g in gaps]),
        "rollout_corr/log_ppl_diff_max": max(gaps),
        "rollout_corr/log_ppl_diff_min": min(gaps),
        "rollout_corr/ppl_ratio": average([math.exp(g) for g in gaps]),
        "rollout_corr/chi2_token": average([math.exp(2 * clamp(r)) for r in ratios])
        - 1,
        "rollout_corr/chi2_seq": average([math.exp(2 * clamp(s)) for _, _, s in rows])
        - 1,
    }


def test_hand_computed() -> None:
    # p: 1/2, 1/4; q: 1/4, 1/4. Row 2 has one token, p = 1/2 and q = 1.
    train = torch.log(torch.tensor([[0.5, 0.25], [0.5, 1.0]], dtype=torch.float64))
    rollout = torch.log(torch.tensor([[0.25, 0.25], [1.0, 1.0]], dtype=torch.float64))
    mask = torch.tensor([[True, True], [True, False]])
    values = mismatch_metrics(train, rollout, mask)
    log2 = math.log(2)
    expected = {
        "training/rollout_probs_diff_mean": 0.25,
        "training/rollout_probs_diff_max": 0.5,
        "training/rollout_probs_diff_std": 0.25,
        "rollout_corr/kl": 0.0,  # (-log 2 + 0 + log 2) / 3
        "rollout_corr/k3_kl": (2 - log2 - 1 + 0 + 0.5 + log2 - 1) / 3,
        "rollout_corr/training_ppl": (math.sqrt(8) + 2) / 2,
        "rollout_corr/rollout_ppl": (4 + 1) / 2,
        "rollout_corr/training_log_ppl": (1.5 * log2 + log2) / 2,
        "rollout_corr/rollout_log_ppl": (2 * log2 + 0) / 2,
        "rollout_corr/log_ppl_diff": (-0.5 * log2 + log2) / 2,
        "rollout_corr/log_ppl_abs_diff": (0.5 * log2 + log2) / 2,
        "rollout_corr/log_ppl_diff_max": log2,
        "rollout_corr/log_ppl_diff_min": -0.5 * log2,
        "rollout_corr/ppl_ratio": (math.sqrt(0.5) + 2) / 2,
        "rollout_corr/chi2_token": (4 + 1 + 0.25) / 3 - 1,
        "rollout_corr/chi2_seq": (4 + 0.25) / 2 - 1,
    }
    assert values == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_equals_the_literal_definitions(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    train = -torch.rand(4, 9, generator=generator) * 5
    rollout = train - torch.randn(4, 9, generator=generator) * 0.3
    mask = torch.rand(4, 9, generator=generator) < 0.6
    mask[seed % 4] = False
    mask[(seed + 1) % 4, 0] = True
    values = mismatch_metrics(train, rollout.clamp(max=0), mask)
    expected = literal(train, rollout.clamp(max=0), mask)
    assert list(values) == list(expected)
    assert values == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_equal_policies_have_no_mismatch() -> None:
    log_probs = -torch.rand(3, 5)
    values = mismatch_metrics(log_probs, log_probs, torch.ones(3, 5, dtype=torch.bool))
    ones = {"training_ppl", "rollout_ppl", "training_log_ppl", "rollout_log_ppl"}
    for name, value in values.items():
        if name.partition("/")[2] not in {*ones, "ppl_ratio"}:
            assert value == 0.0, name
            assert not math.copysign(1, value) < 0, f"{name} is a negative zero"
    assert values["rollout_corr/ppl_ratio"] == 1.0


def test_tiny_gaps_do_not_drown_in_rounding() -> None:
    rollout = torch.full((1, 4), -1.0)
    train = rollout + 2.0**-20
    values = mismatch_metrics(train, rollout, torch.ones(1, 4, dtype=torch.bool))
    assert values["rollout_corr/k3_kl"] == pytest.approx(2.0**-41, rel=1e-5)


def test_masked_tokens_are_not_read() -> None:
    train = torch.tensor([[-1.0, float("nan")]], requires_grad=True)
    rollout = torch.tensor([[-2.0, float("-inf")]])
    mask = torch.tensor([[True, False]])
    values = mismatch_metrics(train, rollout, mask)
    assert values["rollout_corr/kl"] == -1.0
    assert values["training/rollout_probs_diff_std"] == 0.0
    assert all(math.isfinite(value) for value in values.values())


def test_a_token_that_the_trainer_thinks_impossible_is_bounded() -> None:
    rollout, mask = torch.tensor([[-0.1]]), torch.tensor([[True]])
    values = mismatch_metrics(torch.tensor([[100.0]]), rollout, mask)
    assert values["rollout_corr/chi2_token"] == pytest.approx(math.exp(40) - 1)


@pytest.mark.parametrize(
    ("train", "rollout", "mask", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2, 3), "one shape"),
        (torch.zeros(3), torch.zeros(3), torch.ones(3), "one shape"),
        (torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3), "mask.bool()"),
        (torch.zeros(1, 1).int(), torch.zeros(1, 1), torch.ones(1, 1) > 0, "floating"),
        (torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2) > 0, "no token"),
        (torch.zeros(1, 2), torch.tensor([[0.0, float("nan")]]), torch.ones(1, 2) > 0,
         r"rollout log-prob of token \(0, 1\) is nan"),
        (torch.tensor([[float("-inf")]]), torch.zeros(1, 1), torch.ones(1, 1) > 0,
         r"trainer log-prob of token \(0, 0\) is -inf"),
    ],
)  # fmt: skip
def test_bad_input(train: Tensor, rollout: Tensor, mask: Tensor, message: str) -> None:
    with pytest.raises(MetricsError, match=message):
        mismatch_metrics(train, rollout, mask)
