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
    are of a push and others are not, the model refuses to generate.

    Attributes:
        layers: The layouts of the quantized layers, by their names in the engine.
        broken: Why the model must not generate although all weights came, or "".
        pushing: Why it must not while a push of all weights is going on, or "".
    """

    def __init__(self) -> None:
        self.layers: dict[str, LayerLayout] = {}
        self.broken = ""
        self.pushing = ""
        self._parts: set[str] = set()
        self._stored: dict[str, None] = {}  # at load, or by a push
        self._written: dict[str, None] = {}  # in this order
        self._scales: dict[str, Tensor] = {}

    def __deepcopy__(self, memo: Any) -> "WeightState":
        """A copied config speaks of the same weights."""
        return self

    def add(self, layout: LayerLayout) -> None:
        """Make a layer known."""
        self.layers[layout.name] = layout
        self._parts.update(part.name for part in layout.parts)

    def begin(self, why: str) -> None:
        """Begin a push of all weights: what an earlier one wrote no longer counts.

        Args:
            why: Why the model must not generate until `pushing` is "" again.
        """
        self.pushing = why
        self._written, self._scales = {}, {}

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
        while part.name in self._written:
            del self._written[next(iter(self._written))]
        self._scales[part.name] = scales
        done = self._written if self.is_loaded(part) else self._stored
        done[part.name] = None
        if done.keys() == self._parts:
            with contextlib.suppress(*([RefitError] if later else [])):
                self.settle()

    def wrote_all(self, scales: Mapping[Any, Tensor]) -> None:
        """Note a complete push.

        Args:
            scales: For each layer, its scales; keys are what messages call it.

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
        self._written, self.broken = {}, ""
        if not given:
            return
        # One look at the GPU: NaN and infinity pass from weights to their scales.
        flat = torch.cat([scales.reshape(-1) for scales in given.values()])
        if bool(torch.isfinite(flat).all()):
            return
        wrong = [
            name if isinstance(name, str) else ", ".join(name)
            for name, scales in given.items()
            if not bool(torch.isfinite(scales).all())
        ]
        self.broken = (
            f"{len(wrong)} layers that were pushed hold NaN or infinity, first "
            f"{wrong[0]}; push a sound checkpoint"
        )
        raise RefitError(self.broken)

    @property
    def missing(self) -> list[str]:
        """What an unfinished push has not written yet; empty if there is none."""
        return sorted(self._parts - self._written.keys()) if self._written else []

    def check(self) -> None:
        """Check that the model may generate.

        Raises:
            RefitError: A push failed, or is not complete.
        """
        if self.broken or self.pushing:
            why = self.broken or self.pushing
            raise RefitError(f"the model refuses to generate: {why}")
        if self._written:
            missing = self.missing
            raise RefitError(
                "the model refuses to generate: a push of weights wrote "
                f"{len(self._written)} of {len(self._parts)} FP8 layers, and not "
                f"{missing[0]}; push all weights"
            )
