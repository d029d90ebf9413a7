"""In which order the norm adds up: the same in all its variants, seen without a GPU."""

from pathlib import Path

import pytest
from kernels_compiled import printed_by

pytest.importorskip("triton", reason="triton is not installed")


def test_every_variant_of_the_norm_adds_in_one_order() -> None:
    lines = printed_by(Path(__file__).parent / "norm_layouts.py")
    assert len(lines) == 4  # lengths of a row
    for first, *others in lines:
        assert first, "no sum of squares was found"
        assert len(others) == 7  # variants
        assert all(other == first for other in others)
