import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from jetrl_compile.cli import app
from jetrl_compile.errors import OutputError
from jetrl_compile.examples.demo import Answer, StepRecord, choose_threads
from jetrl_compile.examples.demo_output import make_folder, step_line
from jetrl_compile.examples.grpo import Step
from jetrl_compile.graph_json import read_graph

pytest.importorskip("reasoning_gym")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny random Llama with a tokenizer of one token a character."""
    letters = [chr(code) for code in range(32, 127)]
    names = ["<pad>", "<s>", "</s>", "<unk>", *letters]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    split: Any = pre_tokenizers.Split("", "isolated")
    tokenizer.pre_tokenizer = split
    make: Any = tf.PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=160,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    untyped: Any = tf.AutoModelForCausalLM
    path = tmp_path / "model"
    untyped.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    fast.save_pretrained(path)
    return path


@pytest.mark.usefixtures("fresh_dynamo")
def test_demo(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("stays")
    arguments = ["--model", str(folder), "--steps", "1", "--out", str(out), "--json"]
    done = CliRunner().invoke(app, ["demo", *arguments])
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert summary == json.loads((out / "summary.json").read_text())
    assert summary["audit"]["levels"] == dict.fromkeys(
        ("structure", "flow", "bytes", "logits"), "passed"
    )
    verdicts = {
        name: each["contained"] for name, each in summary["containment"].items()
    }
    assert verdicts == {"jetrl": True, "rollout_only": False, "bf16": True}
    gaps = {
        name: each["rollout_corr/k3_kl"] for name, each in summary["mismatch"].items()
    }
    assert gaps["jetrl"] == 0.0
    assert gaps["rollout_only"] > 1e-5
    (step,) = summary["steps"]
    assert step["mismatch"]["rollout_corr/k3_kl"] == 0.0
    assert len(step["answers"]) == 16
    assert {path.name for path in out.iterdir()} == {
        "mine.txt",
        "summary.json",
        "mismatch.md",
        *(f"audit.{suffix}" for suffix in ("md", "json", "xml")),
        *(f"containment.{name}.md" for name in verdicts),
        *("rollout.json", "train.json"),
    }
    assert (out / "mine.txt").read_text() == "stays"
    assert read_graph(out / "train.json").meta["phase"] == "train"
    assert "| rollout_only |" in (out / "mismatch.md").read_text()


def test_the_folder_is_checked_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="name another with --out"):
        make_folder(tmp_path / "file")
    make_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_folder_without_a_model_is_an_error(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    done = CliRunner().invoke(app, ["demo", "--model", str(tmp_path), "--out", out])
    assert done.exit_code == 2
    assert "no config.json" in done.stderr
    assert done.stdout == ""


def test_a_step_without_signal_says_so() -> None:
    metrics = {"rollout_corr/k3_kl": 0.0}
    answers = (Answer("1 + 1?", "2", "3", 0.0),)
    step = StepRecord(answers, Step(0.0, 0.0, 0.0), metrics, tokens=3, seconds=1.0)
    assert "nothing to learn" in step_line(step, 1)


def test_threads_are_as_before_or_one() -> None:
    before = torch.get_num_threads()
    try:
        assert choose_threads() in (1, before)
        assert torch.get_num_threads() in (1, before)
    finally:
        torch.set_num_threads(before)
