"""The example workflow and the pre-commit hooks: what they name exists, and works."""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from sample_graphs import decoder_graph, with_edges

from jetrl_compile import cli
from jetrl_compile.graph_json import write_graph
from jetrl_compile.precision_graph import PrecisionGraph

ROOT = Path(__file__).parent.parent
WORKFLOW = ROOT / "examples/ci/jetrl-check.yml"
HOOKS = ROOT / ".pre-commit-hooks.yaml"


def steps() -> list[dict[str, Any]]:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    (job,) = jobs.values()
    found: list[dict[str, Any]] = job["steps"]
    return found


def commands(script: str) -> list[list[str]]:
    """The `jetrl` commands of a shell script."""
    lines = re.sub(r"\\\n", " ", script).split("\n")
    words = [shlex.split(line, comments=True) for line in lines if "jetrl " in line]
    return [line[1:] for line in words if line and line[0] == "jetrl"]


def parse(words: list[str]) -> dict[str, Any]:
    """Parse a command as `jetrl` does, and return its parameters."""
    group: Any = typer.main.get_command(cli.app)
    context = group.commands[words[0]].make_context(words[0], list(words[1:]))
    return dict(context.params)


def with_jetrl(folder: Path, **more: str) -> dict[str, str]:
    """An environment in which `jetrl` is the one of this interpreter."""
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    script = folder / "jetrl"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m jetrl_compile.cli "$@"\n')
    script.chmod(0o755)
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **more}


def ue8m0(graph: PrecisionGraph) -> PrecisionGraph:
    return with_edges(
        graph,
        lambda e: (
            replace(e, flow=replace(e.flow, scale_format="ue8m0"))
            if e.flow.is_quantized
            else e
        ),
    )


# The workflow ----------------------------------------------------------------------


def test_workflow_is_a_workflow() -> None:
    table = yaml.safe_load(WORKFLOW.read_text())
    assert table[True] == "pull_request"  # YAML 1.1 reads `on` as true
    assert table["permissions"] == {
        "contents": "read",
        "pull-requests": "write",
        "security-events": "write",
    }
    for step in steps():
        assert ("run" in step) != ("uses" in step), step
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w/-]+@v\d+", step["uses"])
        else:
            check = ["bash", "-n", "-c", step["run"]]
            subprocess.run(check, check=True, capture_output=True)


def test_its_commands_are_those_of_the_cli() -> None:
    found = [words for step in steps() for words in commands(step.get("run", ""))]
    assert [words[0] for words in found] == ["check", "graph", "graph", "check"]
    against, rollout, train, check = map(parse, found)
    assert against["against"] == Path("precision.lock.json")
    assert [path.suffix for path in against["reports"]] == [".md", ".sarif", ".xml"]
    assert (rollout["phase"].value, train["phase"].value) == ("rollout", "train")
    assert check["rollout"] == rollout["output"]
    assert check["train"] == train["output"]
    for each in (against, check):
        assert each["report_format"].value == "github"
        assert all(path.parent == Path("reports") for path in each["reports"])


def run_step(name: str, folder: Path, env: dict[str, str]) -> tuple[int, str]:
    """Run a step as GitHub does: bash -e -o pipefail, in the repository."""
    (script,) = (step["run"] for step in steps() if step.get("name") == name)
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    found = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    assert "Traceback" not in found.stderr
    return found.returncode, found.stdout


def test_its_steps_run(tmp_path: Path) -> None:
    """Without the traces: MODEL is a graph file, and `gh` is a script that prints."""
    tools, repo = tmp_path / "bin", tmp_path / "repo"
    for folder in (tools, repo, repo / "reports"):
        folder.mkdir()
    (tools / "gh").write_text('#!/bin/sh\necho "$@"\ncat "reports/lock.md"\n')
    (tools / "gh").chmod(0o755)
    summary = tmp_path / "summary.md"
    env = with_jetrl(tools, MODEL="model.json", GITHUB_STEP_SUMMARY=str(summary))
    env["NUMBER"] = "7"
    write_graph(decoder_graph("train"), repo / "model.json")
    subprocess.run(["jetrl", "lock", "model.json"], cwd=repo, env=env, check=True)
    name = "The flow is what its lock says"
    status, out = run_step(name, repo, env)
    assert (status, out.count("::error"), out.count("::notice")) == (0, 0, 1)
    write_graph(ue8m0(decoder_graph("train")), repo / "model.json")
    status, out = run_step(name, repo, env)
    assert status == 1
    assert out.startswith("::error file=precision.lock.json,line=")
    assert sorted(path.name for path in (repo / "reports").iterdir()) == [
        "lock.md",
        "lock.sarif",
        "lock.xml",
    ]
    assert run_step("Summary", repo, env) == (0, "")
    assert "**changed: 84 differences from the lock**" in summary.read_text()
    status, out = run_step("Comment", repo, env)
    assert status == 0
    assert out.startswith("pr comment 7 --edit-last --create-if-none --body-file ")
    assert "changed: 84 differences" in out


# The hooks -------------------------------------------------------------------------


def hooks() -> dict[str, dict[str, Any]]:
    return {hook["id"]: hook for hook in yaml.safe_load(HOOKS.read_text())}


def test_hooks_are_hooks() -> None:
    assert list(hooks()) == ["jetrl-lock", "jetrl-lock-update"]
    for hook in hooks().values():
        assert set(hook) == {
            *("id", "name", "description", "entry", "language", "files"),
            "pass_filenames",
        }
        assert hook["pass_filenames"] is False
        words = shlex.split(hook["entry"])
        assert words[0] == "jetrl"
        assert parse(words[1:])["against"] == Path("precision.lock.json")
        pattern = re.compile(hook["files"])
        assert pattern.search("config.json")
        assert pattern.search("models/qwen3/config.json")
        assert not pattern.search("models/myconfig.json.txt")
        assert not pattern.search("tokenizer_config.json")
    assert re.search(hooks()["jetrl-lock"]["files"], "precision.lock.json")


@pytest.fixture
def repo(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    (tmp_path / "bin").mkdir()
    env = with_jetrl(tmp_path / "bin")
    write_graph(decoder_graph("train"), tmp_path / "model.json")
    subprocess.run(["jetrl", "lock", "model.json"], cwd=tmp_path, env=env, check=True)
    return tmp_path, env


def test_hooks_run(repo: tuple[Path, dict[str, str]]) -> None:
    folder, env = repo

    def hook(name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            shlex.split(hooks()[name]["entry"]),
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
        )

    assert hook("jetrl-lock").returncode == 0
    write_graph(ue8m0(decoder_graph("train")), folder / "model.json")
    failed = hook("jetrl-lock")
    assert failed.returncode == 1
    assert "cause: scale format fp32 -> ue8m0" in failed.stdout.split("\n")[1]
    before = (folder / "precision.lock.json").read_bytes()
    assert hook("jetrl-lock-update").returncode == 0
    assert (folder / "precision.lock.json").read_bytes() != before
    assert hook("jetrl-lock").returncode == 0
