"""Whether a model still has the precision flow that a lock fixes."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from jetrl_compile.containment_report import (
    ContainmentReport,
    LevelResult,
    Wording,
)
from jetrl_compile.errors import GraphFormatError
from jetrl_compile.graph_json import read_graph
from jetrl_compile.lock import Lock
from jetrl_compile.lock_facts import SIDES, changed_facts, compared, facts_of
from jetrl_compile.lock_names import unfold_name
from jetrl_compile.precision_graph import PrecisionGraph
from jetrl_compile.report_origin import graph_lines

_META = ("phase", "recipe", "engine", "model")
Progress = Callable[[str], None]


@dataclass(frozen=True)
class LockReport(ContainmentReport):
    """What differs between a lock and a graph.

    `rollout` in its differences is the lock's value, `train` the graph's; JSON calls
    them `before` and `after`.
    """

    wording: ClassVar[Wording] = Wording(
        heading="Precision flow against its lock",
        sides=SIDES,
        check="lock",
        contained="unchanged",
        fields={
            "rollout": "before",
            "train": "after",
            "rollout_meta": "lock_source",
            "train_meta": "graph_source",
            "notes": None,
            "high_precision": None,
            "unknown": None,
            "strict": None,
        },
        is_change=True,
        fix="undo it; or, if it is meant, run the same command with --update and "
        "commit the lock",
    )

    def verdict(self) -> str:
        """Return the result in one line."""
        if self.contained is None:
            return f"could not tell: {self.undecided}"
        if self.contained:
            return "unchanged: the precision flow is as the lock has it"
        number = len(self.differences)
        plural = "" if number == 1 else "s"
        return f"changed: {number} difference{plural} from the lock"


def check_lock(lock: Lock, graph: PrecisionGraph) -> LockReport:
    """Compare a graph with a lock.

    Args:
        lock: What must be.
        graph: What is.

    Returns:
        The report. It tells nothing where the two are of other phases, or the graph
        says in its meta key "incomplete" what was not captured.
    """
    now = facts_of(graph)
    found = changed_facts(lock.facts, now)
    phases = lock.source.get("phase", ""), graph.meta.get("phase", "")
    undecided = ""
    if all(phases) and phases[0] != phases[1]:
        found = []
        undecided = (
            f"the lock is of phase {phases[0]}, the graph of phase {phases[1]}; "
            f"compare it with a graph of phase {phases[0]}, or keep a lock for each"
        )
    elif text := graph.meta.get("incomplete"):
        found = [item for item in found if item.attribute not in ("operator", "edge")]
        undecided = f"the graph is incomplete: {text}"
    counts = compared(lock.facts, now)
    levels = []
    for number in (1, 2):
        here = sum(item.level == number for item in found)
        status = "failed" if here else "not run" if undecided else "passed"
        reason = f"could not tell: {undecided}" if status == "not run" else ""
        table = {"differences": here, **counts}
        levels.append(LevelResult(number, status, reason, table))
    sizes = {}
    for side, facts in zip(SIDES, (lock.facts, now), strict=True):
        sizes[f"operators in {side}"] = len(facts.operators)
        sizes[f"FP8 GEMMs in {side}"] = sum(fp8 for fp8, _ in facts.gemms().values())
    meta = {key: graph.meta[key] for key in _META if key in graph.meta}
    remarks = [
        f"{key} was {lock.source[key]} in the lock, is {meta[key]} now"
        for key in ("recipe", "engine", "model")
        if key in lock.source and lock.source[key] != meta.get(key, lock.source[key])
    ]
    return LockReport(
        tuple(levels),
        tuple(sorted(found, key=lambda item: item.level)),
        remarks=tuple(remarks),
        counts=sizes,
        rollout_meta=dict(lock.source),
        train_meta=meta,
        undecided=undecided,
    )


def make_lock(
    graph: PrecisionGraph,
    *,
    path: Path | str = "",
    folder: Path | str = ".",
    live_engine: str = "",
) -> Lock:
    """Return the lock of a graph.

    Args:
        graph: Of a model.
        path: The config or graph file that it was made from; the lock remembers it.
        folder: Where the lock will lie.
        live_engine: The engine that was asked for the graph; "" for none.

    Raises:
        GraphFormatError: The graph says in its meta key "incomplete" what it lacks, or
            it has no GEMM.
    """
    if next(graph.gemms(), None) is None:
        raise GraphFormatError(
            f"the graph has {len(graph.operators)} operators and no GEMM, so a lock of "
            "it would say nothing; lock the graph of a model"
        )
    if text := graph.meta.get("incomplete"):
        raise GraphFormatError(
            f"the graph is incomplete ({text}), so a lock of it would fix a part; lock "
            "a graph that was captured whole"
        )
    source = {key: graph.meta[key] for key in _META if key in graph.meta}
    if str(path):
        relative = os.path.relpath(os.path.abspath(path), os.path.abspath(folder))
        source["path"] = Path(relative).as_posix()
    if live_engine:
        source["live_engine"] = live_engine
    return Lock(facts_of(graph), source)


def source_graph(
    path: Path,
    *,
    phase: str = "train",
    recipe: str = "jetrl",
    engine: str = "",
    progress: Progress | None = None,
) -> PrecisionGraph:
    """Return the graph of a file that holds one, or of a model's config.

    Args:
        path: A precision graph's JSON file, or a folder with a Hugging Face config.
        phase: "train" or "rollout", for a config.
        recipe: A recipe's name, for a config.
        engine: An engine that is asked instead of tracing the config; "" for none.
        progress: Called with a line before each step.

    Raises:
        JetRLError: The graph cannot be read, or the model not be traced.
    """
    say = progress or (lambda _: None)
    if _is_graph(path):
        say(f"reading {path}")
        return read_graph(path)
    if engine:
        from jetrl_compile.engines import load_engine

        graph: PrecisionGraph = load_engine(engine).graph(
            path, recipe=recipe, progress=say
        )
        return graph
    from jetrl_compile.tracing import trace_config

    return trace_config(path, phase=phase, recipe=recipe, progress=say)


def locked_graph(
    lock: Lock,
    lock_path: Path,
    source: Path | None = None,
    progress: Progress | None = None,
) -> PrecisionGraph:
    """Return the graph that a lock is compared with, made as the lock's was.

    Args:
        lock: The lock.
        lock_path: Where it lies; its own source is relative to that folder.
        source: A config or a graph; None for the lock's own.
        progress: Called with a line before each step.

    Raises:
        GraphFormatError: The lock names no source, and none is given.
        JetRLError: As `source_graph`.
    """
    made = lock.source
    if source is None:
        if not made.get("path"):
            raise GraphFormatError(
                f"{lock_path} does not say which model it is of; name the model's "
                "folder or graph behind the options"
            )
        source = lock_path.parent / made["path"]
        if not source.exists():
            raise GraphFormatError(
                f"{lock_path} is of {source}, which does not exist; name the model's "
                "folder or graph, or make the lock again with `jetrl lock`"
            )
    return source_graph(
        source,
        phase=made.get("phase", "train"),
        recipe=made.get("recipe", "jetrl"),
        engine=made.get("live_engine", ""),
        progress=progress,
    )


def lock_lines(text: str) -> dict[str, int]:
    """Return the line of each operator and edge in a lock's text, by unfolded names."""
    found: dict[str, int] = {}
    folded = graph_lines(text)
    for name, line in folded.items():
        try:
            for each, _ in unfold_name(name, 100_000):
                found.setdefault(each, line)
        except ValueError:
            continue
    return found


def _is_graph(path: Path) -> bool:
    """Whether a file is one of ours, or nothing at all, rather than a config."""
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        root = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return path.name != "config.json"  # a graph's reader says what is wrong
    return not isinstance(root, dict) or str(root.get("format")).startswith("jetrl.")
