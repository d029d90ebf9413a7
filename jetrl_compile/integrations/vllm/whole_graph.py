"""The backend of `CompilationConfig(mode=2, backend="jetrl")`: the model is one graph.

Weights have their names, attention is one operator among the others, and vLLM captures
full CUDA graphs of decode steps around it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule

from jetrl_compile.capture import PlaceholderInfo
from jetrl_compile.errors import LoweringError
from jetrl_compile.graph_inputs import match_placeholders, placeholder_infos
from jetrl_compile.integrations.vllm.compile_pass import (
    HOOK,
    identity,
    run_passes,
)
from jetrl_compile.integrations.vllm.settings import Reports, Settings
from jetrl_compile.integrations.vllm.spelling import functionalize_norms


@dataclass
class _Prepared:
    settings: Settings
    reports: Reports


_PREPARED: list[
    _Prepared
] = []  # of the engine that is being made; vLLM has no argument


def prepare(settings: Settings, reports: Reports) -> None:
    """Say what the next graph is compiled with."""
    _PREPARED[:] = [_Prepared(settings, reports)]


class WholeGraphPass(CustomGraphPass):
    """The passes over the inference graph of a whole model."""

    def __init__(
        self,
        settings: Settings,
        reports: Reports,
        infos: Sequence[PlaceholderInfo],
        shapes: Sequence[Any],
    ) -> None:
        self.settings = settings
        self.reports = reports
        self.infos = infos
        self.shapes = shapes

    def __call__(self, graph: Graph) -> None:
        """Rewrite the graph in place."""
        placeholders = match_placeholders(graph, self.infos, self.shapes)
        self.reports.append(run_passes(graph, self.settings, placeholders))

    def uuid(self) -> Any:
        """Identify the pass for compile caches."""
        return identity(self.settings), repr(self.infos)


def backend(gm: GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """Compile Dynamo's graph of a model of vLLM's.

    Raises:
        LoweringError: No engine with quantization "jetrl" was made.
    """
    if not _PREPARED:
        raise LoweringError(
            "mode 2 with backend='jetrl' compiles models with quantization='jetrl'; "
            "give LLM both"
        )
    from torch._inductor.compile_fx import compile_fx

    prepared = _PREPARED[0]
    functionalize_norms(gm)
    infos = placeholder_infos(gm, inputs, "")
    shapes = [getattr(value, "shape", None) for value in inputs]
    hook = WholeGraphPass(prepared.settings, prepared.reports, infos, shapes)
    compile_graph: Any = compile_fx
    compiled: Callable[..., Any] = compile_graph(
        gm, list(inputs), config_patches={HOOK: hook}
    )
    return compiled
