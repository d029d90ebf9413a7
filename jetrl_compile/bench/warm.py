"""Compile DeepGEMM's kernels for a layer's fused GEMMs, several at once.

One after the other, at their first calls, they take 5 to 14 seconds each.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from jetrl_compile.bench.gemms import RECIPES, operand_flows
from jetrl_compile.bench.models import gemm_sizes
from jetrl_compile.errors import JetRLError
from jetrl_compile.kernels.dispatch import ROLES, GemmShape, get_provider
from jetrl_compile.kernels.warm_up import warm_up

PROVIDER = "deep_gemm"


def gemm_shapes(
    config: Any,
    tokens: Iterable[int],
    recipes: Sequence[str] = RECIPES,
    backward: bool = True,
) -> list[GemmShape]:
    """Return the different GEMMs of a layer, q, k, v and gate, up as one each.

    Args:
        config: Of a Llama-like model.
        tokens: Values of M.
        recipes: Their names.
        backward: Whether dgrad and wgrad are there too.
    """
    found: dict[GemmShape, None] = {}
    for m in tokens:
        for size in gemm_sizes(config):
            for role in ROLES if backward else ROLES[:1]:
                for recipe in recipes:
                    a, b = operand_flows(recipe, role)
                    shape = GemmShape(role, size.n, size.k, a, b, m, device_type="cuda")
                    found[shape] = None
    return list(found)


def compile_ahead(
    shapes: Sequence[GemmShape], device: torch.device, say: Callable[[str], None]
) -> None:
    """Compile what DeepGEMM needs for GEMMs, where it can be used.

    What fails here fails again, with its reason, where it is measured.
    """
    if device.type != "cuda" or get_provider(PROVIDER).usable() is not None:
        return
    try:
        done = warm_up(
            shapes,
            progress=lambda n, of, what: say(f"compiling {n}/{of} {what}"),
            exact_tokens={shape.m for shape in shapes if shape.m is not None},
        )
    except JetRLError as error:
        say(f"DeepGEMM was not warmed up: {error}")
        return
    say(f"{done.compiled} DeepGEMM kernels compiled in {done.seconds:.0f} s")
