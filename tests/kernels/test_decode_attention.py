"""Attention of decoded steps over a paged cache, against float64."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels_compiled import printed_by
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from jetrl_compile.errors import PrecisionFlowError
from jetrl_compile.kernels import triton_common
from jetrl_compile.kernels.decode_attention import (
    MAX_SPLITS,
    decode_attention,
    splits_of,
    unsupported,
)

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
UNIT = 2.0**-8  # the largest relative error of rounding to BF16
LENGTHS = (1, 0, 17, 64, 65, 66, 200, 129)
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(triton_common.triton_missing() is not None, reason="no triton"),
    *([pytest.mark.gpu] if ON_GPU else []),  # on a GPU: tests of its kernels
]


@dataclass
class Step:
    """A step of N sequences, and a cache of (pages, page, Hkv, D) twice."""

    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    values: Tensor
    lengths: Tensor
    table: Tensor
    slots: Any  # a tensor or None

    def run(self, splits: int = 0, arrived: Tensor | None = None) -> Tensor:
        if arrived is None:
            arrived = torch.zeros(self.k.shape[0] * self.k.shape[1], dtype=torch.int32)
            arrived = arrived.to(DEVICE)
        out = torch.full(self.q.shape, float("nan"), dtype=self.q.dtype, device=DEVICE)
        decode_attention(
            self.q,
            self.k,
            self.v,
            self.keys,
            self.values,
            out,
            self.lengths,
            self.table,
            self.slots,
            arrived,
            self.q.shape[-1] ** -0.5,
            splits,
        )
        assert not arrived.any()
        return out


def make(
    heads: int = 8,
    heads_k: int = 2,
    size: int = 64,
    lengths: tuple[int, ...] = LENGTHS,
    page: int = 16,
    by_head: bool = False,
    seed: int = 0,
    spread: float = 1.0,
) -> Step:
    generator = torch.Generator().manual_seed(seed)
    count, pages = len(lengths), -(-max(lengths) // page) + 1
    qk = torch.randn((count, heads + heads_k, size), generator=generator)
    qk[:, :heads] *= spread
    q, k = qk.bfloat16().to(DEVICE).tensor_split((heads,), 1)
    # Strides of values are others than those of keys.
    v = torch.randn((count, heads_k + 1, 2 * size), generator=generator)
    v = v.bfloat16().to(DEVICE)[:, 1:, size:]
    shape = (count * pages + 3, 2, page, heads_k, size)
    cache = torch.randn(shape, generator=generator).bfloat16().to(DEVICE)
    keys, values = cache.unbind(1)
    if by_head:  # vLLM's layout HND
        keys = keys.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        values = values.contiguous()
    order = torch.randperm(count * pages, generator=generator)
    table = order.view(count, pages).int()
    slots = [
        int(table[row, (n - 1) // page]) * page + (n - 1) % page if n else -1
        for row, n in enumerate(lengths)
    ]
    return Step(
        q,
        k,
        v,
        keys,
        values,
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        table.to(DEVICE),
        torch.tensor(slots, device=DEVICE),
    )


def check(step: Step, out: Tensor) -> None:
    """Compare with float64, within what two roundings to BF16 may change.

    Weights are rounded before they multiply values, and the sum at its end. What FP32
    adds is far below 2^-14 of the sum of magnitudes.
    """
    groups = step.q.shape[1] // step.k.shape[1]
    for row, length in enumerate(step.lengths.tolist()):
        if not length:
            assert not out[row].any()
            continue
        pages = step.table[row].long()
        keys, values = (x[pages].double() for x in (step.keys, step.values))
        keys, values = (x.flatten(0, 1)[:length].clone() for x in (keys, values))
        keys[-1], values[-1] = step.k[row].double(), step.v[row].double()
        keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
        scores = torch.einsum("hd,nhd->hn", step.q[row].double(), keys)
        weights = (scores * step.q.shape[-1] ** -0.5).softmax(1)
        wanted = torch.einsum("hn,nhd->hd", weights, values)
        size = torch.einsum("hn,nhd->hd", weights, values.abs())
        bound = (UNIT + 2**-14) * size + UNIT * wanted.abs() * (1 + UNIT)
        assert ((out[row].double() - wanted).abs() <= bound).all(), (row, length)


@pytest.mark.parametrize("splits", [0, 1, 2, 8])
@pytest.mark.parametrize(
    ("heads", "heads_k", "size"), [(8, 2, 64), (3, 3, 80), (16, 1, 128), (9, 3, 64)]
)
def test_against_float64(heads: int, heads_k: int, size: int, splits: int) -> None:
    step = make(heads, heads_k, size)
    check(step, step.run(splits))


@pytest.mark.parametrize(("page", "by_head"), [(16, True), (48, False), (128, True)])
def test_layouts_of_caches(page: int, by_head: bool) -> None:
    step = make(page=page, by_head=by_head)
    check(step, step.run(2))


def test_large_scores() -> None:
    step = make(spread=60.0)
    check(step, step.run(4))


@pytest.mark.parametrize(("splits", "by_head"), [(1, False), (1, True), (4, True)])
def test_the_cache_gets_the_steps_keys_and_nothing_else(
    splits: int, by_head: bool
) -> None:
    step = make(by_head=by_head)
    step.slots[4] = -1
    keys, values = step.keys.clone(), step.values.clone()
    for row, slot in enumerate(step.slots.tolist()):
        if slot >= 0:
            keys[slot // 16, slot % 16] = step.k[row]
            values[slot // 16, slot % 16] = step.v[row]
    check(step, step.run(splits))
    assert torch.equal(step.keys, keys)
    assert torch.equal(step.values, values)


@pytest.mark.parametrize("splits", [1, 4])
def test_without_slots_nothing_is_written(splits: int) -> None:
    step, other = make(), make()
    other.slots = None
    keys, values = other.keys.clone(), other.values.clone()
    assert torch.equal(step.run(splits), other.run(splits))
    assert torch.equal(other.keys, keys)
    assert torch.equal(other.values, values)


def test_what_lies_in_the_slot_is_not_read() -> None:
    step, other = make(), make()
    for row, slot in enumerate(step.slots.tolist()):
        if slot >= 0:
            for x in (other.keys, other.values):
                x[slot // 16, slot % 16] = float("nan") if row % 2 else 1e4
    assert torch.equal(step.run(2), other.run(2))


def test_a_key_beyond_the_length_is_not_read() -> None:
    step, other = make(), make()
    for row, length in enumerate(other.lengths.tolist()):
        page = other.table[row, length // 16].long()
        for x in (other.keys, other.values):
            x[page, length % 16 :] = float("nan")
    assert torch.equal(step.run(2), other.run(2))


def test_weights_are_rounded_for_values_and_not_for_their_sum() -> None:
    """As FlashAttention does, so that one block of keys is known to its last bits."""
    step = make(lengths=(1, 2, 30, 64), spread=2.0)
    out = step.run(1)
    for row, length in enumerate(step.lengths.tolist()):
        pages = step.table[row].long()
        keys, values = (
            x[pages].double().flatten(0, 1)[: length - 1].repeat_interleave(4, 1)
            for x in (step.keys, step.values)
        )
        own_k, own_v = (
            x[row].double().repeat_interleave(4, 0) for x in (step.k, step.v)
        )
        q = step.q[row].double() * 64**-0.5
        score = torch.cat(
            (torch.einsum("hd,nhd->hn", q, keys), (q * own_k).sum(1)[:, None]), 1
        )
        weights = (score - score.amax(1, keepdim=True)).exp()
        rounded = weights[:, :-1].bfloat16().double()
        summed = torch.einsum("hn,nhd->hd", rounded, values)
        summed += weights[:, -1:] * own_v
        wanted = summed / weights.sum(1, keepdim=True)
        size = torch.einsum("hn,nhd->hd", rounded, values.abs()) + weights[:, -1:]
        # Of scores in FP32 a few weights round to the other neighbour.
        error = (out[row].double() - wanted).abs()
        bound = UNIT * wanted.abs() * (1 + UNIT) + 2**-12 * size
        assert (error <= bound).all(), (row, length, (error / bound).max())


def test_rows_do_not_depend_on_each_other() -> None:
    whole = make().run(4)
    step = make()
    kept = torch.tensor([6, 2, 0], device=DEVICE)
    for name in ("q", "k", "v", "lengths", "table", "slots"):
        setattr(step, name, getattr(step, name)[kept])
    assert torch.equal(step.run(4), whole[kept])


def test_calls_repeat_their_bits() -> None:
    step = make(8, 2, 64, (700, 1, 333, 64) * 8 if ON_GPU else (150, 70))
    arrived = torch.zeros(32 * 2, dtype=torch.int32, device=DEVICE)
    first = step.run(16, arrived)
    check(step, first)
    for _ in range(50 if ON_GPU else 2):
        assert torch.equal(step.run(16, arrived), first)


@pytest.mark.gpu
def test_a_cache_of_more_than_two_to_the_31_elements() -> None:
    step, far = make(32, 8, 128), make(32, 8, 128)
    pages = 140_000
    shift = pages - len(far.keys)
    assert shift * far.keys[0].numel() > 2**31
    for name in ("keys", "values"):
        near = getattr(far, name)
        moved = near.new_empty((pages, *near.shape[1:]))
        moved[shift:] = near
        setattr(far, name, moved)
    far.table += shift
    far.slots += shift * 16
    assert torch.equal(far.run(2), step.run(2))
    assert torch.equal(far.keys[shift:], step.keys)
    assert torch.equal(far.values[shift:], step.values)


@pytest.mark.gpu
def test_a_captured_graph_serves_other_lengths() -> None:
    step = make(lengths=(900,) * 8, heads=32, heads_k=8, size=128)
    arrived = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    step.lengths.fill_(1)
    step.run(16, arrived)
    out = torch.empty_like(step.q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_attention(
            step.q,
            step.k,
            step.v,
            step.keys,
            step.values,
            out,
            step.lengths,
            step.table,
            step.slots,
            arrived,
            128**-0.5,
        )
    for lengths in ((900, 1, 0, 65, 512, 899, 33, 2), (0,) * 8, (900,) * 8):
        step.lengths.copy_(torch.tensor(lengths))
        for row, n in enumerate(lengths):
            page = int(step.table[row, max(n - 1, 0) // 16])
            step.slots[row] = page * 16 + (n - 1) % 16 if n else -1
        graph.replay()
        torch.cuda.synchronize()
        check(step, out)
        assert torch.equal(out, step.run(0)), lengths


@pytest.mark.parametrize("seed", range(6))
def test_random_steps(seed: int) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    heads_k, size = number(1, 4), 8 * number(2, 20 if ON_GPU else 12)
    longest = 5000 if ON_GPU else 150
    lengths = tuple(number(0, longest) for _ in range(number(1, 9)))
    splits = 1 << number(0, 4)
    case = (heads_k * number(1, 16), heads_k, size, (*lengths, 1), 16 * number(1, 4))
    print(f"seed {1000 + seed}: {case}, {splits} splits")
    step = make(*case, seed=seed)
    check(step, step.run(splits))


def test_no_sequence() -> None:
    step = make()
    for name in ("q", "k", "v", "lengths", "table", "slots"):
        setattr(step, name, getattr(step, name)[:0])
    assert step.run().shape == (0, 8, 64)


def test_what_it_cannot_run() -> None:
    assert unsupported(32, 8, 128) is None
    assert "longer than 256" in str(unsupported(8, 8, 512))
    assert "17 heads of queries on 1" in str(unsupported(17, 1, 64))
    assert "7 heads of queries on 2" in str(unsupported(7, 2, 64))
    with pytest.raises(PrecisionFlowError, match="use another one"):
        make(17, 1).run()
    step = make()
    with pytest.raises(PrecisionFlowError, match="got 15 counters and needs 8 seq"):
        step.run(2, torch.zeros(15, dtype=torch.int32, device=DEVICE))
    step.q = step.q.half()
    with pytest.raises(PrecisionFlowError, match=r"got torch\.float16 queries"):
        step.run()


def test_splits_fill_the_gpu() -> None:
    assert [splits_of(n, 132) for n in (0, 1, 64, 128, 264, 265, 4096)] == [
        MAX_SPLITS,
        MAX_SPLITS,
        8,
        4,
        2,
        1,
        1,
    ]


def test_it_compiles_for_hopper() -> None:
    lines = printed_by(Path(__file__).parent / "compile_attention.py")
    assert len(lines) == 9
    for splits, local, names in lines:
        assert not local
        assert names[0] == "griddepcontrol.wait"
        # Keys and values are copied ahead while the block before is multiplied.
        assert names.index("cp.async.cg") < names.index("mma.sync")
        assert "cp.async.cg" in names[names.index("mma.sync") :]
        atoms = [name for name in names if name.startswith("atom.")]
        if splits == 1:
            assert not atoms
            continue
        # Every thread has stored its part before one of them says so, and parts of
        # other programs come from the L2 cache.
        assert atoms == ["atom.global.gpu.acq_rel"]
        before = names[: names.index(atoms[0])]
        after = names[names.index(atoms[0]) :]
        stored = len(before) - 1 - before[::-1].index("st.global")
        assert "bar.sync" in before[stored:]
        assert "ld.global.cg" in after
        assert "ld.global" not in after
