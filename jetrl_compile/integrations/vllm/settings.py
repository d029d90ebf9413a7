"""What a user may set: `additional_config={"jetrl": {...}}` of vLLM's LLM."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jetrl_compile.errors import ModelError, RecipeError
from jetrl_compile.kernels.dispatch import get_provider
from jetrl_compile.recipe import Recipe, get_recipe

KEYS = ("recipe", "providers", "fuse", "exact")


class Reports(list[Any]):
    """What the passes did; a copied config or pass writes to the same list."""

    def __deepcopy__(self, memo: Any) -> "Reports":
        return self


@dataclass(frozen=True)
class Settings:
    """The settings of one engine.

    Attributes:
        recipe: The recipe.
        providers: GEMM providers, the preferred one first; None: by device.
        fuse: Whether the quantizers are fused into norms and activations.
        exact: Whether a token has the same bits in every batch, and in the trainer.
        dummy: Whether the engine fills its weights with random numbers.
    """

    recipe: Recipe
    providers: tuple[str, ...] | None = None
    fuse: bool = True
    exact: bool = False
    dummy: bool = False


def read_settings(given: Mapping[str, Any], engine: Any) -> Settings:
    """Return the settings of an engine.

    Args:
        given: From the checkpoint; what the user says comes before it.
        engine: vLLM's config.

    Raises:
        RecipeError: A setting is unknown.
        ProviderError: A provider is unknown.
        ModelError: The engine runs in a way that has no checked flow.
    """
    check_supported(engine)
    additional = getattr(engine, "additional_config", None)
    own = additional.get("jetrl", {}) if isinstance(additional, Mapping) else {}
    chosen = {**given, **own}
    for key in chosen:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise RecipeError(
                f"setting {key!r} of quantization 'jetrl' is unknown; {hint}known: "
                f"{', '.join(KEYS)}"
            )
    for key in ("fuse", "exact"):
        if not isinstance(chosen.get(key, False), bool):
            raise RecipeError(
                f"setting {key}={chosen[key]!r} is unknown; use true or false, no text"
            )
    names = chosen.get("providers")
    if names is not None:
        names = (names,) if isinstance(names, str) else tuple(names)
        for name in names:
            get_provider(name)
    return Settings(
        recipe=get_recipe(chosen.get("recipe", "jetrl")),
        providers=names,
        fuse=bool(chosen.get("fuse", True)),
        exact=bool(chosen.get("exact", False)),
        dummy=str(getattr(engine.load_config, "load_format", "")) == "dummy",
    )


def check_supported(engine: Any) -> None:
    """Refuse an engine whose flow or weights could not be checked.

    Args:
        engine: vLLM's config.

    Raises:
        ModelError: It has LoRA adapters, or stages of a pipeline.
    """
    if getattr(engine, "lora_config", None) is not None:
        raise ModelError(
            "enable_lora: adapters are BF16 products beside the FP8 layers, which the "
            "trainer's graph does not have; merge them into the weights, and push those"
        )
    parallel = getattr(engine, "parallel_config", None)
    stages = getattr(parallel, "pipeline_parallel_size", 1)
    if stages != 1:
        raise ModelError(
            f"pipeline_parallel_size={stages}: no stage has the whole graph, and one "
            "that refuses to generate would leave the others waiting; use "
            "tensor_parallel_size"
        )
