"""Exact mode in verl's engine: what it refuses, and log-probs of the rollout's bits.

verl divides logits by the temperature in BF16 and sums a row by a kernel of its own;
here both are the rollout's. Tokens that verl's rollouts never sample, those past the
tokenizer's, have no mass in the trainer either.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_from_nested

from jetrl_compile.errors import ModelError
from jetrl_compile.kernels.attention_kernels import attention_kernel, check_kernel
from jetrl_compile.kernels.exact_ops import log_probs

SLICE = 1024  # tokens whose FP32 logits are held at a time


def check_exact_config(model_config: Any, engine_config: Any) -> None:
    """Check that verl's config leaves the forward to exact kernels.

    Args:
        model_config: verl's `HFModelConfig`.
        engine_config: verl's `FSDPEngineConfig`.

    Raises:
        ModelError: It does not; all reasons are listed.
    """
    reasons = []
    size = engine_config.ulysses_sequence_parallel_size
    if size > 1:
        reasons.append(
            f"ulysses_sequence_parallel_size={size} changes attention inside the "
            "layers; use 1"
        )
    if model_config.use_fused_kernels or engine_config.use_fused_kernels:
        reasons.append(
            "use_fused_kernels computes log-probs by verl's kernels; set it to False"
        )
    if getattr(model_config.hf_config, "vision_config", None) is not None:
        reasons.append("models with images have no exact kernels; use a text model")
    if reasons:
        raise ModelError("jetrl_exact=True cannot hold here: " + "; ".join(reasons))


def check_attention(model: nn.Module, device_type: str) -> None:
    """Check that the attention kernels of a model can run in this process.

    Args:
        model: A Hugging Face causal model, on any device.
        device_type: Of the device that it will run on.

    Raises:
        ProviderError: One cannot.
    """
    for module in model.modules():
        size = getattr(module, "head_dim", None)
        if isinstance(size, int):
            check_kernel(attention_kernel(device_type, size))


def nested_log_probs(
    logits: Tensor, labels: Tensor, micro_batch: Any, *, vocabulary: int, kernel: str
) -> Tensor:
    """Return the log-prob of the token after each one, nested as `input_ids` is.

    Args:
        logits: (1, T or more, V) of a packed batch, else (B, L, V), padded on the
            right; BF16.
        labels: (T or more,), int64: the token after each one of a packed batch.
        micro_batch: verl's.
        vocabulary: As for `packed_log_probs`.
        kernel: As for `packed_log_probs`.
    """
    offsets = micro_batch["input_ids"].offsets()
    lengths, total = offsets.diff(), int(offsets[-1])
    if tu.get_non_tensor_data(micro_batch, "use_remove_padding", True):
        logits = logits[0, :total]
    else:
        places = torch.arange(logits.shape[1], device=logits.device)
        logits = logits[places < lengths[:, None]]
    given = micro_batch["temperature"]
    is_tensor = isinstance(given, Tensor)
    scores = packed_log_probs(
        logits,
        labels[:total],
        lengths.tolist(),
        given.float().tolist() if is_tensor else [float(given)] * len(lengths),
        vocabulary=vocabulary,
        kernel=kernel,
    )
    return torch.nested.nested_tensor_from_jagged(scores, offsets)


def packed_log_probs(
    logits: Tensor,
    labels: Tensor,
    lengths: Sequence[int],
    temperatures: Sequence[float],
    *,
    vocabulary: int,
    kernel: str,
) -> Tensor:
    """Return the log-probs of labels, as a rollout's sampler computes them.

    Args:
        logits: (T, V), BF16: of sequences, one after the other.
        labels: (T,), int64.
        lengths: Tokens of each sequence; their sum is T.
        temperatures: Of each sequence, above 0.
        vocabulary: Tokens from here on are never sampled.
        kernel: Of `jetrl::log_probs`, as `prepare_exact` returns it.

    Returns:
        (T,), FP32, nats, with gradients to the logits.
    """
    parts = list(_slices(lengths, temperatures))
    sizes = [size for size, _ in parts]
    unused = torch.arange(logits.shape[-1], device=logits.device) >= vocabulary
    masks = vocabulary < logits.shape[-1]
    scores = []
    for part, own, (_, temperature) in zip(
        torch.split(logits, sizes), torch.split(labels, sizes), parts, strict=True
    ):
        kept = part.masked_fill(unused, -torch.inf) if masks else part
        scores.append(log_probs(kept, own, temperature, kernel))
    return torch.cat(scores)


@dataclass(frozen=True)
class Comparison:
    """How many sampled tokens have the same log-prob in rollout and trainer.

    Attributes:
        tokens: That were sampled.
        equal: That have equal bits.
        first: The first token that has not, with both log-probs in nats; "" if all do.
    """

    tokens: int
    equal: int
    first: str = ""


def compare_log_probs(data: Any, trained: Tensor) -> Comparison | None:
    """Compare a rollout's log-probs with the trainer's, bit for bit.

    Args:
        data: verl's batch: `rollout_log_probs` and `response_mask`, nested.
        trained: Of each token's successor, nested as `input_ids`, FP32.

    Returns:
        The comparison; None where the batch does not hold the rollout's.
    """
    sampled, mask = data.get("rollout_log_probs"), data.get("response_mask")
    if sampled is None or mask is None or not (sampled.is_nested and mask.is_nested):
        return None
    own = response_from_nested(trained, mask).values()
    theirs = sampled.values().to(own.device, own.dtype)
    masked = mask.values().bool()
    wrong = (own != theirs) & masked.to(own.device)
    tokens, count = int(masked.sum()), int(wrong.sum())
    if not count:
        return Comparison(tokens, tokens)
    index = int(wrong.nonzero()[0])
    row = int((mask.offsets() <= index).sum()) - 1
    place = index - int(mask.offsets()[row])
    first = (
        f"token {place} of response {row}, {float(theirs[index]):.9g} in the rollout "
        f"and {float(own[index]):.9g} in the trainer"
    )
    return Comparison(tokens, tokens - count, first)


def _slices(
    lengths: Sequence[int], temperatures: Sequence[float]
) -> Iterator[tuple[int, float]]:
    """Yield sizes of runs of tokens with one temperature each, and it."""
    if len(set(temperatures)) == 1:
        lengths, temperatures = [sum(lengths)], temperatures[:1]
    for length, temperature in zip(lengths, temperatures, strict=True):
        for start in range(0, length, SLICE):
            yield min(SLICE, length - start), temperature
