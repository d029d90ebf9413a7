"""What a user sets in verl's config: `actor_rollout_ref.model.override_config.jetrl_*`.

verl hands that part of its config to every worker, and sets each key on the Hugging
Face config; the keys are taken off it again, so that checkpoints do not hold them.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jetrl_compile.errors import RecipeError
from jetrl_compile.exact_attention import NAME as EXACT_ATTENTION
from jetrl_compile.options import LOWERINGS
from jetrl_compile.recipe import Recipe, get_recipe

PREFIX = "jetrl_"
LEVELS = (0, 1, 2, 3)
ON_VIOLATION = ("stop", "warn")
WIRES = ("bf16", "fp8")


@dataclass(frozen=True)
class Settings:
    """The settings of one worker.

    Attributes:
        recipe: The recipe of trainer and rollout, or its name.
        level: The highest level of containment that is checked: 1 and 2 before the
            first step, 3 after each weight sync; 0 checks nothing.
        on_violation: "stop" ends the run with an error, "warn" prints it.
        reports: The folder that reports are written to; None: nowhere.
        lowering: As of the backend "jetrl".
        providers: GEMM providers, the preferred one first; None: by device.
        cache_weights: As of the backend "jetrl".
        wire: How the weights of FP8 layers travel to rollouts: rounded to "bf16", or
            "fp8", as codes and scales.
        exact: Whether a token has the same log-prob, bit for bit, in the rollout and in
            the trainer's forward.
        resident_reference: Whether a reference model's parameters stay on the GPU,
            whatever verl's offload settings; verl keeps them on the host, and copies
            them for every micro-batch.
    """

    recipe: Recipe
    level: int = 3
    on_violation: str = "stop"
    reports: Path | None = None
    lowering: str = "inductor"
    providers: tuple[str, ...] | None = None
    cache_weights: bool = False
    wire: str = "bf16"
    exact: bool = False
    resident_reference: bool = False

    @property
    def backend_options(self) -> dict[str, Any]:
        """The options for `compile_layers`."""
        return {
            "recipe": self.recipe,
            "lowering": self.lowering,
            "providers": self.providers,
            "cache_weights": self.cache_weights,
            "exact": self.exact,
        }


def read_settings(override_config: Mapping[str, Any] | None) -> Settings:
    """Return the settings in verl's `override_config`.

    Args:
        override_config: `actor_rollout_ref.model.override_config`; keys that do not
            begin with "jetrl" are Hugging Face's.

    Raises:
        RecipeError: A setting or a value is unknown, or two contradict each other.
    """
    names = [field.name for field in fields(Settings)]
    given: dict[str, Any] = {}
    for key, value in dict(override_config or {}).items():
        if not str(key).startswith(PREFIX.rstrip("_")):
            continue
        name = str(key).removeprefix(PREFIX)
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {PREFIX}{near[0]}? " if near else ""
            known = ", ".join(f"{PREFIX}{each}" for each in names)
            raise RecipeError(
                f"setting {key!r} in override_config is unknown; {hint}known: {known}"
            )
        given[name] = value
    given["recipe"] = get_recipe(given.get("recipe", "jetrl"))
    if isinstance(given.get("providers"), str):
        given["providers"] = (given["providers"],)
    elif given.get("providers") is not None:
        given["providers"] = tuple(given["providers"])
    if given.get("reports") is not None:
        given["reports"] = Path(given["reports"])
    chosen = Settings(**given)
    for name, good, needed in (
        ("level", chosen.level in LEVELS, "0, 1, 2 or 3"),
        (
            "on_violation",
            chosen.on_violation in ON_VIOLATION,
            " or ".join(ON_VIOLATION),
        ),
        ("lowering", chosen.lowering in LOWERINGS, " or ".join(LOWERINGS)),
        ("wire", chosen.wire in WIRES, " or ".join(WIRES)),
        ("cache_weights", chosen.cache_weights in (True, False), "True or False"),
        ("exact", isinstance(chosen.exact, bool), "True or False"),
        (
            "resident_reference",
            isinstance(chosen.resident_reference, bool),
            "True or False",
        ),
    ):
        if not good:
            raise RecipeError(
                f"setting {PREFIX}{name}={getattr(chosen, name)!r} is unknown; use "
                f"{needed}"
            )
    if chosen.exact:
        _check_exact(chosen, (override_config or {}).get("attn_implementation"))
    return chosen


def _check_exact(chosen: Settings, attention: Any) -> None:
    """Check that nothing else that is set contradicts exact mode."""
    recipe = chosen.recipe
    if not (recipe.train and recipe.rollout):
        raise RecipeError(
            f"{PREFIX}exact=True does not go with recipe {recipe.name!r}, which does "
            "not quantize both sides; use jetrl or jetrl_paper"
        )
    if chosen.level == 0:
        raise RecipeError(
            f"{PREFIX}exact=True does not go with {PREFIX}level=0: levels 1 and 2 show "
            f"that both sides run the same kernels; set {PREFIX}level to 2 or 3"
        )
    if attention not in (None, EXACT_ATTENTION):
        raise RecipeError(
            f"{PREFIX}exact=True does not go with attn_implementation={attention!r}, "
            f"which has no exact kernel; remove it, or set it to {EXACT_ATTENTION!r}"
        )


def take_off(config: Any) -> None:
    """Remove the settings from a Hugging Face config, where verl has put them."""
    for name in [key for key in vars(config) if key.startswith(PREFIX)]:
        delattr(config, name)
