"""Where sequences begin, and that what was found is never that of other tensors."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from jetrl_compile.errors import ProviderError
from jetrl_compile.kernels import sequences, triton_common
from jetrl_compile.kernels.attention_ops import attention
from jetrl_compile.kernels.sequences import find_sequences

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_sequences_are_found_once_a_forward() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]]).bool()
    found = find_sequences(2, 4, 4, mask, None, mask.device)
    assert found.starts_q.tolist() == [0, 2, 4, 7, 8]
    assert found.longest_q == 3
    assert find_sequences(2, 4, 4, mask, None, mask.device) is found
    mask[0] = True
    assert find_sequences(2, 4, 4, mask, None, mask.device).starts_q.tolist() == [
        0,
        4,
        7,
        8,
    ]
    with torch.inference_mode():
        mask = torch.tensor([[1, 1]]).bool()
        assert find_sequences(1, 2, 2, mask, None, mask.device).longest_q == 2
        mask[0, 0] = False
        assert find_sequences(1, 2, 2, mask, None, mask.device).longest_q == 1
    cached = find_sequences(
        2, 1, 4, torch.tensor([[0, 1, 1, 1]] * 2), None, mask.device
    )
    assert cached.starts_q.tolist() == [0, 0, 1, 1, 2]
    assert cached.starts_k.tolist() == [0, 1, 4, 5, 8]


def test_backward_finds_the_sequences_of_forward() -> None:
    positions = torch.arange(6)[None].expand(2, 6)
    find = (2, 6, 6, None)
    found = find_sequences(*find, positions, positions.device)
    assert found.are_rows
    threads = ThreadPoolExecutor(1)
    same = threads.submit(find_sequences, *find, positions.detach(), positions.device)
    assert same.result() is found
    where = positions.data_ptr()
    del positions
    packed = torch.arange(3).repeat(2)[None].expand(2, 6)
    for _ in range(20):  # another tensor, perhaps where the first one was
        again = torch.empty(1, 6, dtype=torch.int64)
        if again.data_ptr() == where:
            break
    again.copy_(packed[:1])
    other = find_sequences(*find, again.expand(2, 6), again.device)
    assert other.starts_q.tolist() == [0, 3, 6, 9, 12]
    assert not other.are_rows


def test_few_answers_are_kept() -> None:
    masks = [torch.ones(1, 4, dtype=torch.bool) for _ in range(20)]
    found = [find_sequences(1, 4, 4, mask, None, mask.device) for mask in masks]
    assert find_sequences(1, 4, 4, masks[-1], None, masks[-1].device) is found[-1]
    assert find_sequences(1, 4, 4, masks[0], None, masks[0].device) is not found[0]


def test_streams_have_answers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = torch.ones(1, 4, dtype=torch.bool)
    find = (1, 4, 4, mask, None, mask.device)
    found = []
    for stream in (1, 2, 2, 1):
        monkeypatch.setattr(sequences, "_stream", lambda _, stream=stream: stream)
        found.append(find_sequences(*find))
    assert found[0] is found[3]
    assert found[1] is found[2]
    assert found[0] is not found[1]


def test_a_cuda_graph_gets_no_answer_that_was_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mask = torch.ones(1, 4, dtype=torch.bool)
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(sequences, "_stream", lambda _: 0)
    monkeypatch.setattr(sequences, "_is_capturing", lambda: False)
    for name in ("_of_batch", "_of_cache"):  # on the CPU
        find = getattr(sequences, name)
        monkeypatch.setattr(
            sequences, name, lambda *given, find=find: find(*given[:-1], mask.device)
        )
    kept = find_sequences(1, 4, 4, mask, None, cuda)  # of a run before it
    decoding = find_sequences(1, 1, 4, mask, None, cuda)
    assert find_sequences(1, 4, 4, mask, None, cuda) is kept
    monkeypatch.setattr(sequences, "_is_capturing", lambda: True)
    with pytest.raises(ProviderError, match="without CUDA graphs"):
        find_sequences(1, 4, 4, mask, None, cuda)
    captured = find_sequences(1, 1, 4, mask, None, cuda)
    assert captured is not decoding
    assert captured.starts_k.tolist() == decoding.starts_k.tolist()


@pytest.mark.skipif(
    triton_common.triton_missing() is not None, reason="runs Triton's kernel"
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
@pytest.mark.parametrize("learns", [False, True])
def test_two_masks_of_one_graph(learns: bool) -> None:
    # Inductor puts the second into the storage of the first.
    def attend(q: Tensor, ids: Tensor) -> Tensor:
        first = ids * 2 - ids
        x, _ = attention(q, q, q, None, first, 0.125, "triton")
        second = torch.where(first < 4, first, first - 4) + (x.amax() > 1e6).long()
        x = x.transpose(1, 2)
        result: Tensor = attention(x, x, x, None, second, 0.125, "triton")[0]
        return result

    q = torch.randn(1, 8, 2, 64, device=DEVICE).bfloat16().transpose(1, 2)
    q.requires_grad_(learns)
    ids = torch.arange(8, device=DEVICE)[None]
    compiled = torch.compile(attend, backend="jetrl")
    wanted, found = attend(q, ids), compiled(q, ids)
    assert torch.equal(wanted, found)
    if learns and DEVICE == "cuda":  # the kernel's backward is for GPUs
        (theirs,) = torch.autograd.grad(wanted.float().sum(), q)
        (mine,) = torch.autograd.grad(found.float().sum(), q)
        assert torch.equal(mine, theirs)
