from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from jetrl_compile.errors import ModelError
from jetrl_compile.examples.attention import use_reference_attention
from jetrl_compile.examples.sampling import (
    cache_argument,
    left_pad,
    position_ids,
    replay,
    sample,
    token_log_probs,
)

STOP, PAD = 2, 0


def tiny(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=STOP,
    )
    model: Any = LlamaForCausalLM(config)
    use_reference_attention(model)
    return model.to(dtype).eval()


def draw(model: Any, seed: int = 0, **options: Any) -> Any:
    tokens, mask = left_pad([[5, 6, 7, 8], [9], [10, 11]] * 2, PAD)
    options.setdefault("max_new_tokens", 12)
    options.setdefault("stop", [STOP, 3])
    generator = torch.Generator().manual_seed(seed)
    return sample(model, tokens, mask, pad=PAD, generator=generator, **options)


def test_left_pad_and_positions() -> None:
    tokens, mask = left_pad([[5, 6, 7], [8]], pad=1)
    assert tokens.tolist() == [[5, 6, 7], [1, 1, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert position_ids(mask).tolist() == [[0, 1, 2], [0, 0, 0]]
    for bad in ([], [[5], []]):
        with pytest.raises(ModelError, match="empty"):
            left_pad(bad, pad=0)


def test_layout() -> None:
    seen: list[tuple[int, int]] = []
    rollouts = draw(tiny(), progress=lambda *step: seen.append(step))
    batch, width = rollouts.response_mask.shape
    assert rollouts.tokens.shape == rollouts.attention_mask.shape == (batch, 4 + width)
    assert rollouts.prompt_length == 4
    assert seen == [(step + 1, 12) for step in range(width)]
    lengths = rollouts.response_mask.sum(1)
    assert lengths.max() == width
    assert lengths.min() < width, "some row should stop early"
    for row, response in enumerate(rollouts.responses):
        assert len(response) == lengths[row]
        assert not {STOP, 3} & set(response[:-1])
        assert response[-1] in (STOP, 3) or len(response) == 12
        assert rollouts.tokens[row, 4 + len(response) :].eq(PAD).all()
    assert torch.equal(rollouts.attention_mask[:, 4:].bool(), rollouts.response_mask)
    assert rollouts.log_probs[~rollouts.response_mask].eq(0).all()
    assert rollouts.log_probs[rollouts.response_mask].lt(0).all()
    assert rollouts.log_probs.dtype == torch.float32


def test_samples_of_a_prompt_are_neighbours() -> None:
    model = tiny(torch.float64)
    rollouts = draw(model, samples=3)
    prompts = rollouts.tokens[:, :4].reshape(6, 3, 4)
    assert torch.equal(prompts, prompts[:, :1].expand(6, 3, 4))
    assert rollouts.response_mask.shape[0] == 18
    assert len({tuple(response) for response in rollouts.responses[:3]}) > 1
    arguments = (rollouts.tokens, rollouts.attention_mask, rollouts.response_mask)
    with torch.no_grad():
        mine = token_log_probs(model, *arguments)
    torch.testing.assert_close(mine, rollouts.log_probs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("samples", [1, 3])
def test_replay_repeats_what_was_sampled(samples: int) -> None:
    model = tiny()
    rollouts = draw(model, samples=samples)
    seen: list[tuple[int, int]] = []
    again = replay(
        model, rollouts, samples=samples, progress=lambda *step: seen.append(step)
    )
    assert torch.equal(again, rollouts.log_probs)
    width = rollouts.response_mask.shape[1]
    assert seen == [(step + 1, width) for step in range(width)]


def test_all_rows_stopped_ends_it() -> None:
    rollouts = draw(tiny(), stop=range(32))
    assert rollouts.response_mask.shape == (6, 1)


def test_seeds() -> None:
    model = tiny()
    assert torch.equal(draw(model, 1).tokens, draw(model, 1).tokens)
    assert draw(model, 1).responses != draw(model, 2).responses


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_full_forward_gives_the_same_log_probs(temperature: float) -> None:
    model = tiny(torch.float64)  # float64 linears: rows do not interact
    rollouts = draw(model, temperature=temperature)
    mine: Any = token_log_probs(
        model,
        rollouts.tokens,
        rollouts.attention_mask,
        rollouts.response_mask,
        temperature=temperature,
    )
    torch.testing.assert_close(mine, rollouts.log_probs, rtol=0, atol=1e-6)
    mine.sum().backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0


def test_log_softmax_of_a_row_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(5, 7, 49152).bfloat16().float() * 4
    whole = torch.log_softmax(logits, dim=-1)
    assert torch.equal(torch.log_softmax(logits[2:4, 3], dim=-1), whole[2:4, 3])
    assert torch.equal(torch.log_softmax(logits[:1, -1], dim=-1), whole[:1, -1])


def test_frequencies_are_the_model_s() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.2])
    calls: list[dict[str, Any]] = []

    class Constant:
        config = LlamaConfig(num_hidden_layers=1)

        def __call__(self, input_ids: Tensor, **kwargs: Any) -> SimpleNamespace:
            calls.append(kwargs)
            logits = probabilities.log().expand(*input_ids.shape, 3)
            return SimpleNamespace(logits=logits[:, -1:])

        def forward(self, past_key_values: Any) -> None:
            """Only its signature is read."""

    prompts = torch.ones(2000, 1, dtype=torch.long)
    generator = torch.Generator().manual_seed(0)
    rollouts = sample(
        Constant(),
        prompts,
        prompts,
        max_new_tokens=2,
        stop=[],
        pad=0,
        generator=generator,
    )
    counts = rollouts.tokens[:, 1:].flatten().bincount() / 4000
    torch.testing.assert_close(counts, probabilities, rtol=0, atol=0.03)
    assert [call["position_ids"].tolist()[0] for call in calls] == [[0], [1]]
    assert all("past_key_values" in call for call in calls)


def test_name_of_the_cache_argument() -> None:
    model = tiny()
    assert cache_argument(model) in ("cache", "past_key_values")
    compiled = torch.compile(model, backend="eager")
    assert cache_argument(compiled) == cache_argument(model)


def test_a_compiled_model_is_compiled_twice_at_most() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny()
    compiled: Any = torch.compile(model, backend="eager", dynamic=True, fullgraph=True)
    expected = draw(model)
    for seed in (0, 3):  # other lengths
        rollouts = draw(compiled, seed)
        if seed == 0:
            assert torch.equal(rollouts.tokens, expected.tokens)
            assert torch.equal(rollouts.log_probs, expected.log_probs)
    compiles = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiles <= 2, "one for the empty cache, one for the filled one"
    for width in (6, 9):
        mask = torch.ones(6, width - 4, dtype=torch.bool)
        tokens = torch.ones(6, width, dtype=torch.long)
        with torch.no_grad():
            token_log_probs(compiled, tokens, tokens, mask)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - compiles <= 1
