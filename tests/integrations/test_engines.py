"""Engines by name, and the commands that ask one."""

from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from jetrl_compile import engines
from jetrl_compile.cli import app
from jetrl_compile.containment_report import ContainmentReport
from jetrl_compile.engines import EngineAudit, load_engine
from jetrl_compile.errors import ModelError
from jetrl_compile.precision_graph import make_graph


def known(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    points = [EntryPoint(name, value, engines.GROUP) for name, value in values.items()]
    where = "jetrl_compile.engines.metadata.entry_points"
    monkeypatch.setattr(where, lambda group: points if group else [])


def test_unknown_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, one="math", two="no_such_module")
    assert load_engine("one").pi > 3
    with pytest.raises(ModelError, match="'three' is unknown; known: one, two"):
        load_engine("three")
    with pytest.raises(ModelError, match=r"no_such_module.*pip install"):
        load_engine("two")


def test_vllm_is_known() -> None:
    assert "vllm" in engines.engine_names()
    assert callable(load_engine("vllm").graph)


def stand_in(monkeypatch: pytest.MonkeyPatch, report: ContainmentReport) -> list[Any]:
    calls: list[Any] = []

    def graph(folder: Any, **settings: Any) -> Any:
        calls.append((folder, settings["recipe"]))
        return make_graph([], [], engine="stand-in")

    def audit(folder: Any, **settings: Any) -> EngineAudit:
        calls.append((folder, settings["length"]))
        return EngineAudit(report, torch.tensor([[0.0, 0.25]]), {})

    module = SimpleNamespace(graph=graph, audit=audit)
    monkeypatch.setattr(engines, "load_engine", lambda name: module)
    return calls


def test_graph_of_an_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, identical: ContainmentReport
) -> None:
    calls = stand_in(monkeypatch, identical)
    command = ["graph", str(tmp_path), "--engine", "x", "--recipe", "bf16"]
    found = CliRunner().invoke(app, command)
    assert (found.exit_code, calls) == (0, [(tmp_path, "bf16")])
    assert "stand-in" in found.output


def test_audit_of_an_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, identical: ContainmentReport
) -> None:
    calls = stand_in(monkeypatch, identical)
    command = ["audit", str(tmp_path), "--engine", "x", "--length", "2"]
    found = CliRunner().invoke(app, command)
    # Of two empty graphs nothing can be told.
    assert (found.exit_code, calls) == (2, [(tmp_path, 2)])
    assert "0.25" in found.output


@pytest.fixture
def identical() -> ContainmentReport:
    """The report on two equal graphs."""
    from jetrl_compile.containment import check_containment

    graph = make_graph([], [])
    return check_containment(graph, graph)
