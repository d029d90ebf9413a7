import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from test_rollout import tiny_llama
from typer.testing import CliRunner

from jetrl_compile import cli
from jetrl_compile.audit import Audit, audit
from jetrl_compile.errors import OutputError
from jetrl_compile.mismatch import TensorGap, operator_gaps
from jetrl_compile.rollout import make_rollout_model
from jetrl_compile.show.audit_files import write_audit
from jetrl_compile.show.mismatch_pictures import (
    codes_picture,
    divergence_picture,
    gap_picture,
    mismatch_pictures,
)
from jetrl_compile.show.page import Picture

pytest.importorskip("matplotlib")
STRONG = (0xD6, 0x00, 0x6C)
TOKENS = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(0))


def image(picture: Picture) -> Image.Image:
    return Image.open(io.BytesIO(picture.png)).convert("RGB")


def colours(picture: Picture) -> set[object]:
    return {colour for _, colour in image(picture).getcolors(maxcolors=2**24) or []}


@pytest.fixture(scope="module")
def stale() -> Audit:
    """A trainer whose second layer's MLP has moved on since the rollout was made."""
    trainer: Any = tiny_llama().to(torch.bfloat16).eval()
    rollout = make_rollout_model(trainer)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.model.layers[1].mlp.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.mul_((1 + 0.02 * noise).to(parameter.dtype))
    return audit(trainer, rollout, TOKENS)


def test_gaps_of_operators() -> None:
    nan = float("nan")
    train = {
        "a": torch.tensor([1.0, nan]),
        "b": torch.tensor([1.0, -4.0]),
        "c": torch.zeros(3),
        "d": torch.zeros(2, dtype=torch.bfloat16),
        "only": torch.zeros(1),
    }
    rollout = {
        "a": torch.tensor([1.0, nan]),
        "b": torch.tensor([1.5, -4.0]),
        "c": torch.tensor([0.0, 0.0, 1.0]),
        "d": torch.zeros(2),
    }
    assert operator_gaps(["d", "a", "b", "c", "only"], train, rollout) == (
        TensorGap("d", 2, 2),
        TensorGap("a", 0, 2, 0.0),
        TensorGap("b", 1, 2, 0.125),
        TensorGap("c", 1, 3, float("inf")),
    )
    assert TensorGap("x", 1, 4).share == 0.25
    assert TensorGap("x", 0, 0).share == 0.0


def test_an_audit_says_what_differs_in_order(stale: Audit) -> None:
    first = next(gap for gap in stale.operators if gap.differ)
    assert first.name == "model.layers.1.mlp.gate_proj:fprop"
    stored = {gap.name: gap.share for gap in stale.stored}
    differ = {name for name, share in stored.items() if share}
    assert {name.rpartition(".")[0] for name in differ} == {
        f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up", "down")
    }
    assert stored["model.layers.0.mlp.up_proj.weight"] == 0


def test_captions_say_what_is_seen(stale: Audit) -> None:
    pictures = mismatch_pictures(stale)
    captions = {name: picture.caption for name, picture in pictures.items()}
    assert list(captions) == [
        "log_prob_gap.png",
        "first_divergence.png",
        "codes_differ.png",
    ]
    largest = f"{float(stale.log_prob_gap.max()):.3g} nats"
    assert captions["log_prob_gap.png"].startswith("Log-prob gap of 46 tokens: largest")
    assert largest in captions["log_prob_gap.png"]
    assert (
        "part first at model.layers.1.mlp.gate_proj:fprop"
        in (captions["first_divergence.png"])
    )
    assert captions["codes_differ.png"].startswith("6 of 35 stored tensors")
    assert STRONG in colours(pictures["first_divergence.png"])
    for picture in pictures.values():
        assert image(picture).width > 1000


def test_no_mismatch_is_drawn_too() -> None:
    gap = gap_picture(torch.zeros(2, 5))
    assert "10 are equal bit for bit" in gap.caption
    none = divergence_picture([TensorGap("model.layers.0:add", 0, 4, 0.0)])
    assert none.caption.endswith("no value differs")
    assert STRONG not in colours(none)
    assert codes_picture([TensorGap("a.weight", 0, 4)]).caption.startswith("0 of 1")
    for picture in (gap, none, codes_picture([]), divergence_picture([])):
        assert image(picture).height > 100


def test_hostile_and_many_names() -> None:
    gaps = [
        TensorGap(f"model.layers.{layer}.$x^{{{part}$\\frac<b>", layer, 100, 1e-3)
        for layer in range(60)
        for part in range(4)
    ]
    assert "model.layers.59.$x^" in codes_picture(gaps).caption
    assert "model.layers.1.$x^" in divergence_picture(gaps).caption
    odd = torch.tensor([[0.0, float("nan"), float("inf"), 1.0]])
    assert image(gap_picture(odd)).width > 1000


def test_files_of_an_audit(stale: Audit, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    files = write_audit(stale, folder)
    assert sorted(folder.iterdir()) == sorted(files)
    text = (folder / "flow.html").read_text()
    assert text.count("data:image/png;base64,") == 3
    assert "stored bytes are not those that the trainer" in text
    assert "the same tokens give other log-probs" in text
    assert (folder / "codes_differ.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(OutputError, match="cannot make the folder"):
        write_audit(stale, tmp_path / "new" / "folder" / "flow.html" / "x")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(OutputError, match=r"pip install 'jetrl-compile\[show\]'"):
        gap_picture(torch.zeros(1, 2))


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_command_writes_them(tmp_path: Path) -> None:
    model: Any = tiny_llama().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    out = tmp_path / "pictures"
    arguments = ["audit", str(tmp_path / "model"), "--pictures", str(out)]
    result = CliRunner().invoke(cli.app, [*arguments, "--length", "8"])
    assert result.exit_code == 0, result.output
    assert {path.name for path in out.iterdir()} == {
        "flow.html",
        "log_prob_gap.png",
        "first_divergence.png",
        "codes_differ.png",
    }
