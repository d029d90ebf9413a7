from dataclasses import replace
from pathlib import Path

import pytest
from sample_graphs import decoder_graph, without_fp8
from typer.testing import CliRunner

from jetrl_compile import cli
from jetrl_compile.graph_json import write_graph
from jetrl_compile.precision_graph import Operator, make_graph


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, ["show", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.json"
    write_graph(decoder_graph("train", 4), path)
    return path


@pytest.fixture
def rollout(tmp_path: Path) -> Path:
    path = tmp_path / "rollout.json"
    graph = without_fp8(decoder_graph("rollout", 4), lambda name: "up_proj" in name)
    write_graph(graph, path)
    return path


@pytest.mark.parametrize(
    ("name", "begins"),
    [("flow.html", "<!DOCTYPE html>"), ("f.SVG", "<?xml"), ("f.dot", "digraph")],
)
def test_formats(tmp_path: Path, train: Path, name: str, begins: str) -> None:
    status, out, _ = run(train, "-o", tmp_path / name)
    assert status == 0
    assert out.rstrip().endswith(f"of train.json is in {tmp_path / name}")
    assert (tmp_path / name).read_text().startswith(begins)


def test_two_graphs(tmp_path: Path, train: Path, rollout: Path) -> None:
    status, out, _ = run(train, rollout, "-o", tmp_path / "f.html")
    assert status == 0
    assert "rollout.json and train.json (not contained: 4 differences" in out


def test_two_files_of_one_name(tmp_path: Path, train: Path) -> None:
    other = tmp_path / "b" / "train.json"
    other.parent.mkdir()
    write_graph(replace(decoder_graph("train", 4), meta={}), other)
    status, out, _ = run(train, other, "-o", tmp_path / "f.dot")
    assert status == 0
    assert f"of {train} and {other} (no differences)" in out


def test_switches(tmp_path: Path, train: Path) -> None:
    path = tmp_path / "f.dot"
    run(train, "-o", path)
    opened = path.read_text()
    assert "mlp.up_proj\ndgrad" in opened
    run(train, "-o", path, "--phase", "forward", "--weights")
    assert "mlp.up_proj\ndgrad" not in path.read_text()
    assert "mlp.up_proj.weight" in path.read_text()
    run(train, "-o", path, "--closed")
    assert "mlp.up_proj" not in path.read_text()
    page = tmp_path / "f.html"
    run(train, "-o", page, "--open", "--phase", "dgrad", "--tokens", "77")
    assert '"switches":{"phases":["dgrad"],"opened":true' in page.read_text()
    assert '"tokens":77' in page.read_text()


def test_module(tmp_path: Path, train: Path) -> None:
    path = tmp_path / "f.dot"
    assert run(train, "-o", path, "--module", "model.layers.1.mlp")[0] == 0
    assert "mlp.up_proj" in path.read_text()
    assert "q_proj" not in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["-o", "flow.png"], "cannot tell the format of flow.png; end the name with"),
        (["-o", "no/such/folder/f.html"], "cannot write"),
        (["--module", "x", "-o", "f.html"], "no operator is in the module 'x'"),
    ],
)
def test_errors(train: Path, arguments: list[str], wanted: str) -> None:
    status, _, err = run(train, *arguments)
    assert status == 2
    assert wanted in " ".join(err.split())


def test_no_graph(tmp_path: Path) -> None:
    status, _, err = run(tmp_path / "none.json", "-o", tmp_path / "f.html")
    assert status == 2
    assert "none.json" in err
    assert not (tmp_path / "f.html").exists()


def test_too_many_operators(tmp_path: Path) -> None:
    operators = [
        Operator(f"model.p{n}:op", "elementwise", f"model.p{n}.x.y")
        for n in range(100_000)
    ]
    path = tmp_path / "big.json"
    write_graph(make_graph(operators, []), path)
    status, _, err = run(path, "-o", tmp_path / "f.html")
    assert status == 2
    assert "100,000 operators are left after equal layers were folded" in err
    status, out, _ = run(path, "-o", tmp_path / "f.html", "--module", "model.p7")
    assert status == 0
    assert "a page" in out


def test_an_empty_picture_says_so(tmp_path: Path, rollout: Path) -> None:
    empty = tmp_path / "empty.json"
    write_graph(make_graph([], []), empty)
    for arguments in ((rollout, "--phase", "wgrad"), (empty,)):
        status, _, error = run(*arguments, "-o", tmp_path / "flow.html")
        assert status == 0
        assert f"nothing is drawn: {arguments[0]} has no operator in" in error
    _, _, error = run(rollout, "-o", tmp_path / "flow.html")
    assert "nothing is drawn" not in error
