"""Exact mode on a CPU: sampled log-probs are the trainer's, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exact_models import (
    VOCABULARY,
    compiled,
    compiled_whole,
    make_pair,
    make_trainer,
    rollout_log_probs,
    trainer_log_probs,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from jetrl_compile.containment import check_containment
from jetrl_compile.errors import LoweringError, ModelError, RecipeError
from jetrl_compile.exact_attention import NAME, is_exact, use_exact_attention
from jetrl_compile.examples.sampling import position_ids
from jetrl_compile.layers import compile_layers
from jetrl_compile.options import parse_options
from jetrl_compile.report_sink import collect_reports
from jetrl_compile.rollout import refit

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Lengths of sequences, chunks that the rollout reads them in, and a seed."""
    longest = draw(st.integers(2, 20))
    others = draw(st.lists(st.integers(2, longest), max_size=4))
    lengths = draw(st.permutations([longest, *others]))
    chunks: list[int] = []
    while sum(chunks) < longest:
        chunks.append(draw(st.integers(1, min(7, longest - sum(chunks)))))
    return lengths, chunks, draw(st.integers(0, 1000))


def left_padded(lengths: list[int], seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    tokens = torch.randint(VOCABULARY, (len(lengths), longest), generator=generator)
    mask = torch.zeros_like(tokens)
    for row, length in enumerate(lengths):
        mask[row, longest - length :] = 1
    return tokens * mask, mask


def of_tokens(log_probs: Tensor, mask: Tensor) -> Tensor:
    """The log-probs of tokens that follow on a token."""
    return log_probs[mask[:, :-1].bool()]


@pytest.fixture(name="pair", scope="module", params=["llama", "qwen3"])
def _pair(request: pytest.FixtureRequest) -> Any:
    torch._dynamo.reset()
    trainer, rollout = make_pair(request.param)
    return (
        compiled(trainer, "train", fuse=True),
        compiled(rollout, "rollout", fuse=True),
    )


@settings(
    max_examples=25,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # an example is small already
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(batch=batches(), temperature=st.sampled_from([1.0, 0.7]))
def test_any_batch_in_any_chunks(
    pair: Any, batch: tuple[list[int], list[int], int], temperature: float
) -> None:
    lengths, chunks, seed = batch
    trainer, rollout = pair
    config: Any = torch._dynamo.config
    with config.patch(recompile_limit=64):  # sizes of 1, with and without gradients
        check(trainer, rollout, lengths, chunks, seed, temperature)


def check(
    trainer: Any,
    rollout: Any,
    lengths: list[int],
    chunks: list[int],
    seed: int,
    temperature: float,
) -> None:
    tokens, mask = left_padded(lengths, seed)
    trained = trainer_log_probs(trainer, tokens, mask, temperature)
    sampled = rollout_log_probs(rollout, tokens, mask, chunks, temperature)
    assert torch.equal(of_tokens(sampled, mask), of_tokens(trained.detach(), mask))
    # Alone, a sequence has what it has among others.
    row = seed % len(lengths)
    own = tokens[row : row + 1, -lengths[row] :]
    alone = trainer_log_probs(trainer, own, torch.ones_like(own), temperature)
    assert torch.equal(alone[0], trained[row, -(lengths[row] - 1) :])


@pytest.mark.parametrize("kind", ["qwen2", "whole"])
def test_bits_stay_equal_after_a_step_and_fused_or_not(kind: str) -> None:
    trainer, rollout = make_pair(kind)
    plain, fused = (compiled(trainer, "train", fuse=fuse) for fuse in (False, True))
    decode = compiled(rollout, "rollout", fuse=True)
    tokens, mask = left_padded([9, 12, 3], 1)
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.5)
    before = torch.empty(0)
    for _ in range(2):
        trained = trainer_log_probs(fused, tokens, mask)
        other = trainer_log_probs(plain, tokens, mask)
        sampled = rollout_log_probs(decode, tokens, mask, [5, *[1] * 7])
        kept = of_tokens(trained, mask)
        assert torch.equal(of_tokens(sampled, mask), kept)
        assert torch.equal(of_tokens(other, mask), kept)
        assert not torch.equal(kept, before)
        before = kept.detach()
        torch.autograd.backward(-kept.mean())
        optimizer.step()
        optimizer.zero_grad()
        refit(rollout, trainer.named_parameters())


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_fsdp2_with_masters_in_fp32(tmp_path: Path) -> None:
    tokens, mask = left_padded([9, 12, 3], 1)
    trainer, rollout = make_pair("qwen3")
    decode = compiled(rollout, "rollout", fuse=True)
    sampled = rollout_log_probs(decode, tokens, mask, [5, *[1] * 7])
    torch._dynamo.reset()
    init = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=init, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        trainer.float()
        compile_layers(trainer, lowering="aot", exact=True, fuse=True)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        layers, head = trainer.get_submodule("model").layers, trainer.lm_head
        for part in (*layers, head, trainer):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        trained = of_tokens(trainer_log_probs(trainer, tokens, mask), mask)
        assert torch.equal(trained, of_tokens(sampled, mask))
        torch.autograd.backward(trained.mean())
        assert all(p.grad is not None for p in trainer.parameters())
    finally:
        dist.destroy_process_group()


def test_logits_of_the_last_tokens_alone() -> None:
    """As generation asks for them: a slice, whose head is a batched GEMM."""
    trainer, rollout = make_pair("qwen3")
    tokens, mask = left_padded([9, 12, 3], 1)
    last, whole = (
        compiled(model, phase)(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=position_ids(mask),
            use_cache=False,
            logits_to_keep=kept,
        ).logits
        for model, phase, kept in ((rollout, "rollout", 1), (trainer, "train", 0))
    )
    assert torch.equal(last[:, 0], whole[:, -1])


def test_inductor_gives_the_same_bits() -> None:
    trainer = make_trainer("whole")
    tokens, mask = left_padded([9, 12, 3], 1)
    runs = [
        compiled(trainer, "train", fuse=True, lowering=lowering)
        for lowering in ("aot", "inductor")
    ]
    with fresh_cache():
        plain, generated = (
            of_tokens(trainer_log_probs(run, tokens, mask), mask) for run in runs
        )
        assert torch.equal(plain, generated)
        torch.autograd.backward(generated.mean())
    assert all(p.grad is not None for p in trainer.parameters())


def test_gradients_are_those_of_the_default_mode() -> None:
    """Within the noise of FP8: one fifth of what BF16 differs by."""
    tokens, mask = left_padded([9, 12, 3], 1)
    grads = {}
    for name, options in (
        ("exact", {"exact": True}),
        ("default", {"exact": False}),
        ("bf16", {"exact": False, "recipe": "bf16"}),
    ):
        torch._dynamo.reset()
        trainer = make_trainer("qwen3", attention=name == "exact")
        run = compiled(trainer, "train", fuse=True, **options)
        kept = of_tokens(trainer_log_probs(run, tokens, mask), mask)
        torch.autograd.backward(kept.mean())
        grads[name] = {n: p.grad.double() for n, p in trainer.named_parameters()}
    worst = 0.0
    for name, wanted in grads["bf16"].items():
        gaps = [(grads[m][name] - wanted).norm() for m in ("exact", "default")]
        worst = max(worst, float(gaps[0] / gaps[1]))
    assert worst < 1.3, "the noise of FP8 is no larger than in the default mode"


@pytest.mark.parametrize(
    ("kind", "fuse"),
    [("llama", False), ("llama", True), ("qwen2", True), ("whole", True)],
)
def test_both_graphs_are_exact(kind: str, fuse: bool) -> None:
    trainer, rollout = make_pair(kind)
    tokens, mask = left_padded([9, 12], 1)
    with collect_reports() as reports:
        run = compiled_whole(trainer, "train", fuse=fuse)
        trainer_log_probs(run, tokens, mask)
        run = compiled_whole(rollout, "rollout", fuse=fuse)
        trainer_log_probs(run, tokens, mask)
    train, roll = (report.graph for report in reports)
    report = check_containment(roll, train, exact=True)
    assert report.contained, "\n".join(map(str, report.differences))
    kernels = {op.provider for op in train.operators if op.phase == "forward"}
    assert kernels >= {
        "jetrl.rms_norm",
        "jetrl.rope",
        "jetrl.attention.reference",
        "jetrl.silu_mul",
        "reference",
    }
    assert reports[0].lowered == {"fprop": 14, "dgrad": 14, "wgrad": 14}
    if fuse:
        assert reports[0].changes["fuse_quantize"] > 20
    assert (reports[0].changes["merge_siblings"] > 0) == (kind == "whole")


def test_an_operator_without_a_kernel_is_an_error_that_names_it() -> None:
    trainer = make_trainer(attention=False)
    run = compiled_whole(trainer, "train")
    tokens, mask = left_padded([9, 12], 1)
    with pytest.raises(Exception, match="exact mode: ") as caught:
        trainer_log_probs(run, tokens, mask)
    error = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(error, LoweringError)
    assert "model.layers.0.self_attn:attention (attention) is run by aten" in str(error)


def test_packed_sequences_are_told_apart_by_their_positions() -> None:
    trainer = make_trainer()
    run = compiled(trainer, "train")
    tokens, mask = left_padded([6, 6, 6], 3)
    apart = trainer_log_probs(run, tokens, mask)
    positions = torch.arange(6).repeat(3)[None]
    packed = tokens.reshape(1, -1)
    out = run(input_ids=packed, position_ids=positions, use_cache=False).logits
    scores = torch.log_softmax(out[0].float(), -1).view(3, 6, -1)
    found = scores[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
    assert torch.equal(found, apart)


def test_what_attention_refuses() -> None:
    trainer = make_trainer()
    assert is_exact(trainer)
    assert trainer.config._attn_implementation == NAME
    layer = trainer.get_submodule("model.layers.0.self_attn")
    tokens, _ = left_padded([4], 0)
    layer.attention_dropout = 0.5
    trainer.train()
    with pytest.raises(ModelError, match=r"has no kernel with dropout=0\.5"):
        trainer(tokens)
    trainer.eval()
    four = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    with pytest.raises(ModelError, match="got a mask of shape"):
        trainer(tokens, attention_mask=four)


def test_a_model_that_takes_no_other_attention() -> None:
    def refuse(_: str) -> None:
        raise ValueError("only eager")

    trainer = make_trainer(attention=False)
    trainer.set_attn_implementation = refuse
    with pytest.raises(ModelError, match="takes no other attention: only eager"):
        use_exact_attention(trainer)


def test_options() -> None:
    assert parse_options({"exact": True}).exact
    with pytest.raises(RecipeError, match="exact does not go with mode="):
        parse_options({"exact": True, "mode": "reduce-overhead"})
    with pytest.raises(RecipeError, match="option exact=3 is unknown"):
        parse_options({"exact": 3})
