"""Write the curves of verl runs: a CSV file for each, and one picture of all of them.

python -m jetrl_compile.examples.verl_grpo.curves RUN [RUN ...] --out FOLDER

A run is a folder with `logs/part*.jsonl`, which verl's logger "file" writes. A resumed
run has several parts; where they overlap, the later one counts.
"""

import argparse
import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jetrl_compile.errors import ModelError
from jetrl_compile.files import write_text

METRICS = (
    "critic/rewards/mean",
    "response_length/mean",
    "actor/entropy",
    "actor/grad_norm",
    "rollout_corr/k3_kl",
    "rollout_corr/log_ppl_abs_diff",
    "training/rollout_probs_diff_mean",
    "actor/jetrl/contained",
    "timing_s/gen",
    "timing_s/reward",
    "timing_s/old_log_prob",
    "timing_s/ref",
    "timing_s/adv",
    "timing_s/update_actor",
    "timing_s/update_weights",
    "timing_s/save_checkpoint",
    "timing_s/step",
    "actor/jetrl/sync_mib",
    "actor/jetrl/check_s",
    "perf/total_num_tokens",
    "perf/throughput",
    "actor/perf/max_memory_allocated_gb",
)
DRAWN = METRICS[:7]
Curve = Mapping[int, Mapping[str, float]]


def read_run(folder: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of a run by step.

    Raises:
        ModelError: The folder has no logs.
    """
    found: dict[int, dict[str, float]] = {}
    parts = sorted((folder / "logs").glob("part*.jsonl"))
    for part in parts:
        lines = part.read_text().splitlines()
        for number, line in enumerate(lines):
            try:
                record = json.loads(line)
            except ValueError:
                if number < len(lines) - 1:
                    raise
                break  # a run that was killed while it wrote
            found[int(record["step"])] = record["data"]
    if not found:
        raise ModelError(
            f"{folder} has no steps in logs/part*.jsonl; run hopper.sh with it first"
        )
    return dict(sorted(found.items()))


def csv_text(curve: Curve) -> str:
    """Return a run as CSV: the step and `METRICS`, empty where verl gave none."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("step", *METRICS))
    for step, values in curve.items():
        writer.writerow((step, *(values.get(name, "") for name in METRICS)))
    return text.getvalue()


def draw(curves: Mapping[str, Curve], path: Path) -> None:
    """Draw `DRAWN` of all runs over their steps, one panel a metric."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(DRAWN), 1, figsize=(8, 2.2 * len(DRAWN)), sharex=True, layout="constrained"
    )
    for axis, metric in zip(axes, DRAWN, strict=True):
        for name, curve in curves.items():
            points = [(s, v[metric]) for s, v in curve.items() if metric in v]
            if points:
                axis.plot(*zip(*points, strict=True), label=name, linewidth=1.2)
        axis.set_ylabel(metric.replace("/", "\n", 1), fontsize=8)
        if metric == "rollout_corr/k3_kl":
            axis.set_yscale("symlog", linthresh=1e-8)
    axes[0].legend(fontsize=8)
    axes[-1].set_xlabel("step")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the CSV files and the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("curves"))
    chosen = parser.parse_args(arguments)
    curves: dict[str, Any] = {run.resolve().name: read_run(run) for run in chosen.run}
    chosen.out.mkdir(parents=True, exist_ok=True)
    for name, curve in curves.items():
        write_text(chosen.out / f"{name}.csv", csv_text(curve))
    draw(curves, chosen.out / "curves.png")
    print(f"{chosen.out}: {len(curves)} runs, {max(map(len, curves.values()))} steps")


if __name__ == "__main__":
    main()
