"""No command writes over a file that it reads; a lock says what it is of."""

from pathlib import Path

import pytest
from sample_graphs import decoder_graph
from test_cli import run

from jetrl_compile.graph_json import write_graph
from jetrl_compile.precision_graph import PrecisionGraph


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_graph(decoder_graph("train"), tmp_path / "train.json")
    write_graph(decoder_graph("rollout"), tmp_path / "rollout.json")
    assert run("lock", "train.json", "-o", "a.lock.json")[0] == 0
    (tmp_path / "link.json").symlink_to("train.json")
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        "check rollout.json train.json --report rollout.json",
        "check rollout.json train.json -f json -o ./train.json",
        "check rollout.json link.json -o train.json",
        "check rollout.json train.json -o link.json",
        "check --against a.lock.json train.json -f json -o a.lock.json",
        "lock train.json -o train.json",
        "diff rollout.json train.json -o rollout.json",
    ],
)
def test_refused(folder: Path, arguments: str) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    status, _, error = run(*arguments.split())
    assert status == 2
    assert "is read by the same command" in error
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("option", ["--phase rollout", "--recipe bf16", "--engine x"])
def test_a_graph_says_itself_what_it_is(folder: Path, option: str) -> None:
    status, _, error = run("lock", "train.json", "-o", "b.lock.json", *option.split())
    assert status == 2
    assert "says its phase" in " ".join(error.replace("│", " ").split())
    assert not (folder / "b.lock.json").exists()


def test_no_lock_of_nothing(folder: Path) -> None:
    write_graph(PrecisionGraph((), (), {"phase": "train"}), folder / "empty.json")
    status, _, error = run("lock", "empty.json", "-o", "b.lock.json")
    assert status == 2
    assert "0 operators and no GEMM" in error
    assert not (folder / "b.lock.json").exists()
