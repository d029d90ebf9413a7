"""`jetrl lock` and `jetrl check --against`, as people run them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers as tf
from sample_graphs import decoder_graph, with_edges
from test_cli import run
from tiny_models import IGNORE_SCRIPT_METHOD

from jetrl_compile import engines, tracing
from jetrl_compile.errors import ModelError
from jetrl_compile.graph_json import write_graph
from jetrl_compile.lock import read_lock
from jetrl_compile.precision_graph import PrecisionGraph
from jetrl_compile.recipe import get_recipe, recipe_names


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a model's config; tracing gives a sample graph."""

    def trace_config(
        config_dir: Path,
        *,
        phase: str,
        recipe: str,
        progress: Callable[[str], None] | None = None,
    ) -> PrecisionGraph:
        if not config_dir.exists():
            raise ModelError(f"{config_dir} holds no config.json; give the folder")
        graph = decoder_graph(phase)
        if recipe == "jetrl_ue8m0":
            graph = ue8m0(graph)
        return replace(graph, meta={**graph.meta, "recipe": get_recipe(recipe).name})

    monkeypatch.setattr(tracing, "trace_config", trace_config)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    return tmp_path


def ue8m0(graph: PrecisionGraph) -> PrecisionGraph:
    return with_edges(
        graph,
        lambda e: (
            replace(e, flow=replace(e.flow, scale_format="ue8m0"))
            if e.flow.is_quantized
            else e
        ),
    )


LOCK = "precision.lock.json"


def test_lock_and_check(folder: Path) -> None:
    status, out, err = run("lock", "model")
    assert (status, err) == (0, "")
    assert out == (
        f"{LOCK} holds 63 operators\n"
        "FP8 GEMMs: 14 of 14 dgrad, 14 of 15 fprop, 14 of 14 wgrad\n"
    )
    lock = read_lock(LOCK)
    assert dict(lock.source) == {
        "path": "model",
        "phase": "train",
        "recipe": "jetrl",
        "engine": "verl",
        "model": "sample",
    }
    before = (folder / LOCK).read_bytes()
    assert run("check", "--against", LOCK, "model")[0] == 0
    assert (folder / LOCK).read_bytes() == before
    run("lock", "model")
    assert (folder / LOCK).read_bytes() == before


@pytest.fixture
def graphs(folder: Path) -> dict[str, Path]:
    made = {
        "same": decoder_graph("train"),
        "scales": ue8m0(decoder_graph("train")),
        "rollout": decoder_graph("rollout"),
    }
    for name, graph in made.items():
        write_graph(graph, folder / f"{name}.json")
    status, _, _ = run("lock", "same.json", "-o", LOCK)
    assert status == 0
    return {name: folder / f"{name}.json" for name in made}


def test_the_locks_own_source(graphs: dict[str, Path], folder: Path) -> None:
    assert read_lock(LOCK).source["path"] == "same.json"
    assert run("check", "--against", LOCK) == (
        0,
        run("check", "--against", LOCK, "same.json")[1],
        "",
    )
    write_graph(ue8m0(decoder_graph("train")), graphs["same"])
    status, out, _ = run("check", "--against", LOCK)
    assert status == 1
    assert out.startswith("changed: 84 differences from the lock\ncause: scale format")
    graphs["same"].unlink()
    status, out, err = run("check", "--against", LOCK)
    assert (status, out) == (2, "")
    assert "which does not exist; name the model's folder or graph" in err


def test_a_lock_in_another_folder(folder: Path) -> None:
    (folder / "ci").mkdir()
    assert run("lock", "model", "-o", "ci/p.lock.json", "--phase", "rollout")[0] == 0
    assert read_lock("ci/p.lock.json").source["path"] == "../model"
    status, out, err = run("check", "--against", "ci/p.lock.json")
    assert (status, err) == (0, "")
    assert "unchanged" in out


