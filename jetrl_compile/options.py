"""The options of `torch.compile(model, backend="jetrl", options={...})`."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jetrl_compile.errors import ProviderError, RecipeError
from jetrl_compile.kernels.dispatch import PROVIDERS, get_provider
from jetrl_compile.recipe import PHASES, Recipe, get_recipe

LOWERINGS = ("inductor", "aot")
MODES = ("default", "reduce-overhead")
SAVED_GATE_UP = ("bf16", "e4m3")


@dataclass(frozen=True)
class CompileOptions:
    """What the backend was asked for.

    Attributes:
        recipe: A recipe or its name; default "jetrl".
        phase: "train" (default; also the trainer's forwards without gradient: old
            log-prob, reference) or "rollout".
        lowering: "inductor" (default), or "aot": the passes without Inductor's code
            generation, for quick runs on a CPU.
        providers: Names of GEMM providers, the preferred one first; default None, the
            order of the device of each GEMM (`jetrl doctor` shows it).
        module_path: Path of the compiled module in the whole model, such as
            "model.layers.0": names in graphs and patterns in recipes are whole paths.
            A pattern that matches nothing is an error in the graph of a whole model,
            from embedding to output head; elsewhere the report names it.
        report: Called with each `CompileReport`, or a folder that the precision graphs
            are written to.
        fuse: Whether to merge GEMMs of one input and to fuse quantization into norms
            and activations; default None: where the graph runs on a GPU. Forward has
            the same bits either way if norms and activations have.
        saved_gate_up: What is kept of gate and up for the backward of SiLU * mul:
            "bf16" (default), or "e4m3", which halves it.
        cache_weights: Whether a weight's codes are kept until the weight changes:
            quantized once per optimizer step, for 1 byte (2 with gradients) a
            parameter. Two writes are not seen: into `.data`, and to the shards of
            FSDP2 other than by an optimizer (`load_state_dict`). Call
            `jetrl_compile.forget_weights()` after them. Not under CUDA graphs.
        mode: "default", or "reduce-overhead": the graphs run as CUDA graphs.
        exact: Whether forward gives a token the same bits in every batch, and the same
            as a rollout model that is exact; see docs/exact.md. An operator that
            has no kernel for it is an error.
        recorder: Records values while the graphs run (lowering "aot" only); used by
            the audit.
    """

    recipe: Recipe
    phase: str = "train"
    lowering: str = "inductor"
    providers: tuple[str, ...] | None = None
    module_path: str = ""
    report: Callable[[Any], None] | Path | None = None
    recorder: Any = None
    fuse: bool | None = None
    saved_gate_up: str = "bf16"
    cache_weights: bool = False
    mode: str = "default"
    exact: bool = False


def parse_options(options: Mapping[str, Any] | None) -> CompileOptions:
    """Return the options with defaults filled in.

    Raises:
        RecipeError: An option is unknown or has an impossible value.
        ProviderError: A provider is unknown.
    """
    if not isinstance(options, Mapping | None):
        raise RecipeError(f"options={options!r} is unknown; use a dict of options")
    given = dict(options or {})
    known = [field.name for field in fields(CompileOptions)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise RecipeError(
                f"option {name!r} of the backend jetrl is unknown; {hint}known: "
                f"{', '.join(known)}"
            )
    given["recipe"] = get_recipe(given.get("recipe", "jetrl"))
    if given.get("providers") is not None:
        given["providers"] = _names(given["providers"])
    if isinstance(given.get("report"), str):
        given["report"] = Path(given["report"])
    chosen = CompileOptions(**given)
    report = chosen.report
    for name, good, needed in (
        ("phase", chosen.phase in PHASES, " or ".join(PHASES)),
        ("lowering", chosen.lowering in LOWERINGS, " or ".join(LOWERINGS)),
        ("mode", chosen.mode in MODES, " or ".join(MODES)),
        ("saved_gate_up", chosen.saved_gate_up in SAVED_GATE_UP, "bf16 or e4m3"),
        ("fuse", isinstance(chosen.fuse, bool | None), "True, False or None"),
        ("cache_weights", isinstance(chosen.cache_weights, bool), "True or False"),
        ("exact", chosen.exact in (True, False), "True or False"),
        ("module_path", isinstance(chosen.module_path, str), "a module path"),
        (
            "report",
            report is None or isinstance(report, Path) or callable(report),
            "a folder or a callable",
        ),
    ):
        if not good:
            raise RecipeError(
                f"option {name}={getattr(chosen, name)!r} is unknown; use {needed}"
            )
    if chosen.fuse is False and chosen.saved_gate_up != "bf16":
        raise RecipeError(
            f"option saved_gate_up={chosen.saved_gate_up!r} needs fused kernels; set "
            "fuse=True, or leave it out"
        )
    if chosen.exact and chosen.mode != "default":
        raise RecipeError(
            f"option exact does not go with mode={chosen.mode!r}: attention finds the "
            "sequences of a batch on the CPU; leave mode out"
        )
    if chosen.recorder is not None and chosen.lowering != "aot":
        raise RecipeError(
            "option recorder needs lowering='aot', where the graphs run operator by "
            "operator; Inductor fuses them"
        )
    return chosen


def _names(providers: Any) -> tuple[str, ...]:
    if not isinstance(providers, Iterable):
        raise ProviderError(f"option providers={providers!r} is unknown; use names")
    names = (providers,) if isinstance(providers, str) else tuple(providers)
    for name in names:
        get_provider(name)
    if not names:
        raise ProviderError(
            f"option providers is empty; list at least one of {', '.join(PROVIDERS)}"
        )
    return names
