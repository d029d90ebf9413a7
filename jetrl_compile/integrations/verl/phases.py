"""Which layers ran compiled in each phase of a step, and which of their GEMMs are FP8.

A layer that runs uncompiled, or whose graph lacks a GEMM, runs it in BF16 without a
word. Every compiled layer notes its calls here; after the first step of a phase the FP8
GEMMs of the layers that ran are counted against those of the precision graph.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from jetrl_compile.errors import LoweringError
from jetrl_compile.formats import Flow
from jetrl_compile.layers import decoder_layers
from jetrl_compile.pipeline import CompileReport
from jetrl_compile.precision_graph import PrecisionGraph

ACTOR_UPDATE = "actor update"
OLD_LOG_PROB = "old log-prob"
REFERENCE = "reference"


class PhaseLedger:
    """Counts the FP8 GEMMs that ran in each phase of one model.

    Attributes:
        reports: Of every graph that was compiled for the model.
        ran: For each phase, the FP8 GEMMs of the layers that ran compiled: fprop, in
            training dgrad and wgrad too.
    """

    def __init__(self, wanted: PrecisionGraph, stands_for: Mapping[str, str]) -> None:
        """Expect the FP8 GEMMs of a training graph.

        Args:
            wanted: The precision graph of the whole model in training.
            stands_for: As `compile_layers` returns it.
        """
        self.reports: list[CompileReport] = []
        self.ran: dict[str, frozenset[str]] = {}
        self._wanted = wanted
        self._stands_for = dict(stands_for)
        inside = tuple(f"{path}." for path in stands_for)
        self._fp8 = {
            op.name
            for op in wanted.gemms()
            if wanted.is_fp8(op) and op.name.startswith(inside)
        }
        self._others: set[str] = set()  # what is compiled beside the layers
        self._calls: dict[str, set[str]] = defaultdict(set)
        self._graphs: dict[str, int] = {}  # compiled when a phase was last checked

    def watch(self, model: nn.Module) -> None:
        """Note the calls of compiled layers.

        Args:
            model: After `compile_layers`.
        """
        layers = decoder_layers(model)
        for path, module in model.named_modules():
            compiled = module._compiled_call_impl
            if compiled is not None:
                module._compiled_call_impl = self._noting(path, compiled)
                if path not in layers:
                    self._others.add(path)

    def _noting(self, path: str, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            kind = "training" if torch.is_grad_enabled() else "inference"
            self._calls[kind].add(path)
            return compiled(*args, **kwargs)

        return call

    def begin(self) -> None:
        """Forget the calls of the phase before."""
        self._calls.clear()

    def end(self, phase: str, *, training: bool) -> int | None:
        """Check a phase that ended, the first time and after more was compiled.

        Args:
            phase: Its name.
            training: Whether it ran backward.

        Returns:
            The number of FP8 GEMMs that ran, None if nothing is new.

        Raises:
            LoweringError: A GEMM that is FP8 in the precision graph ran otherwise, a
                compiled graph is not as it was traced, or in exact mode the last norm
                or the output head ran eagerly; the modules are named.
        """
        if phase in self.ran and self._graphs[phase] == len(self.reports):
            return None
        self._graphs[phase] = len(self.reports)
        kind = "training" if training else "inference"
        eager = sorted(self._others - self._calls[kind])
        if eager:
            raise LoweringError(
                f"phase {phase!r} ran {', '.join(eager)} without exact kernels; leave "
                "what computes logits compiled, and torch.compile on"
            )
        found = self._gemms(self._calls[kind], training)
        self.ran[phase] = frozenset(found)
        wanted = {name for name in self._fp8 if training or _is_fprop(name)}
        missing = sorted(wanted - found, key=_natural)
        if missing:
            others = [name for name, ran in self.ran.items() if missing[0] in ran]
            also = f", as in {', '.join(others)}" if others else ""
            raise LoweringError(
                f"phase {phase!r} ran {len(wanted) - len(missing)} of {len(wanted)} "
                f"GEMMs in FP8; not {', '.join(missing[:3])}"
                f"{' ...' if len(missing) > 3 else ''}. "
                f"They must be FP8{also}: leave the decoder layers compiled, and "
                "torch.compile on"
            )
        self._check_graphs()
        return len(found)

    def _gemms(self, layers: Iterable[str], training: bool) -> set[str]:
        """The FP8 GEMMs of layers, by the graph that each of them ran."""
        by_module: dict[str, set[str]] = {}
        for report in self.reports:
            if report.training != training:
                continue
            names = {
                op.name.removeprefix(report.module)
                for op in report.graph.gemms()
                if report.graph.is_fp8(op)
            }
            # A layer may have several graphs (shapes): what all of them run counts.
            known = by_module.get(report.module)
            by_module[report.module] = names if known is None else known & names
        return {
            path + name
            for path in layers
            for name in by_module.get(self._stands_for.get(path, ""), ())
        }

    def _check_graphs(self) -> None:
        """Check the FP8 GEMMs of what was compiled against what was traced."""
        for report in self.reports:
            for op in report.graph.gemms():
                if op.name not in self._wanted.by_name:
                    continue  # a merged GEMM's part, or a role without a trace
                mine = report.graph.operands[op.name]
                theirs = self._wanted.operands[op.name]
                for operand in mine.keys() & theirs.keys():
                    ran, traced = mine[operand].flow, theirs[operand].flow
                    if _forward(ran) != _forward(traced):
                        raise LoweringError(
                            f"{op.name}.{operand} ran as {ran}, but was traced as "
                            f"{traced}; report this"
                        )


def _is_fprop(name: str) -> bool:
    """Whether an operator's name is of a forward GEMM."""
    return name.rpartition(":")[2].startswith("fprop")


def _forward(flow: Flow) -> Flow:
    """A flow without what is kept of it for backward: FSDP2 decides that anew."""
    return replace(flow, saved_dtype=None)


def _natural(name: str) -> tuple[Any, ...]:
    """Sort by numbers where names have them."""
    return tuple((0, int(p)) if p.isdigit() else (1, p) for p in name.split("."))
