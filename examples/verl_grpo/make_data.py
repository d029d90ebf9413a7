"""Write reasoning-gym tasks as the parquet files that verl reads.

python -m jetrl_compile.examples.verl_grpo.make_data FOLDER --task basic_arithmetic
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jetrl_compile.examples.tasks import COUNTING, TASKS, instruction, make_dataset

SOURCE = "reasoning_gym"
STRIDE = 1_000_003  # between seeds


def rows(
    names: Sequence[str], count: int, seed: int, split: str
) -> Iterator[dict[str, Any]]:
    """Yield verl's rows of tasks, taking turns among datasets of reasoning-gym.

    Each question comes after a worked example of its dataset, the same for all seeds.

    Args:
        names: What `jetrl_compile.examples.tasks.make_dataset` knows.
        count: How many rows.
        seed: Of reasoning-gym's generators.
        split: "train" or "val".

    Raises:
        ModelError: A name is unknown, or reasoning-gym is not installed.
    """
    each = -(-count // len(names))
    made = {name: make_dataset(name, each + 1, seed) for name in names}
    examples = {  # and so the question that is left out if the seed is 0
        name: make_dataset(name, 1, 0, worked=True)[0] for name in names
    }
    for index in range(count):
        name = names[index % len(names)]
        worked, entry = examples[name], made[name][1 + index // len(names)]
        prompt = [
            {"role": "system", "content": instruction(name)},
            {"role": "user", "content": worked["question"]},
            {"role": "assistant", "content": str(worked["answer"])},
            {"role": "user", "content": entry["question"]},
        ]
        yield {
            "data_source": f"{SOURCE}/{name}",
            "prompt": prompt,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(entry["answer"])},
            "extra_info": {
                "index": index,
                "split": split,
                "entry": json.dumps(entry, default=str),
            },
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Write `train.parquet` and `val.parquet`."""
    import pandas

    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--task",
        action="append",
        choices=sorted([*TASKS, COUNTING]),
        help="may be given often",
    )
    parser.add_argument("--train", type=int, default=2048, help="rows to train on")
    parser.add_argument("--val", type=int, default=64, help="rows to validate on")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    names = chosen.task or ["basic_arithmetic"]
    chosen.folder.mkdir(parents=True, exist_ok=True)
    # reasoning-gym's tasks are drawn, not split, and question i of a seed is question
    # i - 1 of the next one.
    first = 2 * STRIDE * chosen.seed
    for split, count, seed in (
        ("train", chosen.train, first),
        ("val", chosen.val, first + STRIDE),
    ):
        frame = pandas.DataFrame(list(rows(names, count, seed, split)))
        frame.to_parquet(chosen.folder / f"{split}.parquet")
        print(f"{chosen.folder / split}.parquet: {count} rows of {', '.join(names)}")


if __name__ == "__main__":
    main()
