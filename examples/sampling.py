"""Sample from a causal model with a cache, and give sampled tokens their log-probs.

Both sides lay tokens out alike: prompts padded on the left, responses after them,
padded on the right. Log-probs are computed in FP32 from the model's logits, on both
sides by the same rows of the same `log_softmax`.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from jetrl_compile.errors import ModelError
from jetrl_compile.kernels.reference_exact import log_softmax

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Rollouts:
    """A batch of sampled responses; P is the padded prompt length, T the response's.

    Attributes:
        tokens: (B, P + T), int64, row-major: padding, prompt, response, padding.
        attention_mask: (B, P + T), int64: 1 at tokens of prompt and response.
        response_mask: (B, T), bool: the sampled tokens, up to and with the one that
            ends a response.
        log_probs: (B, T), FP32, nats: of each sampled token under the model that
            sampled it; 0 where masked out.
    """

    tokens: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    log_probs: Tensor

    @property
    def prompt_length(self) -> int:
        """P, the padded length of the prompts."""
        return self.tokens.shape[1] - self.response_mask.shape[1]

    @property
    def responses(self) -> list[list[int]]:
        """Each row's sampled tokens, the one that ends it included."""
        rows = zip(
            self.tokens[:, self.prompt_length :], self.response_mask, strict=True
        )
        return [row[mask].tolist() for row, mask in rows]


