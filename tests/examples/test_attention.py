import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from jetrl_compile.errors import ModelError
from jetrl_compile.examples.attention import (
    reference_attention,
    use_reference_attention,
)
from jetrl_compile.examples.sampling import cache_argument


class ExactLinear(nn.Module):
    """A linear layer in float64 that rounds once, so that rows do not interact."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.double(), self.weight.double()).to(x.dtype)


def make_exact(model: Any) -> Any:
    use_reference_attention(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, ExactLinear(child))
    return model.eval()


SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_llama(layers: int = 3) -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": layers}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3))
    return model.to(torch.bfloat16)


def tiny_gemma3() -> Any:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **SIZES,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        initializer_range=0.3,
    )
    model: Any = Gemma3ForCausalLM(config)
    return model.to(torch.bfloat16)


def qkv(dtype: torch.dtype, rows: int = 5, columns: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 6, rows, 8), (2, 3, columns, 8), (2, 3, columns, 8))
    return [torch.randn(s, generator=generator, dtype=dtype) for s in shapes]


def some_mask(rows: int = 5, columns: int = 7) -> Tensor:
    mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
    mask = mask.expand(2, 1, rows, columns).clone()
    mask[1, :, :, :3] = False
    return mask


@pytest.mark.parametrize("masked", [True, False])
def test_equals_sdpa(masked: bool) -> None:
    q, k, v = qkv(torch.float64, 7, 7)
    mask = some_mask(7, 7)[:1].expand(2, 1, 7, 7) if masked else None
    ours, none = reference_attention(nn.Identity(), q, k, v, mask, scaling=0.3)
    theirs = nn.functional.scaled_dot_product_attention(
        q, k, v, mask, is_causal=not masked, scale=0.3, enable_gqa=True
    )
    assert none is None
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, theirs.transpose(1, 2))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients(softcap: float | None) -> None:
    inputs = [x.requires_grad_() for x in qkv(torch.float64)]
    mask = some_mask()
    mask[1, :, 1] = False  # a row that reads nothing

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference_attention(nn.Identity(), q, k, v, mask, softcap=softcap)[0]

    assert torch.autograd.gradcheck(run, inputs)


def test_a_row_that_reads_nothing_is_zero() -> None:
    q, k, v = qkv(torch.bfloat16)
    mask = some_mask()
    mask[0, :, 2] = False
    out, _ = reference_attention(nn.Identity(), q, k, v, mask)
    assert torch.equal(out[0, 2], torch.zeros(6, 8, dtype=torch.bfloat16))
    assert out.isfinite().all()


def test_operator_is_well_formed() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(torch.bfloat16))
    for mask, softcap in ((some_mask(), 0.0), (None, 3.0)):
        torch.library.opcheck(
            torch.ops.jetrl_examples.reference_attention.default,
            (q, k, v, mask, 0.5, softcap),
        )


def test_what_it_cannot_do_is_an_error() -> None:
    q, k, v = qkv(torch.bfloat16)
    with pytest.raises(ModelError, match="neither dropout"):
        reference_attention(nn.Identity(), q, k, v, None, dropout=0.1)
    with pytest.raises(ModelError, match="neither dropout"):
        reference_attention(nn.Identity(), q, k, v, None, s_aux=torch.zeros(6))
    with pytest.raises(ModelError, match="bool mask"):
        reference_attention(nn.Identity(), q, k, v, some_mask().float())


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma3])
def test_decode_batch_padding_and_length_keep_a_row_s_bits(
    make: Callable[[], Any],
) -> None:
    model = make_exact(make())
    length = 12
    tokens = torch.randint(3, 97, (1, length))
    with torch.no_grad():
        alone = model(tokens).logits[0]

        cache = DynamicCache(config=model.config)
        kept = {cache_argument(model): cache, "use_cache": True}
        steps = [model(tokens[:, :5], **kept).logits[0]]
        for t in range(5, length):
            out = model(tokens[:, t : t + 1], **kept)
            steps.append(out.logits[0])
        assert torch.equal(torch.cat(steps), alone)

        pad = 6
        batch = torch.randint(3, 97, (4, length + pad))
        batch[2, pad:] = tokens
        mask = torch.ones_like(batch)
        mask[2, :pad] = 0
        mask[1, :2] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        padded = model(batch, attention_mask=mask, position_ids=positions).logits
        assert torch.equal(padded[2, pad:], alone)

        prefix = model(tokens[:, :7]).logits[0]
        assert torch.equal(prefix, alone[:7])
    assert alone.float().std() > 0.1


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiles_whole_for_any_length_and_differentiates() -> None:
    model = tiny_llama(layers=1)
    use_reference_attention(model)
    compiled: Any = torch.compile(
        model, backend="aot_eager", fullgraph=True, dynamic=True
    )
    torch._dynamo.reset()
    losses = {}
    for length in (6, 9):
        tokens = torch.randint(3, 97, (2, length), generator=torch.Generator())
        mask = torch.ones_like(tokens)
        for run in (model, compiled):
            model.zero_grad()
            loss = run(tokens, attention_mask=mask, labels=tokens).loss
            loss.backward()
            grad = model.get_input_embeddings().weight.grad
            assert grad is not None
            losses[length, run is model] = (loss.item(), grad.clone())
        assert losses[length, True][0] == losses[length, False][0]
        assert torch.equal(losses[length, True][1], losses[length, False][1])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert math.isfinite(losses[6, True][0])
