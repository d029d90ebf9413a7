"""Compare how long the phases of a step take in verl runs, as a Markdown table.

python -m jetrl_compile.examples.verl_grpo.phases BASE RUN [RUN ...]

BASE is the run that the others are compared with, such as one of verl_bf16. Each number
is a median over steps, without the first ones, in which kernels are compiled. Where
responses differ in length, so does the work: "a token" divides by the tokens of a step.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from jetrl_compile.errors import ModelError
from jetrl_compile.examples.verl_grpo.curves import Curve, read_run

PHASES = {
    "rollout": "gen",
    "old log-prob": "old_log_prob",
    "reference": "ref",
    "actor update": "update_actor",
    "weight sync": "update_weights",
    "step": "step",
}
TOKENS = "perf/total_num_tokens"
_FIXED = ("update_weights",)  # whose work does not grow with tokens


def medians(curve: Curve, skip: int) -> dict[str, float]:
    """Return seconds by phase, and tokens a step; phases that did not run are left out.

    Args:
        curve: Of a run, from `read_run`.
        skip: Steps at the begin that do not count.

    Raises:
        ModelError: No step is left.
    """
    steps = list(curve.values())[skip:]
    if not steps:
        raise ModelError(
            f"a run of {len(curve)} steps has none after the first {skip}; give fewer "
            "to --skip, or a longer run"
        )
    found = {}
    for name in (*(f"timing_s/{phase}" for phase in PHASES.values()), TOKENS):
        values = [step[name] for step in steps if name in step]
        if values:
            found[name] = statistics.median(values)
    return found


def table(runs: Mapping[str, Mapping[str, float]]) -> str:
    """Return the phases of runs as Markdown; the first run is what is compared with.

    Args:
        runs: The medians of each run, by its name.
    """
    base = next(iter(runs.values()))
    lines = ["| phase | " + " | ".join(runs) + " |", "|---" * (len(runs) + 1) + "|"]
    for title, phase in PHASES.items():
        name = f"timing_s/{phase}"
        cells = [_cell(run, base, name, phase) for run in runs.values()]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    tokens = [f"{run[TOKENS]:,.0f}" if TOKENS in run else "" for run in runs.values()]
    lines.append("| tokens a step | " + " | ".join(tokens) + " |")
    return "\n".join(lines) + "\n"


def _cell(
    run: Mapping[str, float], base: Mapping[str, float], name: str, phase: str
) -> str:
    """Seconds, and how many times faster than the base, also by token."""
    if name not in run:
        return ""
    text = f"{run[name]:.3g} s"
    if run is base or name not in base or not run[name]:
        return text
    ratio = base[name] / run[name]
    text += f", {ratio:.2f}x"
    if TOKENS in run and base.get(TOKENS) and phase not in _FIXED:
        text += f" ({ratio * run[TOKENS] / base[TOKENS]:.2f}x a token)"
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", type=Path, nargs="+")
    parser.add_argument("--skip", type=int, default=2, help="first steps not to count")
    chosen = parser.parse_args(arguments)
    runs = {
        run.resolve().name: medians(read_run(run), chosen.skip) for run in chosen.run
    }
    print(table(runs), end="")


if __name__ == "__main__":
    main()
