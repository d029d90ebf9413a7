"""Which GEMMs a model runs, from its precision graph: for warm-up and benchmarks."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from jetrl_compile.formats import Flow
from jetrl_compile.kernels.dispatch import ROLES, GemmShape
from jetrl_compile.precision_graph import Operator, PrecisionGraph
from jetrl_compile.recipe import Recipe
from jetrl_compile.tracing import Progress, trace_config

BLOCK = 128


def shapes_of_config(
    config_dir: Path | str | Any,
    tokens: Iterable[int],
    *,
    recipe: str | Recipe = "jetrl",
    backward: bool = True,
    progress: Progress | None = None,
) -> tuple[GemmShape, ...]:
    """Return the FP8 GEMMs of the model that a Hugging Face config describes.

    Args:
        config_dir: A folder with a `config.json`, or a config object.
        tokens: Numbers of tokens.
        recipe: A recipe or its name.
        backward: Whether dgrad and wgrad are wanted too.
        progress: Called with a line before each step.

    Raises:
        ModelError: As `tracing.trace_config`.
        RecipeError: As `tracing.trace_config`.
    """
    phase = "train" if backward else "rollout"
    graph = trace_config(config_dir, phase=phase, recipe=recipe, progress=progress)
    return shapes_of_graph(graph, tokens, backward=backward)


def shapes_of_graph(
    graph: PrecisionGraph, tokens: Iterable[int], *, backward: bool = True
) -> tuple[GemmShape, ...]:
    """Return the different FP8 GEMMs of a graph on a GPU, each alone and fused.

    Layers that read one tensor (q, k, v; gate, up) may run as one GEMM, whose N is the
    sum of theirs: along N in fprop and wgrad, along the contraction in dgrad.

    Args:
        graph: A precision graph.
        tokens: Numbers of tokens.
        backward: Whether dgrad and wgrad are wanted too.
    """
    roles = ROLES if backward else ("fprop",)
    found: dict[GemmShape, None] = {}
    for siblings in _siblings(graph):
        for module, n, k in (*siblings, *_fused(siblings)):
            for role in roles:
                operator = graph.by_name.get(f"{module}:{role}")
                if operator is not None and graph.is_fp8(operator):
                    a, b = _flows(graph, operator)
                    found[GemmShape(role, n, k, a, b, device_type="cuda")] = None
    counts = sorted(set(tokens))
    return tuple(replace(shape, m=m) for shape in found for m in counts)


def heads_of_graph(
    graph: PrecisionGraph, tokens: Iterable[int]
) -> list[tuple[int, int, int]]:
    """Return M, N and K of the forward GEMMs that are not FP8: the output head.

    Args:
        graph: A precision graph.
        tokens: Numbers of tokens.
    """
    kept = [op for op in graph.gemms("fprop") if not graph.is_fp8(op)]
    sizes = {(int(dict(op.params)["N"]), int(dict(op.params)["K"])) for op in kept}
    return [(m, n, k) for n, k in sorted(sizes) for m in sorted(set(tokens))]


_Layer = tuple[str, int, int]  # module path, N, K


def _siblings(graph: PrecisionGraph) -> list[list[_Layer]]:
    """Return the FP8 layers, those that read one tensor together."""
    groups: dict[str, list[_Layer]] = {}
    for operator in graph.gemms("fprop"):
        if graph.is_fp8(operator):
            params = dict(operator.params)
            layer = (operator.module, int(params["N"]), int(params["K"]))
            source = graph.operands[operator.name]["x"].source
            groups.setdefault(source, []).append(layer)
    return list(groups.values())


def _fused(siblings: list[_Layer]) -> list[_Layer]:
    """Return siblings as one layer, where no block of 128 rows is of two of them."""
    if len(siblings) < 2 or any(n % BLOCK for _, n, _ in siblings[:-1]):
        return []
    module, _, k = siblings[0]
    return [(module, sum(n for _, n, _ in siblings), k)]


def _flows(graph: PrecisionGraph, operator: Operator) -> tuple[Flow, Flow]:
    role = operator.role
    flows = {key: edge.flow for key, edge in graph.operands[operator.name].items()}
    a = flows["x" if role == "fprop" else "dy"]
    b = flows["x" if role == "wgrad" else "w"]
    return a.saved_as(None), b.saved_as(None)
