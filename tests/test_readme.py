"""What README.md and docs/ say of recipes, options and measurements is true."""

import re
from dataclasses import fields

import pytest
from pages import ROOT, table_rows

from jetrl_compile import recipe
from jetrl_compile.options import CompileOptions

MEASURED = "".join(
    (ROOT / "docs" / name).read_text() for name in ("log.md", "precision_flow.md")
)


def first_column(page: str, heading: str) -> list[str]:
    """The names in the first column of a table."""
    rows = table_rows((ROOT / page).read_text(), heading)
    return [row[0].strip("`") for _, row in rows]


def test_recipes_are_those_of_the_registry() -> None:
    names = first_column("docs/recipes.md", "recipe")
    assert tuple(names) == (
        "jetrl",
        "jetrl_paper",
        "jetrl_ue8m0",
        "rollout_only",
        "bf16",
    )
    assert set(names) == set(recipe.recipe_names())


def test_options_are_those_of_the_backend() -> None:
    names = first_column("docs/pytorch.md", "option")
    # What the audit alone sets.
    assert set(names) == {field.name for field in fields(CompileOptions)} - {"recorder"}


@pytest.mark.parametrize("page", ["README.md", "docs/parity.md"])
def test_numbers_of_tables_were_measured(page: str) -> None:
    """They stand in the log, or in the contract, which names their source."""
    tables = " ".join(re.findall(r"^\|.*\|$", (ROOT / page).read_text(), re.MULTILINE))
    for number in re.findall(r"(?<![\w.])\d+\.\d+(?:e-?\d+)?(?![\w.])", tables):
        assert any(form in MEASURED for form in spellings(number)), number


def spellings(number: str) -> set[str]:
    """A number as it may be written elsewhere: with an exponent, with more digits."""
    with_exponent = f"{float(number):.2e}".replace("e-0", "e-").replace("e+0", "e")
    return {number, with_exponent, f"{number}0"}
