"""A compile cache that holds a graph skips the passes; the report still comes."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import (
    IGNORE_SCRIPT_METHOD,
    activations,
    backward,
    compiled,
)
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_inductor_cache

from jetrl_compile import graph_store
from jetrl_compile.backend import JetRLPass
from jetrl_compile.options import parse_options
from jetrl_compile.pipeline import CompileReport, source_hash
from jetrl_compile.recipe import JETRL
from jetrl_compile.report_sink import collect_reports

PACKAGE = Path(graph_store.__file__).parent
pytestmark = [pytest.mark.usefixtures("fresh_dynamo", "caches"), IGNORE_SCRIPT_METHOD]


@pytest.fixture
def caches() -> Iterator[None]:
    """Inductor's caches, on and empty."""
    with (
        fresh_inductor_cache(),
        torch._inductor.config.patch(fx_graph_cache=True),
        torch._functorch.config.patch(enable_autograd_cache=True),
    ):
        yield


def make_layers() -> nn.Module:
    """GEMMs alone: Inductor makes no C++ code for them, which takes seconds."""
    torch.manual_seed(0)
    layers = [nn.Linear(192, 192, bias=False, dtype=torch.bfloat16) for _ in range(3)]
    return nn.Sequential(*layers)


def run(recipe: str = "jetrl", train: bool = True) -> tuple[CompileReport, Tensor]:
    """Compile as a new process would, as far as Dynamo knows."""
    torch._dynamo.reset()
    counters.clear()
    x = activations(96, 192)
    with collect_reports() as reports, torch.set_grad_enabled(train):
        y = compiled(make_layers(), recipe=recipe, lowering="inductor")(x)
        if train:
            backward(y)
    (report,) = reports
    return report, y.detach()


def hits() -> int:
    return (
        counters["aot_autograd"]["autograd_cache_hit"]
        + counters["inductor"]["fxgraph_cache_hit"]
    )


@pytest.mark.parametrize("train", [True, False])
def test_cached_graph_is_reported(train: bool) -> None:
    first, y = run(train=train)
    assert not first.from_cache
    assert hits() == 0
    second, again = run(train=train)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert second.from_cache
    assert "from the compile cache" in str(second)
    assert second == replace(first, from_cache=True, nodes=second.nodes)
    assert second.graph == first.graph
    assert second.lowered["fprop"] == 3
    assert torch.equal(y, again)


def test_other_recipe_is_no_hit() -> None:
    first, _ = run()
    other, _ = run("jetrl_ue8m0")
    assert hits() == 0
    assert not other.from_cache
    assert other.graph != first.graph
    assert run("jetrl_ue8m0")[0].from_cache
    assert run()[0].from_cache


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_lost_report_compiles_again(damage: str) -> None:
    first, y = run()
    folder = graph_store._path("x").parent
    for path in folder.iterdir():
        if damage == "missing":
            path.unlink()
        else:
            path.write_text(path.read_text()[:200])
    second, again = run()
    assert not second.from_cache
    assert second.graph == first.graph
    assert torch.equal(y, again)
    assert run()[0].from_cache


def test_uuid_covers_sources_and_recipe(tmp_path: Path) -> None:
    def uuid(**options: object) -> object:
        return JetRLPass([], [], parse_options(options)).uuid()

    changed = replace(JETRL, exclude=("a.b",))
    distinct = [
        uuid(),
        uuid(recipe="jetrl_paper"),
        uuid(recipe=changed),
        uuid(phase="rollout"),
        uuid(module_path="model.layers.0"),
    ]
    assert len(set(distinct)) == len(distinct)
    assert uuid() == uuid(recipe=JETRL)
    assert source_hash() in uuid()  # type: ignore[operator]
    copied = tmp_path / "jetrl_compile"
    shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("__pycache__"))
    assert source_hash(copied) == source_hash()
    source_hash.cache_clear()
    (copied / "passes" / "verify.py").write_text("# weaker\n")
    assert source_hash(copied) != source_hash()


def test_sources_at_any_depth_count(tmp_path: Path) -> None:
    deep = tmp_path / "integrations" / "engine" / "parts.py"
    deep.parent.mkdir(parents=True)
    hashes = []
    for text in ("a = 1\n", "a = 2\n"):
        deep.write_text(text)
        source_hash.cache_clear()
        hashes.append(source_hash(tmp_path))
    (tmp_path / "linked").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "linked")
    for text in ("", "b = 1\n"):
        (tmp_path / "linked" / "more.py").write_text(text)
        source_hash.cache_clear()
        hashes.append(source_hash(tmp_path / "root"))
    assert len(set(hashes)) == 4
