"""Curves of verl runs: parts of resumed runs, CSV, the picture."""

import json
from pathlib import Path

import pytest

from jetrl_compile.errors import ModelError
from jetrl_compile.examples.verl_grpo.curves import csv_text, main, read_run


def write_part(run: Path, part: int, steps: range, reward: float) -> None:
    (run / "logs").mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps(
            {
                "step": step,
                "data": {"critic/rewards/mean": reward, "rollout_corr/k3_kl": 0.0},
            }
        )
        for step in steps
    ]
    (run / "logs" / f"part{part:03}.jsonl").write_text("\n".join(lines) + "\n")


def test_a_later_part_counts_where_parts_overlap(tmp_path: Path) -> None:
    write_part(tmp_path, 0, range(1, 6), 0.25)
    write_part(tmp_path, 1, range(4, 8), 0.5)
    curve = read_run(tmp_path)
    rewards = [values["critic/rewards/mean"] for values in curve.values()]
    assert list(curve) == [1, 2, 3, 4, 5, 6, 7]
    assert rewards == [0.25] * 3 + [0.5] * 4
    first, second, *_ = csv_text(curve).splitlines()
    row = dict(zip(first.split(","), second.split(","), strict=True))
    assert row["step"] == "1"
    assert row["critic/rewards/mean"] == "0.25"
    assert row["actor/entropy"] == ""


def test_a_killed_run_and_an_empty_one(tmp_path: Path) -> None:
    write_part(tmp_path, 0, range(1, 4), 0.25)
    path = tmp_path / "logs" / "part000.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "da')
    assert list(read_run(tmp_path)) == [1, 2, 3]
    with pytest.raises(ModelError, match="has no steps"):
        read_run(tmp_path / "none")


def test_one_picture_of_all_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [tmp_path / "bf16", tmp_path / "jetrl"]
    for run in runs:
        write_part(run, 0, range(1, 4), 0.25)
    out = tmp_path / "curves"
    main([*map(str, runs), "--out", str(out)])
    assert sorted(path.name for path in out.iterdir()) == [
        "bf16.csv",
        "curves.png",
        "jetrl.csv",
    ]
