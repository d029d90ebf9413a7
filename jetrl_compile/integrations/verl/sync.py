"""What goes from the trainer to a rollout, and whether it arrived.

The engine of a worker makes one `WeightSync`; the rollout's adapter in the same process
finds it with `current_sync()`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_compile.containment import ContainmentReport, check_containment
from jetrl_compile.digests import (
    Digests,
    Shard,
    StoredLayer,
    compare_digests,
    merge_ranks,
)
from jetrl_compile.errors import ContainmentError, ModelError, OutputError
from jetrl_compile.files import write_text
from jetrl_compile.graph_json import write_graph
from jetrl_compile.integrations.verl.settings import Settings
from jetrl_compile.kernels.exact_kernels import LOG_PROBS
from jetrl_compile.precision_graph import PrecisionGraph
from jetrl_compile.report import render

_current: "WeightSync | None" = None
_HEAD = "lm_head.weight"  # an engine stores it once if it is the embedding's


class WeightSync:
    """The checks of one trainer against the rollouts that it feeds.

    Attributes:
        settings: Of the worker.
        train: The trainer's precision graph.
        layers: The layers that a rollout stores in FP8.
        report: What is known so far; None before levels 1 and 2 were checked.
        rank: Of the worker.
        sent_bytes: Of the last sync.
        check_seconds: How long a rollout was asked and compared after the last sync.
        model: The trainer's model on the meta device.
        log_probs: The kernel of `jetrl::log_probs` that rollouts agree with.
        equal_log_probs: In exact mode, the share of sampled tokens whose log-probs had
            the trainer's bits in the last step; None before.
    """

    def __init__(
        self,
        settings: Settings,
        train: PrecisionGraph,
        layers: dict[str, StoredLayer],
        rank: int,
        model: nn.Module,
    ) -> None:
        self.settings, self.train, self.layers = settings, train, layers
        self.model, self.log_probs = model, LOG_PROBS[0]
        self.equal_log_probs: float | None = None
        self.report: ContainmentReport | None = None
        self.rank = rank
        self.sent_bytes, self.check_seconds = 0, 0.0
        self._wanted: dict[str, str] = {}
        self._complete = False
        self._checked = settings.level >= 3
        self._shards: Mapping[str, Iterable[tuple[Shard, torch.dtype]]] | None = None
        self._unchecked: tuple[str, ...] = ()

    def expect(
        self,
        shards: Mapping[str, Iterable[tuple[Shard, torch.dtype]]] | None,
        *,
        unchecked: Iterable[str] = (),
        checked: bool = True,
    ) -> None:
        """Say what of the weights a rollout stores, before they stream.

        Args:
            shards: For each tensor the parts of it that some rank stores, and in which
                dtype; None: each as a whole, as it is sent.
            unchecked: Module paths whose tensors are not checked.
            checked: False where another worker checks what this one sends.
        """
        self._shards, self._unchecked = shards, tuple(unchecked)
        self._checked = checked and self.settings.level >= 3

    def stream(
        self, parameters: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield a trainer's parameters as a rollout gets them.

        They are rounded to BF16; on the wire "fp8" the layers that a rollout stores in
        FP8 come as codes, "<path>.weight", and scales, "<path>.weight_scale_inv".

        Args:
            parameters: Whole parameters by name, BF16 or FP32 masters.
        """
        self._wanted, self._complete, self.sent_bytes = {}, False, 0
        made = Digests()
        in_fp8 = self.settings.wire == "fp8"
        for name, parameter in parameters:
            source = parameter.detach()
            if source.is_floating_point():
                source = source.to(torch.bfloat16)
            sent = stored = {name: source}
            if in_fp8 or self._checked:
                stored = self._stored(name, source)
            if self._checked:
                for own, tensor in stored.items():
                    self._note(made, own, tensor)
            sent = stored if in_fp8 else sent
            self.sent_bytes += sum(tensor.nbytes for tensor in sent.values())
            yield from sent.items()
        self._wanted, self._complete = made.result(), True

    def _stored(self, name: str, source: Tensor) -> dict[str, Tensor]:
        """What a rollout stores of a BF16 parameter."""
        path, _, leaf = name.rpartition(".")
        layer = self.layers.get(path)
        if layer is None or leaf != "weight":
            return {name: source}
        codes, scales = layer.quantize(source)
        return {name: codes, f"{path}.{layer.scale_leaf}": scales}

    def _note(self, made: Digests, name: str, tensor: Tensor) -> None:
        """Note the digests that a rollout must have of a tensor."""
        if self._shards is None:
            made.add(name, tensor)
        elif name in self._shards:
            for shard, dtype in self._shards[name]:
                made.add(shard.key, shard.of(tensor).to(dtype))
        elif name != _HEAD and not name.startswith(self._unchecked):
            made.add(name, tensor)  # the rollout has nothing of it

    def check_graph(
        self,
        rollout: PrecisionGraph,
        where: str = "the rollout",
        train: PrecisionGraph | None = None,
    ) -> None:
        """Check levels 1 and 2 against the graph of a rollout.

        Args:
            rollout: The rollout's graph.
            where: What messages call the rollout.
            train: The trainer's graph, if other than `self.train`: on the rollout's
                device.

        Raises:
            ContainmentError: It is not contained, and violations stop the run.
        """
        train = train or self.train
        self.report = check_containment(rollout, train, exact=self.settings.exact)
        folder = self._folder()
        if folder is not None and self.rank == 0:
            write_graph(train, folder / "train.json")
            write_graph(rollout, folder / "rollout.json")
        self._settle(f"levels 1 and 2 of {where}", (1, 2))

    def check_bytes(self, ranks: Sequence[Mapping[str, str]], step: int | None) -> int:
        """Check level 3 against the digests of what a rollout stores.

        Args:
            ranks: The digests of each of the rollout's ranks after a complete `stream`.
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
        stored = merge_ranks(ranks, self._wanted)
        result, differences = compare_digests(stored, self._wanted, self.layers)
        if self.report is None:  # levels 1 and 2 were not asked for
            exact = self.settings.exact
            self.report = check_containment(self.train, self.train, exact=exact)
        self.report = self.report.with_level(result, differences)
        self._settle(f"level 3 after the weight sync of step {step}", (3,))
        return len(differences)

    def check_log_probs(self, tokens: int, equal: int, first: str) -> None:
        """Check that sampled tokens have the trainer's log-probs, in exact mode.

        Args:
            tokens: That a rollout sampled.
            equal: That have equal bits in rollout and trainer.
            first: What the first other one is.

        Raises:
            ContainmentError: One has other bits, and violations stop the run.
        """
        self.equal_log_probs = equal / max(tokens, 1)
        if equal < tokens:
            self._violate(
                f"exact mode: {tokens - equal} of {tokens} sampled tokens have other "
                f"log-probs in the trainer, first {first}; jetrl audit --exact names "
                "the operator"
            )

    def metrics(self) -> dict[str, float]:
        """Return what verl's loggers get with each actor update."""
        if self.report is None:
            return {}
        found = {
            "jetrl/contained": float(self.report.contained is True),
            "jetrl/sync_mib": self.sent_bytes / 2**20,
            "jetrl/check_s": self.check_seconds,
        }
        if self.equal_log_probs is not None:
            found["jetrl/equal_log_probs"] = self.equal_log_probs
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
        self._violate(
            f"{what}: not contained in the trainer, {count} "
            f"difference{'s' * (count > 1)}, first {first}"
        )

    def _violate(self, message: str) -> None:
        """Stop the run, or warn."""
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


def log_probs_kernel() -> str:
    """Return the kernel of `jetrl::log_probs` for this process."""
    return LOG_PROBS[0] if _current is None else _current.log_probs


def expect_nothing() -> None:
    """Check no bytes in this process: its rollouts run nothing of this package."""
    if _current is not None:
        _current.expect(None, checked=False)


def as_metrics(values: dict[str, float]) -> dict[str, Any]:
    """Return metrics as verl's engines give them: a list a rank."""
    return {name: [value] for name, value in values.items()}
