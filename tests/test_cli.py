import json
import os
import subprocess
import sys
import time
import types
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from sample_graphs import decoder_graph, with_edges, with_operators, without_fp8
from typer.testing import CliRunner

from jetrl_compile import cli, commands
from jetrl_compile.commands.check import ReportFormat
from jetrl_compile.errors import ModelError
from jetrl_compile.graph_json import read_graph, write_graph
from jetrl_compile.precision_graph import PrecisionGraph
from jetrl_compile.recipe import PHASES, recipe_names
from jetrl_compile.report import FORMATS
from jetrl_compile.report_json import read_report

ROOT = Path(__file__).parent.parent


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, [str(item) for item in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


def shell(*arguments: object, code: str = "") -> subprocess.CompletedProcess[str]:
    start = ["-c", code] if code else ["-m", "jetrl_compile.cli"]
    return subprocess.run(
        [sys.executable, *start, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"},
    )


@pytest.fixture
def graphs(tmp_path: Path) -> dict[str, Path]:
    """Graph files: train, rollout, one that is not contained, one that is cut off."""
    rollout = decoder_graph("rollout")
    made = {
        "train": decoder_graph("train"),
        "rollout": rollout,
        "skipped": without_fp8(rollout, lambda name: "gate_proj" in name),
        "partial": replace(rollout, meta={"incomplete": "layer 1"}),
        "kernels": with_operators(
            rollout, lambda op: replace(op, provider="fa3") if op.params else op
        ),
    }
    paths = {name: tmp_path / f"{name}.json" for name in (*made, "cut")}
    for name, graph in made.items():
        write_graph(graph, paths[name])
    paths["cut"].write_text(paths["train"].read_text()[:999])
    return paths


# Check -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rollout", "status", "line"),
    [
        ("rollout", 0, "contained (levels 1, 2 passed)"),
        ("skipped", 1, "not contained: 2 differences (level 1 structure)"),
        ("partial", 2, "could not tell: the rollout graph is incomplete: layer 1"),
    ],
)
def test_check_exit_status(
    rollout: str, status: int, line: str, graphs: dict[str, Path]
) -> None:
    found, out, err = run("check", graphs[rollout], graphs["train"])
    assert (found, out.split("\n")[0], err) == (status, line, "")


def test_check_of_swapped_graphs(graphs: dict[str, Path]) -> None:
    status, out, err = run("check", graphs["train"], graphs["rollout"])
    assert (status, err) == (2, "")
    assert out.startswith("could not tell: the two graphs look swapped")
    assert "jetrl check ROLLOUT TRAIN" in out.split("\n")[0]


def test_check_errors_are_short(graphs: dict[str, Path], tmp_path: Path) -> None:
    report = tmp_path / "report.txt"
    for path, text in (
        (graphs["cut"], f"error: {graphs['cut']} "),
        (tmp_path / "none.json", "error: cannot read "),
    ):
        status, out, err = run("check", path, graphs["train"], "-o", report)
        assert (status, out) == (2, "")
        assert err.startswith(text)
        assert err.count("\n") == 1
        assert not report.exists()


def test_check_writes_a_file_or_nothing(
    graphs: dict[str, Path], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    status, out, _ = run(
        "check", graphs["skipped"], graphs["train"], "--format", "json", "-o", report
    )
    assert status == 1
    assert out == (
        f"not contained: 2 differences (level 1 structure); the report is in {report}\n"
    )
    assert read_report(report).contained is False
    away = tmp_path / "no" / "report.json"
    status, out, err = run("check", graphs["rollout"], graphs["train"], "-o", away)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: cannot write {away}: No such file or directory")


def test_check_formats(graphs: dict[str, Path]) -> None:
    assert [item.value for item in ReportFormat] == list(FORMATS)
    pair = graphs["skipped"], graphs["train"]
    outputs = {name: run("check", *pair, "-f", name) for name in FORMATS}
    assert {status for status, _, _ in outputs.values()} == {1}
    assert json.loads(outputs["json"][1])["contained"] is False
    assert ET.fromstring(outputs["junit"][1]).tag == "testsuites"
    assert outputs["md"][1].startswith("### Precision flow")
    assert outputs["github"][1].startswith("::error title=jetrl check%3A level 1")


def test_check_strict(graphs: dict[str, Path]) -> None:
    pair = graphs["kernels"], graphs["train"]
    gemms = run("check", *pair)
    assert gemms[0] == 1
    assert "provider is fa3 in rollout, deep_gemm in train" in gemms[1]
    assert "notes (these do not count)" in gemms[1]
    assert "notes" not in run("check", *pair, "--strict")[1]


# Diff ------------------------------------------------------------------------------


def test_diff(graphs: dict[str, Path], tmp_path: Path) -> None:
    status, out, err = run("diff", graphs["rollout"], graphs["skipped"])
    assert (status, err) == (1, "")
    assert out.endswith("differences\n")
    assert "2 layers (model.layers.0-1), mlp.gate_proj:fprop.x: dtype is e4m3 in" in out
    assert "dtype is e4m3 in rollout.json, bf16 in skipped.json" in out
    same = run("diff", graphs["rollout"], graphs["rollout"])
    assert same == (0, "no differences\n", "")
    status, out, err = run("diff", graphs["rollout"], graphs["cut"])
    assert (status, out) == (2, "")
    assert err.startswith("error: ")


def test_diff_json(graphs: dict[str, Path], tmp_path: Path) -> None:
    saved = with_edges(
        read_graph(graphs["rollout"]),
        lambda e: replace(e, flow=e.flow.saved_as("e4m3")) if e.operand == "v" else e,
    )
    other = tmp_path / "saved.json"
    write_graph(saved, other)
    status, out, _ = run("diff", graphs["rollout"], other, "--json")
    found = json.loads(out)
    assert status == 1
    assert found["format"] == "jetrl.graph_diff"
    assert [
        (d["operand"], d["attribute"], d["a"], d["b"]) for d in found["differences"]
    ]
    assert found["differences"][0] == {
        "level": 2,
        "operator": "model.layers.0.self_attn:attention",
        "operand": "v",
        "attribute": "saved_dtype",
        "a": None,
        "b": "e4m3",
        "message": "model.layers.0.self_attn:attention.v: dtype saved for backward is "
        "not set in rollout.json, e4m3 in saved.json",
    }
    same = json.loads(run("diff", other, other, "--json")[1])
    assert same["differences"] == []


# Graph -----------------------------------------------------------------------------

Trace = Callable[..., PrecisionGraph]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Replace the tracer by one that returns a sample; returns its calls."""
    calls: list[dict[str, object]] = []

    def trace_config(
        config_dir: Path,
        *,
        phase: str,
        recipe: str,
        progress: Callable[[str], None] | None = None,
    ) -> PrecisionGraph:
        if not config_dir.exists():
            raise ModelError(f"{config_dir} has no config.json; name a model's folder")
        assert progress is not None
        progress("tracing [1/2]")
        calls.append({"phase": phase, "recipe": recipe})
        return decoder_graph(phase)

    module = types.ModuleType("jetrl_compile.tracing")
    module.trace_config = trace_config  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jetrl_compile.tracing", module)
    return calls


@pytest.mark.parametrize("phase", PHASES)
def test_graph(phase: str, traced: list[dict[str, object]], tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    status, out, err = run("graph", tmp_path, "--phase", phase, "-o", path)
    assert (status, err) == (0, "")
    assert traced == [{"phase": phase, "recipe": "jetrl"}]
    assert read_graph(path) == decoder_graph(phase)
    lines = [" ".join(line.split()) for line in out.split("\n")]
    assert "FP8 GEMMs, fprop 14 of 15" in lines
    assert "in high precision lm_head:fprop: the recipe keeps the role lm_head" in lines
    assert "of unknown kind none" in lines
    assert lines[-2] == f"the graph is in {path}"


def test_graph_json(traced: list[dict[str, object]], tmp_path: Path) -> None:
    status, out, _ = run("graph", tmp_path, "--recipe", "bf16", "--json")
    found = json.loads(out)
    assert status == 0
    assert traced == [{"phase": "train", "recipe": "bf16"}]
    assert found["gemms"]["wgrad"] == {"fp8": 14, "all": 14}
    assert found["kinds"]["gemm"] == 43
    assert found["high_precision"][0]["where"] == "lm_head:fprop"
    assert found["unknown"] == []


def test_graph_errors(traced: list[dict[str, object]], tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    status, out, err = run("graph", tmp_path / "none", "-o", path)
    assert (status, out) == (2, "")
    assert "has no config.json; name a model's folder" in err
    assert not path.exists()
    status, _, err = run("graph", tmp_path, "--phase", "sideways")
    assert status == 2
    assert "sideways" in err


# Doctor and the command itself -----------------------------------------------------


def test_doctor() -> None:
    status, out, err = run("doctor")
    assert (status, err) == (0, "")
    for word in ("python", "torch", "deep_gemm", "reference", *recipe_names()):
        assert word in out
    status, out, _ = run("doctor", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["versions"]["torch"] == metadata.version("torch")
    providers = {item["name"]: item for item in found["providers"]}
    assert providers["reference"]["usable"] is True
    assert all(item["usable"] or item["reason"] for item in found["providers"])
    assert {item["name"] for item in found["recipes"]} == set(recipe_names())


def test_usage() -> None:
    assert run("--version")[1] == f"jetrl-compile {cli.version()}\n"
    assert run("--version")[0] == 0
    for arguments in (["nothing"], ["check"], ["check", "--format", "x", "a", "b"]):
        status, out, _ = run(*arguments)
        assert (status, out) == (2, "")
    status, out, _ = run("-h")
    assert status == 0
    assert all(name in out for name in commands.load())


def test_every_command_has_help() -> None:
    for name, command in commands.load().items():
        assert command.__doc__, name
        assert run(name, "--help")[0] == 0


def test_help_is_fast_and_free_of_torch() -> None:
    start = time.perf_counter()
    result = shell("--help")
    assert result.returncode == 0
    assert time.perf_counter() - start < 5  # a generous limit for a busy machine
    code = (
        "import sys, jetrl_compile.cli\n"
        "heavy = {'torch', 'transformers', 'networkx'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = shell(code=code)
    assert result.returncode == 0, result.stderr


def test_real_processes(graphs: dict[str, Path]) -> None:
    contained = shell("check", graphs["rollout"], graphs["train"])
    assert (contained.returncode, contained.stderr) == (0, "")
    assert contained.stdout.startswith("contained")
    error = shell("check", graphs["cut"], graphs["train"])
    assert (error.returncode, error.stdout) == (2, "")
    assert error.stderr.startswith("error: ")
    assert "Traceback" not in error.stderr


def test_a_bug_is_not_read_as_not_contained() -> None:
    code = (
        "from jetrl_compile import cli\n"
        "def bug(): raise RuntimeError('a bug')\n"
        "cli.app.command('bug')(bug)\n"
        "cli.main()"
    )
    result = shell("bug", code=code)
    assert result.returncode == 2
    assert "RuntimeError: a bug" in result.stderr


def test_interrupt_has_its_own_status() -> None:
    code = (
        "from jetrl_compile import cli\n"
        "def stop(): raise KeyboardInterrupt\n"
        "cli.app.command('stop')(stop)\n"
        "cli.main()"
    )
    result = shell("stop", code=code)
    assert (result.returncode, result.stderr) == (130, "interrupted\n")


def test_reader_that_went_away(graphs: dict[str, Path]) -> None:
    command = f"{sys.executable} -m jetrl_compile.cli check {graphs['rollout']} "
    result = subprocess.run(
        [
            "bash",
            "-c",
            f"{command} {graphs['train']} --format json | true; "
            "echo ${PIPESTATUS[0]}",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stdout == "141\n"
    assert result.stderr == ""


def test_names_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    graph = with_operators(
        decoder_graph("rollout"),
        lambda op: replace(op, reason="Grüße") if op.kind == "gemm" else op,
    )
    write_graph(graph, tmp_path / "g.json")
    result = subprocess.run(
        [sys.executable, "-m", "jetrl_compile.cli", "check"]
        + [str(tmp_path / "g.json")] * 2,
        cwd=ROOT,
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert result.returncode == 0, result.stderr
    assert rb"Gr\xfc\xdfe" in result.stdout
