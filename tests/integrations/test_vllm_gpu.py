"""vLLM itself, on a GPU: load, check, push, refuse, sleep, and the log-prob gap."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
    ),
]
SCRIPT = Path(__file__).parent.parent / "vllm_on_gpu.py"


@pytest.mark.parametrize("mode", ["default", "whole", "eager"])
def test_engine(mode: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), mode],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    if mode != "eager":  # where the steps of rotary embeddings are written otherwise
        assert found["at load"].startswith("contained")
        assert found["after push"].startswith("contained")
        assert "level 3" in found["stale"]
    assert found["attention"] == "jetrl.decode_attention"
    assert found["pushed"] == 24
    for where in ("nan", "nan in a norm", "nan in the embedding"):
        assert "NaN or infinity" in found[where], where
        assert "refuses to generate" in found[f"refused, {where}"], where
    assert found["same tokens"]
    # The attentions of both sides differ in last bits, which turn some codes.
    assert found["k3"] < found["k3 bf16"] / 2
