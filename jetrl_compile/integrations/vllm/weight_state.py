"""Which weights of an engine's model are of one push, and whether it may generate."""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jetrl_compile.errors import RefitError
from jetrl_compile.integrations.vllm.layout import LayerLayout, Part


class WeightState:
    """What was written since all weights were last of one push.

    A push may come in chunks, through whichever interface of vLLM; while some weights
    are of a push and others are not, the model refuses to generate. After a refusal
    either the rest may come, or all weights again; where the first can be both, what
    came counts for the second, too.

    Attributes:
        layers: The layouts of the quantized layers, by their names in the engine.
        broken: Why the model must not generate although all weights came, or "".
        pushing: Why it must not while a push of all weights is going on, or "".
        is_whole: Whether all parts were written since the last push began.
    """

    def __init__(self) -> None:
        self.layers: dict[str, LayerLayout] = {}
        self.broken = ""
        self.pushing = ""
        self.is_whole = False
        self._held = False
        self._parts: set[str] = set()
        self._stored: dict[str, None] = {}  # at load, or by a push
        self._written: dict[str, None] = {}  # in this order
        self._refused: dict[str, None] = {}  # written before a refusal
        self._rest: dict[str, None] = {}  # came after it, and completed a push
        self._scales: dict[str, Tensor] = {}

    def __deepcopy__(self, memo: Any) -> "WeightState":
        """A copied config speaks of the same weights."""
        return self

    def add(self, layout: LayerLayout) -> None:
        """Make a layer known."""
        self.layers[layout.name] = layout
        self._parts.update(part.name for part in layout.parts)

    def begin(self, why: str, *, held: bool = True) -> None:
        """Begin a push of all weights: what an earlier one wrote no longer counts.

        Args:
            why: Why the model must not generate until `pushing` is "" again.
            held: Whether only its owner ends it; else a complete push through vLLM's
                interfaces does, too.
        """
        self.pushing, self._held, self.is_whole = why, held, False
        self._written, self._refused, self._rest = {}, {}, {}
        self._scales = {}

    def is_loaded(self, part: Part) -> bool:
        """Whether a part has been stored before, so that another weight is a push."""
        return part.name in self._stored

    def wrote(self, part: Part, scales: Tensor, *, later: bool = False) -> None:
        """Note that a part was written, with these scales.

        The first time it is loaded; every other time it is pushed. Where a part comes
        again before all have come, another push began: what was written up to its first
        coming no longer counts.

        Args:
            part: What was written.
            scales: Its scales.
            later: Whether NaN and infinity are told by `check` alone, not here.

        Raises:
            RefitError: It completes a load or a push in which a weight holds NaN or
                infinity.
        """
        self._scales[part.name] = scales
        if self.is_loaded(part):
            done = self._push(part.name)
        else:
            self._stored[part.name] = None
            done = self._stored
        if done.keys() == self._parts:
            if not self._held:
                self.pushing = ""
            with contextlib.suppress(*([RefitError] if later else [])):
                self.settle()

    def _push(self, name: str) -> dict[str, None]:
        """Note a pushed part; return the parts of the push that it may belong to."""
        if self._rest:
            self._written, self._rest = self._rest, {}
        if name in self._refused:
            self._refused = {}
        while name in self._written:
            del self._written[next(iter(self._written))]
        self._written[name] = None
        return self._refused | self._written

    def wrote_all(self, scales: Mapping[Any, Tensor]) -> None:
        """Note a complete push.

        Args:
            scales: For each layer, its scales; keys are what messages call it. NaN and
                infinity in a tensor without scales are known by its largest magnitude.

        Raises:
            RefitError: A weight holds NaN or infinity; the model refuses to generate.
        """
        self._scales = dict(scales)
        self.settle()

    def settle(self) -> None:
        """Check the weights of a complete push, and let the model generate.

        Raises:
            RefitError: One holds NaN or infinity; the model refuses to generate.
        """
        given, self._scales = self._scales, {}
        self._rest = self._written if self._refused else {}
        self._written, self._refused = {}, {}
        self.broken = "pushed weights were not checked; push all weights"
        # One look at the GPU: NaN and infinity pass from weights to their scales.
        flat = [scales.reshape(-1) for scales in given.values()]
        if not flat or bool(torch.isfinite(torch.cat(flat)).all()):
            self.broken, self.is_whole = "", True
            return
        wrong = [
            name if isinstance(name, str) else ", ".join(name)
            for name, scales in given.items()
            if not bool(torch.isfinite(scales).all())
        ]
        self.broken = (
            f"{len(wrong)} weights that were pushed hold NaN or infinity, first "
            f"{wrong[0]}; push a sound checkpoint"
        )
        raise RefitError(self.broken)

    @property
    def missing(self) -> list[str]:
        """What an unfinished push has not written yet; empty if there is none."""
        pushed = self._refused.keys() | self._written.keys()
        return sorted(self._parts - pushed) if pushed else []

    def check(self) -> None:
        """Check that the model may generate.

        Raises:
            RefitError: A push failed, or is not complete.
        """
        missing = self.missing
        self._refused |= self._written
        self._written, self._rest = {}, {}
        if self.broken or self.pushing:
            why = self.broken or self.pushing
            raise RefitError(f"the model refuses to generate: {why}")
        if missing:
            raise RefitError(
                "the model refuses to generate: a push of weights wrote "
                f"{len(self._refused)} of {len(self._parts)} FP8 layers, and not "
                f"{missing[0]}; push all weights"
            )
