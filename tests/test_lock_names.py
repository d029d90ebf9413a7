"""Names of repeated layers, folded and unfolded: nothing lost, whatever the name."""

import pytest
from hostile import NAMES
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jetrl_compile.lock_names import (
    absolute_name,
    fold_numbers,
    folded_name,
    relative_name,
    split_name,
    unfold_name,
)

parts = st.sampled_from(
    ["0", "1", "17", "007", "layers", "[", "]", "[0-3]", "[[]", "[=]", "", "a-b", "٣"]
)
paths = st.lists(parts, max_size=5).map(".".join)
names = st.builds(lambda path, role: path + role, paths, st.sampled_from(["", ":x.1"]))
any_names = names | st.text(max_size=12) | st.sampled_from(NAMES)


@given(any_names)
@settings(max_examples=300, deadline=None)
@example("model.layers.3.mlp.experts.12.up_proj:fprop")
def test_one_name(name: str) -> None:
    pieces, numbers = split_name(name)
    (texts,) = fold_numbers([numbers])
    folded = folded_name(pieces, texts)
    assert list(unfold_name(folded, 9)) == [(name, numbers)]


@given(any_names, any_names)
@settings(max_examples=300, deadline=None)
@example("layers.4.x", "layers.3.y:z")
def test_what_is_read(target: str, source: str) -> None:
    _, numbers = split_name(target)
    assert absolute_name(relative_name(source, numbers), numbers) == source


@given(
    st.integers(0, 3).flatmap(
        lambda n: st.sets(st.tuples(*[st.integers(0, 9)] * n), min_size=1, max_size=40)
    )
)
@settings(max_examples=200, deadline=None)
def test_sets_of_numbers(rows: set[tuple[int, ...]]) -> None:
    pieces = ["x."] + ["."] * len(next(iter(rows)))
    found = [
        numbers
        for texts in fold_numbers(rows)
        for _, numbers in unfold_name(folded_name(pieces, texts), 10_000)
    ]
    assert sorted(found) == sorted(rows)
    assert len(found) == len(rows)


def test_text() -> None:
    pieces, _ = split_name("model.layers.3.mlp.experts.0.up:fprop")
    every = [(layer, expert) for layer in (0, 1, 2, 5) for expert in range(8)]
    texts = fold_numbers(every)
    assert [folded_name(pieces, each) for each in texts] == [
        "model.layers.[0-2,5].mlp.experts.[0-7].up:fprop"
    ]
    assert fold_numbers([*every, (9, 0)]) == [("0-2,5", "0-7"), ("9", "0")]
    assert relative_name("model.layers.2.a", (3,)) == "model.layers.[-1].a"
    assert relative_name("model.layers.4.a", (3,)) == "model.layers.[+1].a"
    assert relative_name("model.layers.9.a", (3,)) == "model.layers.[9].a"
    assert relative_name("a[0].b", (3,)) == "a[[]0].b"


@pytest.mark.parametrize(
    ("folded", "message"),
    [
        ("a.[x].b", "no set of numbers"),
        ("a.[].b", "no set of numbers"),
        ("a.[3-1].b", "impossible range"),
        ("a.[0-999999].b", "impossible range"),
        ("a.[0-99].b.[0-99].c.[0-99]", "more than 1000"),
        ("a.[1234567].b", "no set of numbers"),
    ],
)
def test_wrong_sets(folded: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(unfold_name(folded, 1000))


@pytest.mark.parametrize("relative", ["a.[x]", "a.[-1]", "a.[=].[=]", "a.[0-3]", "[]"])
def test_wrong_neighbours(relative: str) -> None:
    with pytest.raises(ValueError, match=r"no number|no neighbour"):
        absolute_name(relative, (0,))
