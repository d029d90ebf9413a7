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
    if settings.exact:
        refuse_inexact(rollout)
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
        RecipeError: They name another recipe, or exact mode where the trainer is not.
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
    exact = own.get("exact", settings.exact)
    if exact != settings.exact:
        raise RecipeError(
            f"{_KWARGS}.additional_config.jetrl.exact is {exact!r}, and the trainer's "
            f"jetrl_exact is {settings.exact!r}; remove it: the trainer's is used"
        )
    if exact:
        own["exact"] = True
    if settings.providers is not None:
        own.setdefault("providers", list(settings.providers))
    kwargs["additional_config"] = {**additional, "jetrl": own}


def refuse_inexact(rollout: Any) -> None:
    """Check that verl's config of a rollout leaves its log-probs exact.

    Args:
        rollout: verl's `RolloutConfig`.

    Raises:
        RecipeError: It does not; all reasons are listed.
    """
    reasons = []
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "data_parallel_size",
    ):
        size = getattr(rollout, name, 1)
        if size > 1:
            reasons.append(f"{name}={size}: a replica of one GPU is exact; use 1")
    if rollout.enforce_eager:
        reasons.append("enforce_eager runs without exact kernels; set it to False")
    if rollout.logprobs_mode != "processed_logprobs":
        reasons.append(
            f"logprobs_mode={rollout.logprobs_mode!r}: log-probs must be of what is "
            "sampled from; use 'processed_logprobs'"
        )
    if rollout.top_p != 1.0 or rollout.top_k not in (-1, 0):
        reasons.append(
            f"top_p={rollout.top_p:g} and top_k={rollout.top_k} cut the distribution "
            "that the trainer learns; use 1.0 and -1"
        )
    if reasons:
        raise RecipeError(
            "jetrl_exact=True cannot hold with this actor_rollout_ref.rollout: "
            + "; ".join(reasons)
        )


def _given(rollout: Any) -> Mapping[str, Any]:
    kwargs: Any = getattr(rollout, "engine_kwargs", None) or {}
    given: Mapping[str, Any] = kwargs.get("vllm") or {}
    return given
