"""Names of repeated layers, folded into one and unfolded again.

A number in the module path (the part before the last colon) is the index of a layer. A
folded name has sets of them in brackets: "model.layers.[0-35].mlp.up_proj:fprop". In
the name of what such an operator reads, "[=]" is the operator's own number at that
place, "[-1]" and "[+1]" its neighbours'. A bracket that is part of a name is "[[]".
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,5})(?![^.])")
_BRACKET = re.compile(r"\[([^\[\]]*|\[)\]")
_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")
_RELATIVE = {"=": 0, "-1": -1, "+1": 1}


def split_name(name: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the pieces of a name between the numbers in its path, and the numbers."""
    path, role = _split(name)
    numbers = tuple(int(number) for number in _NUMBER.findall(path))
    *pieces, last = _NUMBER.split(path)
    return (*pieces, last + role), numbers


def fold_numbers(rows: Iterable[tuple[int, ...]]) -> list[tuple[str, ...]]:
    """Return sets of numbers whose products are exactly some rows of equal length.

    Args:
        rows: Different rows, at least one.

    Returns:
        For each product the text of each column's set, in ascending order: [("0-1",
        "0-7")] for two layers of eight experts each, [()] for a row without numbers.
    """
    by_rest: dict[int, set[tuple[int, ...]]] = {}
    for row in rows:
        if not row:
            return [()]
        by_rest.setdefault(row[0], set()).add(row[1:])
    same: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for number, rest in sorted(by_rest.items()):
        same.setdefault(frozenset(rest), []).append(number)
    return [
        (_ranges(numbers), *tail)
        for rest, numbers in same.items()
        for tail in fold_numbers(rest)
    ]


def folded_name(pieces: Sequence[str], texts: Sequence[str]) -> str:
    """Return the pieces of `split_name` with the text of each set between them."""
    return _join([_literal(piece) for piece in pieces], [f"[{x}]" for x in texts])


def relative_name(name: str, numbers: Sequence[int]) -> str:
    """Return the name of what an operator reads, by the operator's own numbers.

    Args:
        name: Of what is read.
        numbers: The numbers of the operator that reads it.
    """
    pieces, own = split_name(name)
    texts = []
    for place, number in enumerate(own):
        near = number - numbers[place] if place < len(numbers) else None
        words = [word for word, step in _RELATIVE.items() if step == near]
        texts.append(words[0] if words else str(number))
    return folded_name(pieces, texts)


def unfold_name(folded: str, most: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each name of a folded one, with its numbers.

    Raises:
        ValueError: A bracket holds no set of numbers, or there are more names than
            `most`.
    """
    pieces, sets = _parse(folded)
    columns = [_numbers(text, most) for text in sets]
    total = 1
    for column in columns:
        total *= len(column)
    if total > most:
        raise ValueError(f"{folded!r:.80} stands for {total} names, more than {most}")
    for row in itertools.product(*columns):
        yield _join(pieces, [str(number) for number in row]), row


def absolute_name(relative: str, numbers: Sequence[int]) -> str:
    """Return the name that `relative_name` was given.

    Raises:
        ValueError: A bracket holds no number and no neighbour.
    """
    pieces, texts = _parse(relative)
    found = []
    for place, text in enumerate(texts):
        if text in _RELATIVE and place < len(numbers):
            number = numbers[place] + _RELATIVE[text]
            if number < 0:
                raise ValueError(f"{relative!r:.80} has no neighbour below 0")
            found.append(str(number))
        elif _NUMBER.fullmatch(text):
            found.append(text)
        else:
            raise ValueError(f"[{text:.20}] in {relative!r:.80} is no number")
    return _join(pieces, found)


def _split(name: str) -> tuple[str, str]:
    path, colon, role = name.rpartition(":")
    return (path, colon + role) if colon else (name, "")


def _literal(text: str) -> str:
    return text.replace("[", "[[]")


def _parse(text: str) -> tuple[list[str], list[str]]:
    """Return the literal pieces, and what stands in the brackets between them."""
    pieces, inside, place = [""], [], 0
    for match in _BRACKET.finditer(text):
        pieces[-1] += text[place : match.start()]
        place = match.end()
        if match[1] == "[":
            pieces[-1] += "["
        else:
            inside.append(match[1])
            pieces.append("")
    pieces[-1] += text[place:]
    return pieces, inside


def _join(pieces: Sequence[str], texts: Sequence[str]) -> str:
    filled = (text + piece for text, piece in zip(texts, pieces[1:], strict=True))
    return pieces[0] + "".join(filled)


def _ranges(numbers: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{a}-{b}" if a != b else f"{a}" for a, b in parts)


def _numbers(text: str, most: int) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"[{text:.40}] is no set of numbers such as [0-35]")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low or high - low >= most:
            raise ValueError(f"[{text:.40}] is an impossible range")
        found += range(low, high + 1)
    return found
