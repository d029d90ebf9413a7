"""Say it when Dynamo's recompile limit is about to run a module in high precision.

Past the limit Dynamo runs a function eagerly, without a word unless it was compiled
with `fullgraph=True`. All modules that share a `forward` share its limit.
"""

import warnings
from collections.abc import Sequence

import torch
from torch._guards import CompileContext

from jetrl_compile.capture import PlaceholderInfo


class RecompileLimitWarning(UserWarning):
    """The next recompilation would run a module eagerly, without FP8."""


def warn_before_the_limit(infos: Sequence[PlaceholderInfo], module_path: str) -> None:
    """Warn where this is the last compilation that Dynamo allows.

    Args:
        infos: What is known of the graph's inputs.
        module_path: The option of that name, for the message.
    """
    compiled, fullgraph = _compiled_before()
    config = torch._dynamo.config
    limit = min(config.recompile_limit, config.accumulated_recompile_limit)
    if fullgraph or compiled + 1 < limit:
        return
    paths = [info.path for info in infos if info.kind == "parameter"]
    name = module_path or _common_parent(paths) or "a module"
    warnings.warn(
        f"{name} was compiled {compiled + 1} times and "
        f"torch._dynamo.config.recompile_limit is {limit}: the next recompilation runs "
        "it eagerly, without FP8; compile with fullgraph=True (an error instead) and "
        "dynamic=True, or raise the limit",
        RecompileLimitWarning,
        stacklevel=2,
    )


def _compiled_before() -> tuple[int, bool]:
    """How often the function at hand was compiled, and whether as one graph.

    Dynamo's cache entries are what it counts, less those of models that are gone. Where
    a version of torch does not show them, the number of compilations stands for them.
    """
    compile_id = CompileContext.current_compile_id()
    count = getattr(compile_id, "frame_compile_id", None) or 0
    try:
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list
        from torch._dynamo.symbolic_convert import InstructionTranslator

        root = InstructionTranslator.current_tx().output.root_tx
        return len(_debug_get_cache_entry_list(root.f_code)), bool(root.one_graph)
    except (ImportError, AttributeError, TypeError):
        return count, False


def _common_parent(paths: Sequence[str]) -> str:
    """The innermost module that holds all parameters."""
    split = [path.split(".")[:-1] for path in paths]
    shared = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
