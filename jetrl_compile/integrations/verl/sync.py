"""What goes from the trainer to a rollout, and whether it arrived.

The engine of a worker makes one `WeightSync`; the rollout's adapter in the same process
finds it with `current_sync()`.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetrl_compile.containment import ContainmentReport, check_containment
from jetrl_compile.errors import ContainmentError, ModelError, OutputError
from jetrl_compile.files import write_text
from jetrl_compile.graph_json import write_graph
from jetrl_compile.integrations.verl.digests import (
    StoredLayer,
    compare_digests,
    wanted_digests,
)
from jetrl_compile.integrations.verl.settings import Settings
from jetrl_compile.precision_graph import PrecisionGraph
from jetrl_compile.report import render

_current: "WeightSync | None" = None


class WeightSync:
    """The checks of one trainer against the rollouts that it feeds.

    Attributes:
        settings: Of the worker.
        train: The trainer's precision graph.
        layers: The layers that a rollout stores in FP8.
        report: What is known so far; None before levels 1 and 2 were checked.
        rank: Of the worker.
    """

    def __init__(
        self,
        settings: Settings,
        train: PrecisionGraph,
        layers: dict[str, StoredLayer],
        rank: int,
    ) -> None:
        self.settings, self.train, self.layers = settings, train, layers
        self.report: ContainmentReport | None = None
        self.rank = rank
        self._wanted: dict[str, str] = {}
        self._complete = False

    def stream(
        self, parameters: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield a trainer's parameters as a rollout gets them: rounded to BF16.

        Args:
            parameters: Whole parameters by name, BF16 or FP32 masters.
        """
        self._wanted, self._complete = {}, False
        for name, parameter in parameters:
            sent = parameter.detach()
            if sent.is_floating_point():
                sent = sent.to(torch.bfloat16)
            if self.settings.level >= 3:
                self._wanted |= wanted_digests(name, sent, self.layers)
            yield name, sent
        self._complete = True

    def check_graph(self, rollout: PrecisionGraph, where: str = "the rollout") -> None:
        """Check levels 1 and 2 against the graph of a rollout.

        Raises:
            ContainmentError: It is not contained, and violations stop the run.
        """
        self.report = check_containment(rollout, self.train)
        folder = self._folder()
        if folder is not None and self.rank == 0:
            write_graph(self.train, folder / "train.json")
            write_graph(rollout, folder / "rollout.json")
        self._settle(f"levels 1 and 2 of {where}", (1, 2))

    def check_bytes(self, stored: dict[str, str], step: int | None) -> int:
        """Check level 3 against the digests of what a rollout stores.

        Args:
            stored: The rollout's digests after a complete `stream`.
            step: The step whose weights were sent.

        Returns:
            The number of tensors that differ.

        Raises:
            ContainmentError: One differs, and violations stop the run.
            ModelError: No complete stream came before.
        """
        if not self._complete:
            raise ModelError(
                "a rollout was checked after an incomplete weight sync; send all "
                "weights first"
            )
        result, differences = compare_digests(stored, self._wanted, self.layers)
        if self.report is None:  # levels 1 and 2 were not asked for
            self.report = check_containment(self.train, self.train)
        self.report = self.report.with_level(result, differences)
        self._settle(f"level 3 after the weight sync of step {step}", (3,))
        return len(differences)

    def metrics(self) -> dict[str, float]:
        """Return what verl's loggers get with each actor update."""
        if self.report is None:
            return {}
        found = {"jetrl/contained": float(self.report.contained is True)}
        for level in self.report.levels:
            if level.status != "not run":
                passed = float(level.status == "passed")
                found[f"jetrl/level_{level.level}_{level.name}"] = passed
        return found

    def _folder(self) -> Path | None:
        """The folder of reports, made where it is not there yet."""
        folder = self.settings.reports
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OutputError(
                    f"cannot make the folder {folder}: {error.strerror}; set "
                    "jetrl_reports to one that can be written"
                ) from None
        return folder

    def _settle(self, what: str, levels: tuple[int, ...]) -> None:
        """Write the report; stop or warn if one of these levels failed."""
        assert self.report is not None
        folder = self._folder()
        if folder is not None:
            for name in ("json", "md"):
                path = folder / f"containment-rank{self.rank}.{name}"
                write_text(path, render(self.report, name))
        found = [each for each in self.report.differences if each.level in levels]
        if not found:
            return
        first, count = found[0], len(found)
        message = (
            f"{what}: not contained in the trainer, {count} "
            f"difference{'s' * (count > 1)}, first {first}"
        )
        if self.settings.on_violation == "stop":
            raise ContainmentError(
                f"{message}; mend it, or set jetrl_on_violation=warn to go on"
            )
        print(f"WARNING: jetrl: {message}", flush=True)


def set_current(sync: WeightSync) -> None:
    """Make a worker's checks known to the rollout's adapter in its process."""
    global _current
    _current = sync


def current_sync() -> WeightSync:
    """Return the checks of this process.

    Raises:
        ModelError: The process has no engine of this package.
    """
    if _current is None:
        raise ModelError(
            "no trainer of jetrl in this process; set actor_rollout_ref.model."
            "external_lib=jetrl_compile.integrations.verl"
        )
    return _current


def as_metrics(values: dict[str, float]) -> dict[str, Any]:
    """Return metrics as verl's engines give them: a list a rank."""
    return {name: [value] for name, value in values.items()}
