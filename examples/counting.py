"""A task with long answers, made with reasoning-gym: count from one number to another.

Answers take 600 to 1000 tokens, and SmolLM2-135M-Instruct gives some of them in part
(docs/log.md): a policy can learn it. Import it where reasoning-gym is installed.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reasoning_gym.dataset import ProceduralDataset


@dataclass
class CountingConfig:
    """What is asked.

    Attributes:
        least: How many numbers a right answer has, at least.
        most: How many it has at most.
        largest: The largest first number; the smallest is 1.
        seed: Of the questions.
        size: How many questions.
    """

    least: int = 150
    most: int = 200
    largest: int = 99
    seed: int = 0
    size: int = 500


class CountingDataset(ProceduralDataset):
    """Questions as "Count from 7 to 206.", answered with numbers after each other."""

    def __init__(self, config: CountingConfig) -> None:
        """Make `config.size` questions."""
        super().__init__(config=config, seed=config.seed, size=config.size)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return reasoning-gym's record of a question."""
        drawn = random.Random(f"{self.seed} {index}")
        start = drawn.randint(1, self.config.largest)
        end = start + drawn.randint(self.config.least, self.config.most) - 1
        return {
            "question": f"Count from {start} to {end}.",
            "answer": ", ".join(map(str, range(start, end + 1))),
            "metadata": {"start": start, "end": end},
        }

    def score_answer(self, answer: str | None, entry: Mapping[str, Any]) -> float:
        """Return how many numbers came in their order, over how many came or should.

        The first is looked for anywhere, the next one after it, and so on.
        """
        start = int(entry["metadata"]["start"])
        end = int(entry["metadata"]["end"])
        found = re.findall(r"\d+", answer) if isinstance(answer, str) else []
        expected = start
        for number in found:
            expected += expected <= end and number == str(expected)
        return (expected - start) / max(end + 1 - start, len(found))
