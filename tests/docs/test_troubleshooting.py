"""docs/troubleshooting.md has an entry for each error message of the sources."""

import re

import pytest
from error_messages import CLASSES, HOLE, Message, messages
from pages import ROOT, table_rows

PAGE = ROOT / "docs" / "troubleshooting.md"
MESSAGES = messages()


def entries() -> list[tuple[str, str, str]]:
    """The class (a section), pattern and cause of each entry."""
    found = []
    for section, (first, *rest) in table_rows(PAGE.read_text(), "message"):
        for pattern in re.findall(r"`([^`]+)`", first):
            found.append((section, pattern, " ".join(rest)))
    return found


ENTRIES = entries()


def is_of(pattern: str, message: Message) -> bool:
    """Whether the words of a pattern are those of a message, holes for holes."""
    words = ".*".join(re.escape(part.strip()) for part in pattern.split(HOLE))
    return re.search(words, message.text, re.DOTALL) is not None


def found_by(message: Message) -> list[str]:
    """The patterns of a message's own section; of all, if its class is an argument."""
    return [
        pattern
        for section, pattern, _ in ENTRIES
        if message.kind in ("", section) and is_of(pattern, message)
    ]


def test_the_sources_have_messages() -> None:
    assert len(MESSAGES) > 200
    assert {message.kind for message in MESSAGES} >= CLASSES - {"JetRLError"}


@pytest.mark.parametrize("kind", sorted({message.kind for message in MESSAGES}))
def test_each_message_has_an_entry(kind: str) -> None:
    lost = [m for m in MESSAGES if m.kind == kind and not found_by(m)]
    assert not lost, "add to docs/troubleshooting.md:\n" + "\n".join(
        f"## {m.kind}: `{m.text}` ({m.place})" for m in lost
    )


def test_each_entry_is_of_a_message_and_has_a_cause() -> None:
    used = {
        (section, pattern)
        for section, pattern, _ in ENTRIES
        for message in MESSAGES
        if message.kind in ("", section) and is_of(pattern, message)
    }
    stale = [each for each in ENTRIES if each[:2] not in used]
    assert not stale, "no message has these words any more"
    assert all(len(cause.split()) >= 2 for _, _, cause in ENTRIES)


def test_a_pattern_has_words_of_its_own() -> None:
    for _, pattern, _ in ENTRIES:
        assert len(pattern.replace(HOLE, "").strip()) >= 6, pattern


def test_an_unknown_message_is_seen() -> None:
    made = Message("RecipeError", "the moon is full; wait a week", "x.py:1")
    assert not found_by(made)
