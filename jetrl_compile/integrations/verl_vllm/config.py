"""How vLLM is set up for a recipe, from verl's config of a rollout."""

from collections.abc import Mapping
from typing import Any

from jetrl_compile.errors import RecipeError
from jetrl_compile.integrations.verl.settings import Settings

NAME = "jetrl"  # of vLLM's quantization
_KWARGS = "actor_rollout_ref.rollout.engine_kwargs.vllm"


def runs_jetrl(rollout: Any, settings: Settings) -> bool:
    """Return whether rollouts run this package's quantization: a recipe with FP8 ones.

    Args:
        rollout: verl's `RolloutConfig`.
        settings: Of the trainer.

    Raises:
        RecipeError: The rollout's config asks for something else than the recipe.
    """
    given = _given(rollout).get("quantization")
    theirs = getattr(rollout, "quantization", None)
    wanted = settings.recipe.rollout
    if wanted and theirs is not None:
        raise RecipeError(
            f"rollout.quantization is {theirs!r}, and recipe "
            f"{settings.recipe.name!r} quantizes rollouts itself; remove one of them"
        )
    if wanted and given not in (None, NAME):
        raise RecipeError(
            f"{_KWARGS}.quantization is {given!r}, and recipe "
            f"{settings.recipe.name!r} needs {NAME!r}; remove it"
        )
    return wanted or given == NAME


def set_defaults(kwargs: dict[str, Any], settings: Settings) -> None:
    """Complete vLLM's arguments with the trainer's recipe and providers, in place.

    Args:
        kwargs: `engine_kwargs.vllm`.
        settings: Of the trainer.

    Raises:
        RecipeError: They name another recipe.
    """
    kwargs["quantization"] = NAME
    additional = dict(kwargs.get("additional_config") or {})
    own = dict(additional.get("jetrl") or {})
    recipe = own.setdefault("recipe", settings.recipe.name)
    if recipe != settings.recipe.name:
        raise RecipeError(
            f"{_KWARGS}.additional_config.jetrl.recipe is {recipe!r}, and the "
            f"trainer's recipe is {settings.recipe.name!r}; remove it: the trainer's "
            "is used"
        )
    if settings.providers is not None:
        own.setdefault("providers", list(settings.providers))
    kwargs["additional_config"] = {**additional, "jetrl": own}


def _given(rollout: Any) -> Mapping[str, Any]:
    kwargs: Any = getattr(rollout, "engine_kwargs", None) or {}
    given: Mapping[str, Any] = kwargs.get("vllm") or {}
    return given