def test_update(graphs: dict[str, Path], folder: Path) -> None:
    old = (folder / LOCK).read_bytes()
    assert run("check", "--against", LOCK, "same.json", "--update")[0] == 0
    assert (folder / LOCK).read_bytes() == old
    status, out, err = run("check", "--against", LOCK, "scales.json", "--update")
    assert (status, err) == (0, f"{LOCK} was written anew\n")
    assert out.startswith("changed: 84 differences")
    assert (folder / LOCK).read_bytes() != old
    assert run("check", "--against", LOCK)[0] == 0
    assert read_lock(LOCK).source["path"] == "scales.json"
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_update_never_takes_another_phase(
    graphs: dict[str, Path], folder: Path
) -> None:
    old = (folder / LOCK).read_bytes()
    status, out, _ = run("check", "--against", LOCK, "rollout.json", "--update")
    assert status == 2
    assert out.startswith("could not tell: the lock is of phase train, the graph of ")
    assert (folder / LOCK).read_bytes() == old


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, f"error: there is no lock at {LOCK}; make one with `jetrl lock "),
        ("", f"error: {LOCK} ends in the middle"),
        ("{}", f"error: {LOCK} has no field 'format'; needed is a precision lock"),
        ("\x00garbage", f"error: {LOCK} is not JSON"),
        ('{"format": "jetrl.precision_lock", "version": 9}', "upgrade it"),
        ('{"format": "jetrl.precision_graph", "version": 1}', "a precision lock"),
        ("<<<<<<< HEAD\n{}", "write it again with `jetrl lock`"),
    ],
)
def test_bad_locks(content: str | None, message: str, folder: Path) -> None:
    if content is not None:
        (folder / LOCK).write_text(content)
    for more in ([], ["--update"]):
        status, out, err = run("check", "--against", LOCK, "model", *more)
        assert (status, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1
    assert (folder / LOCK).exists() == (content is not None)


def test_sources_that_are_none(graphs: dict[str, Path], folder: Path) -> None:
    (folder / "cut.json").write_text(graphs["same"].read_text()[:500])
    for source, message in (
        ("nothing", "holds no config.json"),
        ("cut.json", "cut.json "),
        (LOCK, "has the format 'jetrl.precision_lock'; needed is a precision graph"),
    ):
        for arguments in (["lock", source, "-o", "new.json"], ["check", "--against"]):
            more = [LOCK, source] if arguments[0] == "check" else []
            status, out, err = run(*arguments, *more)
            assert (status, out) == (2, ""), source
            assert message in err
        assert not (folder / "new.json").exists()


def test_usage(graphs: dict[str, Path]) -> None:
    for arguments, message in (
        (["check", "same.json"], "give ROLLOUT.json and TRAIN.json, or --against"),
        (["check", "same.json", "same.json", "--update"], "--update needs --against"),
        (["check", "--against", LOCK, "a", "b"], "does not go with a second graph"),
        (["check", "--against", LOCK, "--strict"], "does not go with --strict"),
        (["check", "--against", LOCK, "--report", "x.doc"], "end the name with .txt"),
    ):
        status, out, err = run(*arguments)
        assert (status, out) == (2, ""), arguments
        assert message in " ".join(err.replace("│", " ").split())


def test_reports_of_all_kinds_in_one_run(graphs: dict[str, Path], folder: Path) -> None:
    files = ["r.md", "r.json", "r.xml", "r.sarif", "r.txt"]
    options = [part for name in files for part in ("--report", name)]
    status, out, _ = run(
        "check", "--against", LOCK, "scales.json", "-f", "github", *options
    )
    assert status == 1
    assert out.startswith(f"::error file={LOCK},line=")
    assert (folder / "r.txt").read_text().startswith("changed: 84 differences")
    assert json.loads((folder / "r.json").read_text())["unchanged"] is False
    assert "<details>" in (folder / "r.md").read_text()
    assert 'name="jetrl.lock"' in (folder / "r.xml").read_text()
    (run_,) = json.loads((folder / "r.sarif").read_text())["runs"]
    place: Any = run_["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == LOCK
    line = (folder / LOCK).read_text().split("\n")[place["region"]["startLine"] - 1]
    assert '"e4m3 1x128 K' in line


def test_check_points_into_the_rollout_graph(folder: Path) -> None:
    write_graph(ue8m0(decoder_graph("rollout")), folder / "rollout.json")
    write_graph(decoder_graph("train"), folder / "train.json")
    status, out, _ = run("check", "rollout.json", "train.json", "-f", "github")
    assert status == 1
    first = out.split(",")[1]
    line = (folder / "rollout.json").read_text().split("\n")[int(first[5:]) - 1]
    assert line.startswith(' ["x", "model.layers.0.input_layernorm:norm", "e4m3 1x128')


@IGNORE_SCRIPT_METHOD
def test_a_real_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced, locked, changed by one line of the config, and updated."""
    monkeypatch.chdir(tmp_path)
    config = tf.Qwen3Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=36,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        dtype="bfloat16",
    )
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    status, out, err = run("lock", "model", "--phase", "rollout")
    assert (status, err) == (0, "")
    assert "252 of 253 fprop" in out
    assert (tmp_path / LOCK).read_text().count("\n") < 130
    assert run("check", "--against", LOCK)[0] == 0
    file = tmp_path / "model/config.json"
    file.write_text(
        file.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05')
    )
    status, out, _ = run("check", "--against", LOCK)
    assert status == 1
    assert "param eps 1e-06 -> 1e-05: 145 places" in out.split("\n")[1]
    assert run("check", "--against", LOCK, "--update")[0] == 0


def test_a_live_engine_is_asked_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that an engine's graph made is compared with what that engine says now."""
    asked: list[dict[str, object]] = []

    class Engine:
        @staticmethod
        def graph(path: Path, **options: object) -> PrecisionGraph:
            asked.append({"path": path, "recipe": options["recipe"]})
            return decoder_graph("rollout")

    monkeypatch.setattr(engines, "load_engine", lambda name: {"vllm": Engine}[name])
    assert run("lock", "model", "--engine", "vllm")[0] == 0
    assert read_lock(LOCK).source["live_engine"] == "vllm"
    assert run("check", "--against", LOCK, "--update")[0] == 0
    assert run("check", "--against", LOCK)[0] == 0
    assert asked == [{"path": Path("model"), "recipe": "jetrl"}] * 3


def test_every_recipe_has_a_lock(folder: Path) -> None:
    for recipe in recipe_names():
        assert run("lock", "model", "--recipe", recipe, "-o", "x.json")[0] == 0
        assert read_lock("x.json").source["recipe"] == recipe
    assert "unknown" in run("lock", "model", "--recipe", "nothing")[2]
