"""The code in README.md and docs/precision_flow.md runs as it stands there."""

import re
from pathlib import Path
from typing import Any

import pytest
from tiny_models import IGNORE_SCRIPT_METHOD

from jetrl_compile import recipe

ROOT = Path(__file__).parent.parent


def python_blocks(path: str) -> list[str]:
    text = (ROOT / path).read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@IGNORE_SCRIPT_METHOD
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_readme_example(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = python_blocks("README.md")
    names: dict[str, Any] = {}
    exec(first, names)
    assert names["loss"].isfinite()
    for name, parameter in names["model"].named_parameters():
        assert parameter.grad is not None, name
    exec(second, names)
    assert capsys.readouterr().out == "contained (levels 1, 2, 3, 4 passed)\n"


def test_recipe_example() -> None:
    (block,) = python_blocks("docs/precision_flow.md")
    exec(block, {})
    assert "jetrl_but_first" in recipe.recipe_names()


def test_recipes_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    table = text[text.index("| recipe | trainer") :].partition("\n\n")[0]
    assert tuple(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == (
        *("jetrl", "jetrl_paper", "jetrl_ue8m0", "rollout_only", "bf16"),
    )
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(
        recipe.recipe_names()
    )


@pytest.mark.parametrize("path", ["README.md", "CONTRIBUTING.md", "docs/log.md"])
def test_links_lead_somewhere(path: str) -> None:
    text = (ROOT / path).read_text()
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert ((ROOT / path).parent / target).exists(), target
