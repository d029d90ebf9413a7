"""The demo's tasks: questions whose answers a program verifies, from reasoning-gym.

A 135M-parameter model solves few of reasoning-gym's tasks. These are small enough that
it sometimes does, which is what group-relative advantages need: measured on samples of
SmolLM2-135M-Instruct at temperature 1 (see docs/log.md).
"""

import functools
import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jetrl_compile.errors import ModelError

INSTRUCTION = "Reply with one number only."

# Dataset of reasoning-gym, and its options. Its basic_arithmetic divides wrongly, and
# computes more than two terms from left to right (0.1.25).
TASKS: dict[str, dict[str, Any]] = {
    "letter_counting": {"min_words": 1, "max_words": 2},
    "count_bits": {"min_n": 1, "max_n": 7},
    "gcd": {"min_value": 1, "max_value": 12, "min_numbers": 2, "max_numbers": 2},
    "basic_arithmetic": {
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 1,
        "operators": ("+", "-", "*"),
        "allow_parentheses": False,
        "allow_negation": False,
    },
}

COUNTING = "counting"  # a task with answers of hundreds of tokens, for training


def instruction(name: str) -> str:
    """Return what a task's prompts begin with."""
    return "Reply with numbers only." if name == COUNTING else INSTRUCTION


def make_dataset(name: str, size: int, seed: int, *, worked: bool = False) -> Any:
    """Return a dataset of reasoning-gym's kind.

    Args:
        name: A key of `TASKS`, or `COUNTING`.
        size: How many questions.
        seed: Of reasoning-gym's generators.
        worked: Questions for worked examples: shorter, where answers are long.

    Raises:
        ModelError: The name is unknown, or reasoning-gym is not installed.
    """
    if name not in TASKS and name != COUNTING:
        known = ", ".join([*TASKS, COUNTING])
        raise ModelError(f"task {name!r} is unknown; known: {known}")
    try:
        gym: Any = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ModelError(
            f"tasks need reasoning-gym ({error}); pip install 'jetrl-compile[demo]'"
        ) from error
    if name in TASKS:
        return gym.create_dataset(name, size=size, seed=seed, **TASKS[name])
    from jetrl_compile.examples.counting import CountingConfig, CountingDataset

    options = {"least": 100, "most": 100} if worked else {}
    return CountingDataset(CountingConfig(size=size, seed=seed, **options))


@dataclass(frozen=True)
class Task:
    """One question with its verifier.

    Attributes:
        name: The dataset of reasoning-gym that it comes from.
        question: What is asked.
        answer: A right answer.
        prompt: The question as tokens, after an instruction and a worked example, in
            the model's chat template.
        dataset: reasoning-gym's dataset, which scores answers.
        entry: reasoning-gym's record of the question.
    """

    name: str
    question: str
    answer: str
    prompt: tuple[int, ...]
    dataset: Any
    entry: Any

    def reward(self, response: str) -> float:
        """Return reasoning-gym's score of a response's answer, from 0 to 1."""
        return float(self.dataset.score_answer(extract_answer(response), self.entry))


def make_tasks(
    tokenizer: Any, count: int, seed: int, names: Sequence[str] = ("letter_counting",)
) -> list[Task]:
    """Return `count` tasks, taking turns among the named datasets.

    Args:
        tokenizer: The model's, with or without a chat template.
        count: How many tasks.
        seed: Of reasoning-gym's generators: the same seed gives the same tasks.
        names: Keys of `TASKS`.

    Raises:
        ModelError: reasoning-gym is not installed, or a name is unknown.
    """
    if unknown := [name for name in names if name not in TASKS]:
        raise ModelError(f"task {unknown[0]!r} is unknown; known: {', '.join(TASKS)}")
    each = -(-count // len(names))
    made = [_one_kind(tokenizer, name, each, seed) for name in names]
    return [tasks[i] for i in range(each) for tasks in made][:count]


def extract_answer(response: str) -> str:
    """Return the last number of a response, or "" if it has none.

    >>> extract_answer("There are 2 of them, so: 2.")
    '2'
    """
    numbers = re.findall(r"-?\d+(?:\.\d+)?", response)
    return numbers[-1] if numbers else ""


def encode(
    tokenizer: Any, turns: Sequence[tuple[str, str]], question: str
) -> list[int]:
    """Return a question as tokens, after worked turns of question and answer.

    A model without a chat template gets plain lines of text.
    """
    if tokenizer.chat_template is None:
        lines = [f"Question: {q}\nAnswer: {a}\n" for q, a in turns]
        text = f"{INSTRUCTION}\n{''.join(lines)}Question: {question}\nAnswer:"
        return list(tokenizer(text)["input_ids"])
    messages = []
    for asked, answered in turns:
        messages += [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": answered},
        ]
    messages.append({"role": "user", "content": question})
    template = functools.partial(
        tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=True
    )
    system = {"role": "system", "content": INSTRUCTION}
    try:
        return list(template([system, *messages])["input_ids"])
    except Exception as error:
        if type(error).__name__ != "TemplateError":
            raise
    # Some templates know no system role; then the instruction opens the first turn.
    messages[0]["content"] = f"{INSTRUCTION}\n{messages[0]['content']}"
    return list(template(messages)["input_ids"])


def stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a response: the tokenizer's and the model's own."""
    config = getattr(model, "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    ends = ends if isinstance(ends, (list, tuple)) else [ends]
    found = {end for end in (*ends, tokenizer.eos_token_id) if end is not None}
    return sorted(found)


def _one_kind(tokenizer: Any, name: str, count: int, seed: int) -> list[Task]:
    # The first question is the worked example of all others.
    dataset = make_dataset(name, count + 1, seed)
    worked, *entries = (dataset[i] for i in range(count + 1))
    turns = [(worked["question"], worked["answer"])]
    return [
        Task(
            name,
            entry["question"],
            entry["answer"],
            tuple(encode(tokenizer, turns, entry["question"])),
            dataset,
            entry,
        )
        for entry in entries
    ]
