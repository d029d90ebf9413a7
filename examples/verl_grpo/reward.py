"""Rewards for verl: `reward.custom_reward_function.path=.../reward.py`."""

import functools
import importlib
import json
from collections.abc import Mapping
from typing import Any

from jetrl_compile.examples.tasks import TASKS, extract_answer


def verified(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    **_: Any,
) -> float:
    """Return reasoning-gym's score of the last number in a response, from 0 to 1."""
    entry = json.loads((extra_info or {})["entry"])
    dataset = _dataset(data_source.rpartition("/")[2])
    return float(dataset.score_answer(extract_answer(solution_str), entry))


def digit_share(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    **_: Any,
) -> float:
    """Return the share of digits in a response: what a random model can learn."""
    return sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)


@functools.lru_cache
def _dataset(name: str) -> Any:
    gym: Any = importlib.import_module("reasoning_gym")
    return gym.create_dataset(name, size=1, seed=0, **TASKS[name])