def left_pad(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Return prompts of several lengths as tokens and mask, both (B, P) and int64.

    Raises:
        ModelError: There is no prompt, or one is empty.
    """
    if not prompts or not all(prompts):
        raise ModelError("a prompt is empty, or there is none; give each one token")
    longest = max(map(len, prompts))
    rows = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    return torch.tensor(rows), torch.tensor(mask)


def position_ids(attention_mask: Tensor) -> Tensor:
    """Return each token's position, counted from its row's first unmasked token.

    Args:
        attention_mask: (B, L), integer: 1 at tokens, 0 at padding.

    Returns:
        (B, L), int64; 0 at padding on the left.
    """
    return (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)


def cache_argument(model: Any) -> str:
    """Return by which name a model takes its cache: "cache" or "past_key_values".

    transformers renamed it in 5.21 and warns about the older name.
    """
    forward = getattr(getattr(model, "_orig_mod", model), "forward", model)
    parameters = inspect.signature(forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


class _Decoder:
    """A model with its cache, somewhere in a batch of sequences."""

    def __init__(
        self,
        model: Any,
        tokens: Tensor,
        attention_mask: Tensor,
        vocabulary: int | None = None,
    ) -> None:
        self.model, self.vocabulary = model, vocabulary
        self.cache: Any = DynamicCache(config=model.config)
        self.kept = {cache_argument(model): self.cache, "use_cache": True}
        self.attention_mask = attention_mask
        self.tokens, self.positions = tokens, position_ids(attention_mask)

    def log_probs(self, temperature: float) -> Tensor:
        """Return the next token's log-probs, (B, V), FP32, nats."""
        out = self.model(
            input_ids=self.tokens,
            attention_mask=self.attention_mask,
            position_ids=self.positions,
            logits_to_keep=1,
            **self.kept,
        )
        logits = out.logits[:, -1]
        if self.vocabulary is not None:
            logits[:, self.vocabulary :] = -torch.inf
        return log_softmax(logits, temperature)

    def repeat(self, samples: int) -> None:
        """Continue each sequence in several ways."""
        self.cache.batch_repeat_interleave(samples)
        self.attention_mask = self.attention_mask.repeat_interleave(samples, dim=0)
        self.positions = self.positions.repeat_interleave(samples, dim=0)

    def append(self, picked: Tensor, live: Tensor) -> None:
        """Go on with a token a row, (B, 1), masked out where a row has ended."""
        mask = live.long().unsqueeze(1)
        self.attention_mask = torch.cat((self.attention_mask, mask), dim=1)
        self.tokens, self.positions = picked, self.positions[:, -1:] + 1


@torch.no_grad()
def sample(
    model: Any,
    tokens: Tensor,
    attention_mask: Tensor,
    *,
    max_new_tokens: int,
    stop: Sequence[int],
    pad: int,
    samples: int = 1,
    generator: torch.Generator | None = None,
    temperature: float = 1.0,
    vocabulary: int | None = None,
    progress: Progress | None = None,
) -> Rollouts:
    """Sample responses to each prompt, all rows at once, one token a step.

    The model runs once on the prompts and once for each further token. A compiled model
    with dynamic shapes sees two kinds of call: with an empty cache and with a filled
    one.

    Args:
        model: A Hugging Face causal model or a compiled one: called with `input_ids`,
            `attention_mask`, `position_ids`, a cache and `logits_to_keep=1`.
        tokens: (B, P), int64: prompts, padded on the left.
        attention_mask: (B, P), int64: 1 at tokens.
        max_new_tokens: Longest response, in tokens.
        stop: Tokens that end a response.
        pad: What is written after the end of a response.
        samples: Responses to each prompt; B counts prompts times samples in the result,
            and the samples of a prompt are neighbours. The prompt is computed once.
        generator: Source of randomness; torch's default if None.
        temperature: What logits are divided by, before log-probs too.
        vocabulary: Tokens from here on are never sampled; None: all may be.
        progress: Called after each step with the steps done and `max_new_tokens`.

    Returns:
        The rollouts; T is the longest response's length.
    """
    decoder = _Decoder(model, tokens, attention_mask, vocabulary)
    stops = torch.tensor(list(stop), device=tokens.device)
    tokens = tokens.repeat_interleave(samples, dim=0)
    live = torch.ones(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    masks, log_probs = [], []
    for step in range(max_new_tokens):
        scores = decoder.log_probs(temperature)
        if step == 0 and samples > 1:
            decoder.repeat(samples)
            scores = scores.repeat_interleave(samples, dim=0)
        picked = torch.multinomial(scores.exp(), 1, generator=generator)
        masks.append(live)
        log_probs.append(scores.gather(1, picked).squeeze(1).where(live, 0.0))
        picked = picked.where(live.unsqueeze(1), pad)
        tokens = torch.cat((tokens, picked), dim=1)
        decoder.append(picked, live)
        live = live & ~torch.isin(picked.squeeze(1), stops)
        if progress is not None:
            progress(step + 1, max_new_tokens)
        if not live.any():
            break
    mask = torch.stack(masks, dim=1)
    log_prob = torch.stack(log_probs, dim=1)
    return Rollouts(tokens, decoder.attention_mask, mask, log_prob)


@torch.no_grad()
def replay(
    model: Any,
    rollouts: Rollouts,
    *,
    samples: int = 1,
    temperature: float = 1.0,
    progress: Progress | None = None,
) -> Tensor:
    """Return the log-probs under which a model would have sampled given tokens.

    It runs as `sample` does, with a cache and a token a step.

    Args:
        model: As for `sample`.
        rollouts: The tokens.
        samples: How many neighbouring rows share a prompt; it is computed once.
        temperature: What logits are divided by.
        progress: Called after each step with the steps done and T.

    Returns:
        (B, T), FP32, nats; 0 where masked out.
    """
    start, (_, length) = rollouts.prompt_length, rollouts.response_mask.shape
    prompts = slice(None, None, samples), slice(start)
    decoder = _Decoder(
        model, rollouts.tokens[prompts], rollouts.attention_mask[prompts]
    )
    log_probs = []
    for step in range(length):
        scores = decoder.log_probs(temperature)
        if step == 0 and samples > 1:
            decoder.repeat(samples)
            scores = scores.repeat_interleave(samples, dim=0)
        picked = rollouts.tokens[:, start + step].unsqueeze(1)
        live = rollouts.response_mask[:, step]
        log_probs.append(scores.gather(1, picked).squeeze(1).where(live, 0.0))
        decoder.append(picked, live)
        if progress is not None:
            progress(step + 1, length)
    return torch.stack(log_probs, dim=1)


def token_log_probs(
    model: Any,
    tokens: Tensor,
    attention_mask: Tensor,
    response_mask: Tensor,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """Return the log-prob of each response token, by one forward over all tokens.

    Gradients flow to the model's parameters unless they are switched off.

    Args:
        model: A Hugging Face causal model or a compiled one.
        tokens: (B, P + T), int64, laid out as in `Rollouts`.
        attention_mask: (B, P + T), int64: 1 at tokens.
        response_mask: (B, T), bool: the tokens that were sampled.
        temperature: What logits are divided by.

    Returns:
        (B, T), FP32, nats; 0 where masked out.
    """
    length = response_mask.shape[1]
    out = model(
        input_ids=tokens,
        attention_mask=attention_mask,
        position_ids=position_ids(attention_mask),
        use_cache=False,
        logits_to_keep=length + 1,
    )
    scores = log_softmax(out.logits[:, :-1], temperature)
    picked = tokens[:, -length:].unsqueeze(-1)
    return scores.gather(2, picked).squeeze(2).where(response_mask, 0.0)
