"""verl's own trainer on a CPU: GRPO on two ranks, FP8 on both sides, checked."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import verl_workers  # noqa: F401  sets verl's platform

pytest.importorskip("verl", reason="verl has an environment of its own: make test-verl")
pytestmark = pytest.mark.filterwarnings("ignore")

from jetrl_compile.report_json import read_report  # noqa: E402

SCRIPT = Path(__file__).parents[2] / "examples" / "verl_grpo" / "cpu.sh"
RANKS, STEPS = 2, 2


def test_grpo(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "RANKS": str(RANKS),
        "STEPS": str(STEPS),
    }
    done = subprocess.run(
        # Gradient checkpointing is tested in one process; here it costs a compile.
        [
            "bash",
            str(SCRIPT),
            str(tmp_path / "run"),
            "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-4000:]
    for phase, count in (
        ("old log-prob", 14),
        ("reference", 14),
        ("actor update", 42),
    ):
        assert f"jetrl: {phase} runs {count} GEMMs in FP8" in log
    steps = [line for line in log.splitlines() if re.search(r"step:\d+ - ", line)]
    assert len(steps) == STEPS
    for line in steps:
        metrics = dict(re.findall(r"([\w/]+):([-+.\de]+)", line))
        # The same bits of logits on both sides; what is left is one rounding in FP32.
        assert float(metrics["rollout_corr/k3_kl"]) < 1e-12
        assert float(metrics["rollout_corr/log_ppl_abs_diff"]) < 1e-6
        assert float(metrics["training/rollout_probs_diff_max"]) < 1e-6
        assert float(metrics["actor/jetrl/contained"]) == 1
        assert float(metrics["actor/jetrl/level_3_bytes"]) == 1
        assert float(metrics["actor/grad_norm"]) > 0
    for rank in range(RANKS):
        path = tmp_path / "run" / "reports" / f"containment-rank{rank}.json"
        levels = read_report(path).levels
        assert [level.status for level in levels[:3]] == ["passed"] * 3
