"""One FP8 precision flow for training forward passes and rollouts.

The names below are loaded when they are first used, so that `import jetrl_compile` and
the `jetrl` command start without torch.

`jetrl_compile.precision_graph` is the module that defines the graph. What makes a graph
is `trace_model`, for a model in memory, and `trace_config`, for a Hugging Face config:
a function of the module's name would be replaced by the module on its first import.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "CompileOptions": "options",
    "CompileReport": "pipeline",
    "ContainmentReport": "containment_report",
    "GemmFlows": "recipe",
    "GraphFormatError": "errors",
    "JetRLError": "errors",
    "LoweringError": "errors",
    "MetricsError": "errors",
    "ModelError": "errors",
    "OutputError": "errors",
    "PrecisionFlowError": "errors",
    "PrecisionGraph": "precision_graph",
    "ProviderError": "errors",
    "Recipe": "recipe",
    "RecipeError": "errors",
    "RecompileLimitWarning": "recompile_limit",
    "RefitError": "errors",
    "check_containment": "containment",
    "check_phases": "report_sink",
    "forget_weights": "kernels.weight_ops",
    "collect_reports": "report_sink",
    "get_recipe": "recipe",
    "read_graph": "graph_json",
    "recipe_names": "recipe",
    "register_recipe": "recipe",
    "trace_config": "tracing",
    "trace_model": "tracing",
    "write_graph": "graph_json",
}
__all__ = tuple(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted((*globals(), *_HOMES))
