"""The code of docs/pictures.md runs, and what it says of commands is true."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jetrl_compile import cli
from jetrl_compile.show.page import MOST
from jetrl_compile.show.view import LARGEST

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "pictures.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def test_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python")
    exec(code, {})
    assert capsys.readouterr().out == "contained (levels 1, 2 passed)\n"
    assert "model.layers.0-5" in (tmp_path / "tiny" / "flow.html").read_text()


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig

    monkeypatch.chdir(tmp_path)
    config = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=6)
    config.save_pretrained("CONFIG_DIR")
    lines = [line.partition("#")[0].split() for line in blocks("sh")[0].splitlines()]
    for line in lines:
        result = CliRunner().invoke(cli.app, line[1:])
        assert result.exit_code == 0, (line, result.output)
    assert {path.name for path in tmp_path.glob("*.*")} == {
        *("train.json", "rollout.json"),
        *("flow.html", "check.html", "flow.svg", "flow.dot"),
    }


def test_limits_and_picture() -> None:
    assert f"At most {MOST} boxes" in TEXT
    assert f"{LARGEST:,} different operators" in TEXT
    (picture,) = re.findall(r"!\[[^]]*\]\(([^)]+)\)", TEXT)
    root = ET.fromstring((ROOT / "docs" / picture).read_text())
    texts = ["".join(element.itertext()) for element in root.iter()]
    assert any("model.layers.0-63" in text and "\u00d764" in text for text in texts)
