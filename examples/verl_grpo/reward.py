"""Rewards for verl: `reward.custom_reward_function.path=.../reward.py`."""

import functools
import json
from collections.abc import Mapping
from typing import Any

from jetrl_compile.examples.tasks import COUNTING, extract_answer, make_dataset


def verified(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    **_: Any,
) -> float:
    """Return reasoning-gym's score of a response, from 0 to 1.

    The last number is scored, and of counting all.
    """
    entry = json.loads((extra_info or {})["entry"])
    name = data_source.rpartition("/")[2]
    answer = solution_str if name == COUNTING else extract_answer(solution_str)
    return float(_dataset(name).score_answer(answer, entry))


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
    return make_dataset(name, 1, 0)
