"""A real model through FP8 reinforcement learning with one precision flow, checked.

What `jetrl demo` runs. Containment of the precision graphs comes first, then GRPO
steps: the FP8 rollout model samples, the FP8 trainer recomputes log-probs and learns,
the rollout model is refitted. Then the same tokens are scored under three recipes, and
the pair is audited at all four levels.
"""

import copy
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from jetrl_compile.audit import audit
from jetrl_compile.containment import check_containment
from jetrl_compile.containment_report import ContainmentReport
from jetrl_compile.errors import ModelError
from jetrl_compile.examples.attention import use_reference_attention
from jetrl_compile.examples.grpo import Step, Trainer, group_advantages
from jetrl_compile.examples.sampling import (
    Progress,
    Rollouts,
    left_pad,
    position_ids,
    replay,
    sample,
)
from jetrl_compile.examples.smollm2 import NAME, load_model, quiet
from jetrl_compile.examples.tasks import Task, make_tasks, stop_tokens
from jetrl_compile.layers import compile_layers
from jetrl_compile.metrics import mismatch_metrics
from jetrl_compile.precision_graph import PrecisionGraph
from jetrl_compile.rollout import make_rollout_model, refit
from jetrl_compile.tracing import trace_model

RECIPES = ("jetrl", "rollout_only", "bf16")
AUDITED_ROWS = 4
# Opens a step of the demo: its name, and about how many seconds it takes.
Stage = Callable[[str, float], AbstractContextManager[Progress]]


@dataclass(frozen=True)
class DemoOptions:
    """What the demo does.

    Attributes:
        model: A Hugging Face folder or model name; None for SmolLM2-135M-Instruct.
        steps: GRPO steps, each on prompts of its own.
        seed: Of tasks and sampling.
        prompts: Prompts a step.
        samples: Responses to each prompt.
        max_new_tokens: Longest response, in tokens.
        learning_rate: Of AdamW on the FP32 master weights.
    """

    model: str | None = None
    steps: int = 2
    seed: int = 0
    prompts: int = 4
    samples: int = 4
    max_new_tokens: int = 8
    learning_rate: float = 1e-5

    @property
    def name(self) -> str:
        """What the model is called."""
        return self.model or NAME


@dataclass(frozen=True)
class Answer:
    """One sampled response and its verified reward."""

    question: str
    right: str
    response: str
    reward: float


@dataclass(frozen=True)
class StepRecord:
    """One GRPO step.

    Attributes:
        answers: The sampled responses.
        update: What the optimizer step did.
        mismatch: The metrics of the sampled log-probs against the trainer's, before
            the step.
        tokens: How many tokens were sampled.
        seconds: How long it took.
    """

    answers: tuple[Answer, ...]
    update: Step
    mismatch: dict[str, float]
    tokens: int
    seconds: float

    @property
    def reward(self) -> float:
        """The mean reward."""
        return sum(answer.reward for answer in self.answers) / len(self.answers)


@dataclass
class DemoResult:
    """What the demo found.

    Attributes:
        options: What it was asked for.
        graphs: The precision graphs under "jetrl": "rollout" and "train".
        containment: For each recipe, containment of its graphs at levels 1 and 2.
        steps: The GRPO steps.
        mismatch: For each recipe, the metrics of the last step's tokens with the
            weights after it.
        audit: The pair under "jetrl" at all four levels, after the last step.
        seconds: How long everything took.
    """

    options: DemoOptions
    graphs: dict[str, PrecisionGraph] = field(default_factory=dict)
    containment: dict[str, ContainmentReport] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    mismatch: dict[str, dict[str, float]] = field(default_factory=dict)
    audit: ContainmentReport | None = None
    seconds: float = 0.0


class Show(Protocol):
    """Shows results as soon as they are there."""

    def graphs(self, result: DemoResult) -> None:
        """Containment of the graphs is known."""

    def step(self, result: DemoResult) -> None:
        """Another GRPO step is done."""

    def end(self, result: DemoResult) -> None:
        """Everything is known."""


def run_demo(options: DemoOptions, stage: Stage, show: Show) -> DemoResult:
    """Run the demo.

    Args:
        options: What to do.
        stage: Opens each step; gives a function that is told how far the step is.
        show: Shows results.

    Raises:
        JetRLError: The model or a package cannot be used.
    """
    started = time.perf_counter()
    result = DemoResult(options)
    with quiet():
        torch.manual_seed(options.seed)
        choose_threads()
        with stage(f"loading {options.name}", 9):
            policy, tokenizer = load_model(options.model)
            hugging_face: Any = policy
            use_reference_attention(hugging_face)
            count = options.steps * options.prompts
            tasks = make_tasks(tokenizer, count, options.seed)
        _check_graphs(policy, result, stage)
        show.graphs(result)
        pair = _Pair(policy, tokenizer, options, stage)
        for number in range(options.steps):
            portion = tasks[number * options.prompts :][: options.prompts]
            result.steps.append(pair.step(number, portion))
            show.step(result)
        result.mismatch = pair.mismatch()
        result.audit = pair.audit()
    result.seconds = time.perf_counter() - started
    show.end(result)
    return result


