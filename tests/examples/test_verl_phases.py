"""The table of phases, from logs as verl writes them."""

import json
from pathlib import Path

import pytest

from jetrl_compile.errors import ModelError
from jetrl_compile.examples.verl_grpo import curves, phases


def run(folder: Path, seconds: float, tokens: int, steps: int = 5) -> Path:
    (folder / "logs").mkdir(parents=True)
    lines = []
    for step in range(1, steps + 1):
        slow = 10 if step <= 2 else 1
        data = {
            "timing_s/update_actor": seconds * slow,
            "timing_s/update_weights": 0.5,
            "timing_s/step": 2 * seconds * slow,
            "perf/total_num_tokens": tokens,
        }
        lines.append(json.dumps({"step": step, "data": data}))
    (folder / "logs" / "part000.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = run(tmp_path / "verl_bf16", 3.0, 1000)
    other = run(tmp_path / "jetrl", 2.0, 1200)
    phases.main([str(base), str(other)])
    assert capsys.readouterr().out.splitlines() == [
        "| phase | verl_bf16 | jetrl |",
        "|---|---|---|",
        "| rollout |  |  |",
        "| old log-prob |  |  |",
        "| reference |  |  |",
        "| actor update | 3 s | 2 s, 1.50x (1.80x a token) |",
        "| weight sync | 0.5 s | 0.5 s, 1.00x |",
        "| step | 6 s | 4 s, 1.50x (1.80x a token) |",
        "| tokens a step | 1,000 | 1,200 |",
    ]
    with pytest.raises(ModelError, match="a run of 5 steps has none after the first 5"):
        phases.main([str(base), "--skip", "5"])


def test_csv_has_the_phases(tmp_path: Path) -> None:
    curve = curves.read_run(run(tmp_path / "run", 1.0, 10))
    rows = [line.split(",") for line in curves.csv_text(curve).splitlines()]
    named = dict(zip(rows[0], rows[3], strict=True))
    wanted = {f"timing_s/{phase}" for phase in phases.PHASES.values()}
    assert wanted <= set(named)
    assert named["timing_s/update_actor"] == "1.0"
    assert named["actor/jetrl/contained"] == ""
