"""Level 4 on a live engine: log-probs of what it samples, under the trainer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_compile.errors import ModelError
from jetrl_compile.kernels.exact_ops import log_probs
from jetrl_compile.metrics import mismatch_metrics

SLICE = 1024  # tokens whose FP32 logits are held at a time


@dataclass(frozen=True)
class Sampled:
    """Sequences that an engine sampled.

    Attributes:
        tokens: Prompt and answer of each.
        prompts: Tokens of each prompt.
        log_probs: (B, T), FP32, nats, as the engine sampled; NaN behind the end.
    """

    tokens: tuple[tuple[int, ...], ...]
    prompts: tuple[int, ...]
    log_probs: Tensor

    def first(self, count: int) -> "Sampled":
        """Return the sequences as they were after some tokens, the prompt included."""
        most = max(count - prompt for prompt in self.prompts)
        kept = self.log_probs[:, :most].clone()
        for row, prompt in zip(kept, self.prompts, strict=True):
            row[max(count - prompt, 0) :] = float("nan")
        tokens = tuple(one[:count] for one in self.tokens)
        return Sampled(tokens, self.prompts, kept)

    @property
    def mask(self) -> Tensor:
        """Which positions hold a sampled token, (B, T)."""
        return ~self.log_probs.isnan()


def sample(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    length: int,
    *,
    temperature: float = 1.0,
    seed: int | None = 0,
) -> Sampled:
    """Let an engine sample answers, and keep the log-probs it sampled them with.

    Args:
        llm: vLLM's LLM.
        prompts: Token ids.
        length: Tokens an answer.
        temperature: Of sampling; log-probs are those before it.
        seed: Of sampling, the same for each prompt; None: the engine's own, which is
            faster.

    Raises:
        ModelError: The engine returned no log-probs.
    """
    from vllm import SamplingParams

    wanted = SamplingParams(
        max_tokens=length,
        temperature=temperature,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        seed=seed,
    )
    given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    tokens, rows = [], []
    for output in llm.generate(given, wanted, use_tqdm=False):
        answer = output.outputs[0]
        if answer.logprobs is None:
            raise ModelError("vLLM returned no log-probs; ask for logprobs=0")
        ids = tuple(answer.token_ids)
        tokens.append((*output.prompt_token_ids, *ids))
        rows.append(
            torch.tensor(
                [
                    found[token].logprob
                    for found, token in zip(answer.logprobs, ids, strict=True)
                ]
            )
        )
    return Sampled(
        tuple(tokens),
        tuple(len(prompt) for prompt in prompts),
        nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=float("nan")),
    )


def trainer_log_probs(trainer: nn.Module, sampled: Sampled, kernel: str = "") -> Tensor:
    """Return what a trainer's model gives each sampled token, (B, T); NaN behind.

    One sequence at a time, in FP32 from the model's logits.

    Args:
        trainer: A Hugging Face causal model, compiled or not.
        sampled: What to score.
        kernel: In exact mode, that of `jetrl::log_probs`, as the engine's config has
            it; "": PyTorch's log_softmax.
    """
    causal: Any = trainer
    device = next(trainer.parameters()).device
    rows = []
    was_training = trainer.training
    trainer.eval()
    with torch.no_grad():
        for tokens, prompt in zip(sampled.tokens, sampled.prompts, strict=True):
            ids = torch.tensor([tokens], device=device)
            logits = causal(ids, use_cache=False).logits[0, prompt - 1 : -1]
            chosen = torch.split(ids[0, prompt:, None], SLICE)
            scores = [  # in slices: FP32 logits of 8192 tokens take gigabytes
                _scores(part, own[:, 0], kernel).cpu()
                for part, own in zip(torch.split(logits, SLICE), chosen, strict=True)
            ]
            rows.append(torch.cat(scores))
    trainer.train(was_training)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=float("nan"))


def _scores(logits: Tensor, labels: Tensor, kernel: str) -> Tensor:
    if kernel:
        found: Tensor = log_probs(logits, labels, 1.0, kernel)
        return found
    return torch.log_softmax(logits.float(), -1).gather(-1, labels[:, None])[:, 0]


def gap_metrics(sampled: Sampled, train: Tensor) -> dict[str, float]:
    """Return the mismatch metrics of sampled tokens, under verl's names."""
    mask = sampled.mask
    return mismatch_metrics(train.nan_to_num(), sampled.log_probs.nan_to_num(), mask)