def choose_threads() -> int:
    """Use one thread where more are slower, because other programs use the cores.

    Returns:
        How many threads torch uses from now on: as before, or one.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        return 1
    x = torch.ones(1024, 128, dtype=torch.float64)
    w = torch.ones(128, 576, dtype=torch.float64)

    def measure(count: int) -> float:
        torch.set_num_threads(count)
        started = time.perf_counter()
        for _ in range(40):
            (x @ w).mul_(2.0)
        return time.perf_counter() - started

    measure(threads)  # the first run makes the threads
    if measure(threads) < measure(1):
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def _check_graphs(policy: nn.Module, result: DemoResult, stage: Stage) -> None:
    """Check containment of the precision graphs of each recipe, without weights."""
    with stage("building the precision graphs of three recipes", 9) as progress:
        for done, recipe in enumerate(RECIPES, 1):
            rollout = trace_model(policy, phase="rollout", recipe=recipe)
            train = trace_model(policy, phase="train", recipe=recipe)
            result.containment[recipe] = check_containment(rollout, train)
            if recipe == "jetrl":
                result.graphs = {"rollout": rollout, "train": train}
            progress(done, len(RECIPES))


class _Pair:
    """A trainer and its rollout model, both in FP8."""

    def __init__(
        self, policy: nn.Module, tokenizer: Any, options: DemoOptions, stage: Stage
    ) -> None:
        self.policy, self.tokenizer = policy, tokenizer
        self.options, self.stage = options, stage
        self.stop = stop_tokens(policy, tokenizer)
        with stage("making the FP8 rollout model", 3):
            self.rollout = make_rollout_model(policy, "jetrl")
            compile_layers(self.rollout, phase="rollout", lowering="aot")
            compile_layers(policy, phase="train", lowering="aot")
        self.trainer = Trainer(
            policy,
            learning_rate=options.learning_rate,
            micro_batch=max(1, options.prompts * options.samples // 4),
        )
        self.last: Rollouts | None = None

    def step(self, number: int, tasks: list[Task]) -> StepRecord:
        """Sample, score, learn and refit."""
        started = time.perf_counter()
        options = self.options
        label = f"step {number + 1} of {options.steps}: "
        tokens, mask = left_pad(
            [task.prompt for task in tasks], self.tokenizer.pad_token_id
        )
        with self.stage(label + "the FP8 rollout model samples", 7) as progress:
            rollouts = self.last = sample(
                self.rollout,
                tokens,
                mask,
                max_new_tokens=options.max_new_tokens,
                stop=self.stop,
                pad=self.tokenizer.pad_token_id,
                samples=options.samples,
                generator=torch.Generator().manual_seed(options.seed + number),
                progress=progress,
            )
            answers = self._answers(tasks, rollouts)
        with self.stage(label + "the FP8 trainer recomputes log-probs", 6) as progress:
            old = self.trainer.log_probs(rollouts, progress)
        rewards = torch.tensor([answer.reward for answer in answers])
        advantages = group_advantages(rewards, options.samples)
        with self.stage(label + "the FP8 trainer learns", 16) as progress:
            update = self.trainer.step(rollouts, old, advantages, progress)
        with self.stage(label + "refitting the rollout model", 2):
            refit(self.rollout, self.trainer.masters)
        mismatch = mismatch_metrics(old, rollouts.log_probs, rollouts.response_mask)
        count = int(rollouts.response_mask.sum())
        seconds = time.perf_counter() - started
        return StepRecord(answers, update, mismatch, count, seconds)

    def mismatch(self) -> dict[str, dict[str, float]]:
        """Score the last step's tokens under each recipe, with the weights of now.

        "rollout_only" has the rollout model of "jetrl" (its flows are the same), and
        the trainer of "bf16". All rollout models decode with a cache.
        """
        rollouts, samples = self._last(), self.options.samples
        plain = copy.deepcopy(self.policy)  # a copy is not compiled: BF16
        bf16 = Trainer(plain, micro_batch=self.trainer.micro_batch)
        stage = self.stage
        with stage("the same tokens: FP8 rollout model", 4) as progress:
            sampled = replay(self.rollout, rollouts, samples=samples, progress=progress)
        with stage("the same tokens: FP8 trainer", 5) as progress:
            trained = self.trainer.log_probs(rollouts, progress)
        with stage("the same tokens: BF16 rollout model", 2) as progress:
            sampled_bf16 = replay(plain, rollouts, samples=samples, progress=progress)
        with stage("the same tokens: BF16 trainer", 2) as progress:
            trained_bf16 = bf16.log_probs(rollouts, progress)
        sides: dict[str, tuple[Tensor, Tensor]] = {
            "jetrl": (trained, sampled),
            "rollout_only": (trained_bf16, sampled),
            "bf16": (trained_bf16, sampled_bf16),
        }
        mask = rollouts.response_mask
        return {name: mismatch_metrics(*sides[name], mask) for name in RECIPES}

    def audit(self) -> ContainmentReport:
        """Check all four levels, on sampled tokens."""
        rollouts = self._last()
        rows = slice(None, None, max(1, len(rollouts.tokens) // AUDITED_ROWS))
        mask = rollouts.attention_mask[rows]
        with self.stage("auditing trainer and rollout model", 22) as progress:
            lines: list[str] = []

            def told(line: str) -> None:
                lines.append(line)
                progress(len(lines), 6)

            return audit(
                self.policy,
                self.rollout,
                rollouts.tokens[rows],
                attention_mask=mask,
                position_ids=position_ids(mask),
                progress=told,
            ).report

    def _answers(self, tasks: list[Task], rollouts: Rollouts) -> tuple[Answer, ...]:
        """Return each row's response as text, with its reward."""
        answers = []
        for row, tokens in enumerate(rollouts.responses):
            task = tasks[row // self.options.samples]
            text = self.tokenizer.decode(tokens, skip_special_tokens=True).strip()
            reward = task.reward(text)
            answers.append(Answer(task.question, task.answer, text, reward))
        return tuple(answers)

    def _last(self) -> Rollouts:
        if self.last is None:
            raise ModelError("no step was taken; ask for at least one")
        return self.last
