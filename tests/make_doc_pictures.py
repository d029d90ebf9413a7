"""Make the pictures of the documentation: `python tests/make_doc_pictures.py`.

Both are of Qwen3-32B's shape, without weights. The screenshot needs a Chromium
(`tests/browser.py` says which).
"""

import tempfile
from pathlib import Path
from typing import Any

from browser import launched
from playwright.sync_api import ViewportSize
from transformers import Qwen3Config
from typer.testing import CliRunner

from jetrl_compile import cli

DOCS = Path(__file__).parent.parent / "docs"
SIZES: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
MLP = "model.layers.3.mlp.**"
VIEW: ViewportSize = {"width": 1180, "height": 640}


def jetrl(*words: str) -> None:
    """Run a command of `jetrl`, which must succeed."""
    result = CliRunner().invoke(cli.app, list(words))
    assert result.exit_code == 0, result.output


def main() -> None:
    """Write docs/qwen3-32b-mlp.svg and docs/check.png."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, rollout, train, other, page = (
            str(folder / each)
            for each in (
                "qwen3-32b",
                "rollout.json",
                "qwen3-32b.json",
                "train.json",
                "c.html",
            )
        )
        Qwen3Config(**SIZES).save_pretrained(config)
        jetrl("graph", config, "--phase", "rollout", "-o", rollout)
        jetrl("graph", config, "--phase", "train", "-o", train)
        picture = str(DOCS / "qwen3-32b-mlp.svg")
        jetrl("show", train, "--phase", "forward", "--module", MLP, "-o", picture)
        jetrl("graph", config, "--recipe", "jetrl_ue8m0", "-o", other)
        jetrl("show", rollout, other, "-o", page)
        with launched() as browser:
            tab = browser.new_page(viewport=VIEW, device_scale_factor=1)
            tab.goto(Path(page).as_uri())
            tab.wait_for_timeout(2000)
            tab.screenshot(path=DOCS / "check.png")


if __name__ == "__main__":
    main()
