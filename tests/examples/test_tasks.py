import ast
import operator
import random
from types import SimpleNamespace
from typing import Any

import pytest

from jetrl_compile.errors import ModelError
from jetrl_compile.examples.tasks import (
    INSTRUCTION,
    TASKS,
    encode,
    extract_answer,
    make_dataset,
    make_tasks,
    stop_tokens,
)
from jetrl_compile.examples.verl_grpo.make_data import rows

pytest.importorskip("reasoning_gym")
ARITHMETIC = ["basic_arithmetic"]
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class TemplateError(Exception):
    """Named as jinja2's."""


class Letters:
    """A tokenizer of one token a character."""

    eos_token_id = 7

    def __init__(self, chat_template: str | None = "any", system: bool = True) -> None:
        self.chat_template = chat_template
        self.system = system

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        assert options == {"add_generation_prompt": True, "return_dict": True}
        if messages[0]["role"] == "system" and not self.system:
            raise TemplateError
        return self("".join(f"<{m['role']}>{m['content']}" for m in messages))


def text(tokens: Any) -> str:
    return "".join(map(chr, tokens))


def test_answers_are_verified() -> None:
    for task in make_tasks(Letters(), 12, seed=3, names=list(TASKS)):
        assert task.reward(task.answer) == 1.0
        assert task.reward(f"There are {task.answer}.") == 1.0
        assert task.reward("no number") < 0.5
        assert task.reward(str(int(task.answer) + 1)) < 0.5
        assert task.question in text(task.prompt)


def test_tasks_take_turns_and_depend_on_the_seed_alone() -> None:
    tasks = make_tasks(Letters(), 5, seed=1, names=["gcd", "count_bits"])
    kinds = [task.name for task in tasks]
    assert kinds == ["gcd", "count_bits", "gcd", "count_bits", "gcd"]
    again = make_tasks(Letters(), 5, seed=1, names=["gcd", "count_bits"])
    assert [t.prompt for t in again] == [t.prompt for t in tasks]
    other = make_tasks(Letters(), 5, seed=2, names=["gcd", "count_bits"])
    assert [t.prompt for t in other] != [t.prompt for t in tasks]


def test_a_worked_example_precedes_the_question() -> None:
    (task,) = make_tasks(Letters(), 1, seed=1, names=["gcd"])
    prompt = text(task.prompt)
    assert prompt.startswith(f"<system>{INSTRUCTION}<user>")
    assert prompt.count("<user>") == 2
    assert prompt.endswith(f"<user>{task.question}")


def test_other_templates() -> None:
    turns = [("1 + 1?", "2")]
    no_system = text(encode(Letters(system=False), turns, "2 + 2?"))
    assert no_system == f"<user>{INSTRUCTION}\n1 + 1?<assistant>2<user>2 + 2?"
    plain = text(encode(Letters(chat_template=None), turns, "2 + 2?"))
    assert plain.startswith(INSTRUCTION)
    assert plain.endswith("Question: 1 + 1?\nAnswer: 2\nQuestion: 2 + 2?\nAnswer:")


@pytest.mark.parametrize(
    ("response", "answer"),
    [("7", "7"), ("-7.", "-7"), ("6 of 12", "12"), ("2.5 ", "2.5"), ("none", "")],
)
def test_extract_answer(response: str, answer: str) -> None:
    assert extract_answer(response) == answer


def test_stop_tokens() -> None:
    for own, expected in ((None, [7]), (5, [5, 7]), ([9, 7], [7, 9])):
        model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=own))
        assert stop_tokens(model, Letters()) == expected
    assert stop_tokens(object(), Letters()) == [7]


def test_unknown_task() -> None:
    with pytest.raises(ModelError, match="letter_counting"):
        make_tasks(Letters(), 1, seed=0, names=["chess"])


def test_arithmetic_has_right_answers_and_no_common_one() -> None:
    """reasoning-gym 0.1.25 divides wrongly: no question of this task may divide."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    answers = []
    for row in rows(ARITHMETIC, 300, seed, "train"):
        question = row["prompt"][-1]["content"]
        answers.append(int(row["reward_model"]["ground_truth"]))
        text = question.removeprefix("Calculate ").removesuffix(".")
        tree = ast.parse(text, mode="eval").body
        assert isinstance(tree, ast.BinOp), question
        operands = [ast.literal_eval(side) for side in (tree.left, tree.right)]
        assert OPERATORS[type(tree.op)](*operands) == answers[-1], question
    assert max(map(answers.count, answers)) < 0.2 * len(answers)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("7, 8, 9, 10, 11", 1.0),
        ("Sure: 7 8 9 10 11", 1.0),
        ("7, 8, 10, 11, 12", 2 / 5),
        ("7, 8, 10, 9, 11", 3 / 5),
        ("7, 8", 2 / 5),
        ("3, 4, 5, 6, 7, 8, 9, 10, 11, 12", 1 / 2),
        ("7, 8, 9, 10, 11, 12, 13, 14, 15, 16", 1 / 2),
        ("78910", 0.0),
        ("8, 9, 10", 0.0),
        ("", 0.0),
        (None, 0.0),
    ],
)
def test_counting_is_scored_by_what_comes_in_order(
    answer: str | None, score: float
) -> None:
    dataset = make_dataset("counting", 1, 0)
    entry = {"metadata": {"start": 7, "end": 11}}
    assert dataset.score_answer(answer, entry) == score


def test_rows_of_a_task_with_long_answers() -> None:
    made = list(rows(["counting"], 3, 5, "train"))
    questions = [row["prompt"][-1]["content"] for row in made]
    assert len(set(questions)) == 3
    assert questions == [
        r["prompt"][-1]["content"] for r in rows(["counting"], 3, 5, "")
    ]
    for row in made:
        system, asked, worked, _ = (turn["content"] for turn in row["prompt"])
        assert system == "Reply with numbers only."
        start, end = map(int, asked.removeprefix("Count from ")[:-1].split(" to "))
        assert worked == ", ".join(map(str, range(start, end + 1)))
        assert end - start == 99
        assert row["reward_model"]["ground_truth"].count(", ") in range(149, 200)


def test_a_task_that_is_not_there() -> None:
    with pytest.raises(ModelError, match=r"'sums' is unknown; known: .*counting"):
        make_dataset("sums", 1, 0)
