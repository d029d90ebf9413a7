"""`import jetrl_compile`: light, and the names that users need."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import jetrl_compile

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", jetrl_compile.__all__)
def test_every_name_loads(name: str) -> None:
    value = getattr(jetrl_compile, name)
    assert callable(value)
    assert value.__module__.startswith("jetrl_compile.")
    assert name in dir(jetrl_compile)


def test_no_torch_until_a_name_is_used() -> None:
    code = (
        "import sys, jetrl_compile\n"
        "assert 'torch' not in sys.modules\n"
        "jetrl_compile.RecipeError\n"
        "assert 'torch' not in sys.modules\n"
        "jetrl_compile.get_recipe('jetrl')\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_precision_graph_stays_a_module() -> None:
    module = importlib.import_module("jetrl_compile.precision_graph")
    assert jetrl_compile.precision_graph is module
    assert jetrl_compile.PrecisionGraph is module.PrecisionGraph


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'precision_grpah'"):
        _ = jetrl_compile.precision_grpah
