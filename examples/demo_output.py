"""What the demo leaves behind: text for people, JSON, and files in a folder."""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jetrl_compile.containment_report import ContainmentReport
from jetrl_compile.errors import OutputError
from jetrl_compile.examples.demo import DemoResult, StepRecord
from jetrl_compile.files import write_text
from jetrl_compile.graph_json import graph_to_json
from jetrl_compile.recipe import PHASES, get_recipe
from jetrl_compile.report import render

FORMAT, VERSION = "jetrl.demo", 1
# Metrics in the table, under headings that break where they have a space.
COLUMNS = {
    "k3_kl": "rollout_corr/k3_kl",
    "log_ppl_ abs_diff": "rollout_corr/log_ppl_abs_diff",
    "probs_ diff_mean": "training/rollout_probs_diff_mean",
    "probs_ diff_max": "training/rollout_probs_diff_max",
}
ALSO_WRITTEN = {"md": "md", "json": "json", "junit": "xml"}


def write_result(result: DemoResult, folder: Path) -> list[Path]:
    """Write graphs, reports and a summary into a folder; other files stay.

    Args:
        result: Of `run_demo`.
        folder: Made if it does not exist.

    Returns:
        The files that were written, each whole.

    Raises:
        OutputError: The folder or a file cannot be written.
    """
    texts = {
        f"{side}.json": graph_to_json(graph) for side, graph in result.graphs.items()
    }
    for recipe, report in result.containment.items():
        texts[f"containment.{recipe}.md"] = render(report, "md")
    if result.audit is not None:
        for name, suffix in ALSO_WRITTEN.items():
            texts[f"audit.{suffix}"] = render(result.audit, name)
    texts["mismatch.md"] = mismatch_markdown(result)
    texts["summary.json"] = summary_json(result)
    make_folder(folder)
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def make_folder(folder: Path) -> None:
    """Make a folder, and check that files can be written there.

    Raises:
        OutputError: It cannot be made, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(
            f"cannot write to the folder {folder}: {error.strerror}; name another with "
            "--out"
        ) from error


def summary_json(result: DemoResult) -> str:
    """Return everything but graphs and full reports, as versioned JSON."""
    table = {
        "format": FORMAT,
        "version": VERSION,
        "model": result.options.name,
        "options": asdict(result.options),
        "containment": {
            recipe: _verdict(report) for recipe, report in result.containment.items()
        },
        "steps": [_step(step) for step in result.steps],
        "mismatch": result.mismatch,
        "audit": None if result.audit is None else _verdict(result.audit),
        "seconds": round(result.seconds, 1),
    }
    return json.dumps(table, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def mismatch_rows(result: DemoResult) -> list[list[str]]:
    """Return the mismatch table, its heading first."""
    rows = [["recipe", "trainer", "rollouts", "contained", *COLUMNS]]
    for name, values in result.mismatch.items():
        recipe = get_recipe(name)
        sides = ["FP8" if recipe.quantizes(phase) else "BF16" for phase in PHASES]
        verdict = "yes" if result.containment[name].contained else "no"
        numbers = [_number(values[metric]) for metric in COLUMNS.values()]
        rows.append([name, *sides, verdict, *numbers])
    return rows


def mismatch_markdown(result: DemoResult) -> str:
    """Return the mismatch table in Markdown, with every metric below it."""
    heading, *rows = mismatch_rows(result)
    lines = [
        f"# Mismatch of trainer and rollouts: {result.options.name}",
        "",
        "The same tokens, the weights after the last step. "
        "`k3_kl` and `log_ppl_abs_diff` in nats.",
        "",
        _row([text.replace(" ", "") for text in heading]),
        _row(["---"] * len(heading)),
        *map(_row, rows),
        "",
        _row(["metric", *result.mismatch]),
        _row(["---"] * (1 + len(result.mismatch))),
    ]
    names = next(iter(result.mismatch.values()), {})
    for name in names:
        values = [_number(metrics[name]) for metrics in result.mismatch.values()]
        lines.append(_row([f"`{name}`", *values]))
    return "".join(f"{line}\n" for line in lines)


def step_line(step: StepRecord, number: int) -> str:
    """Return a GRPO step in one line."""
    update = step.update
    learned = (
        f"loss {update.loss:+.4f}, gradient norm {update.grad_norm:.3g}"
        if update.grad_norm
        else "nothing to learn (no group has good and bad answers)"
    )
    gap = _number(step.mismatch["rollout_corr/k3_kl"])
    return f"step {number}: mean reward {step.reward:.3f}, {learned}, k3_kl {gap}"


def _step(step: StepRecord) -> dict[str, Any]:
    return {
        "reward": step.reward,
        **asdict(step.update),
        "tokens": step.tokens,
        "seconds": round(step.seconds, 1),
        "mismatch": step.mismatch,
        "answers": [asdict(answer) for answer in step.answers],
    }


def _verdict(report: ContainmentReport) -> dict[str, Any]:
    return {
        "contained": report.contained,
        "verdict": report.verdict(),
        "levels": {level.name: level.status for level in report.levels},
    }


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.3g}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
