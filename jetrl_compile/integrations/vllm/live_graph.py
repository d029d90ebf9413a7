"""The precision graph of a live vLLM model: of the operators that it runs.

Dynamo traces the loaded model as vLLM's compilation does, with the implementations that
the engine chose, and the pass of the engine runs on the graph. What the pass did while
vLLM compiled is compared with it, piece by piece; where a compile cache held a piece,
the cache's key says that it was made by the same pass from the same graph.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from jetrl_compile.capture import PlaceholderInfo, canonical_path
from jetrl_compile.captured_graph import CapturedGraph
from jetrl_compile.errors import LoweringError, ModelError, one_line
from jetrl_compile.graph_inputs import match_placeholders, placeholder_infos
from jetrl_compile.integrations.vllm.compile_pass import capture_graph, run_passes
from jetrl_compile.integrations.vllm.settings import Settings
from jetrl_compile.integrations.vllm.sharding import WholeShapes
from jetrl_compile.integrations.vllm.spelling import functionalize_norms
from jetrl_compile.pipeline import CompileReport
from jetrl_compile.precision_graph import PrecisionGraph

META = "compared_pieces"  # 0: eager, or all came from a compile cache
TOKENS = 8  # of the trace; the number of tokens is symbolic


@dataclass(frozen=True)
class LiveGraph:
    """The graph of a live model.

    Attributes:
        graph: Its precision graph, the output head included.
        captured: The graph before the pass, as data.
        compared: How many compiled pieces were compared with it.
        changes: What the pass changed.
    """

    graph: PrecisionGraph
    captured: CapturedGraph
    compared: int
    changes: Mapping[str, int]


class _StopError(Exception):
    """The graph is known: nothing needs to run."""


def trace_live(
    model: nn.Module,
    settings: Settings,
    *,
    fused: bool,
    reports: Sequence[CompileReport] = (),
    attributes: Mapping[str, Mapping[str, Any]] | None = None,
    head: bool = True,
    meta: Mapping[str, str] | None = None,
    whole: WholeShapes | None = None,
) -> LiveGraph:
    """Return the precision graph of a loaded model of vLLM's.

    Args:
        model: The loaded model.
        settings: Of the engine.
        fused: Whether the engine compiles, so that the pass runs on its graphs.
        reports: What the pass did while the engine compiled.
        attributes: What the engine knows of opaque operators, by module.
        head: Whether the output head is traced, too.
        meta: More entries for the graph's `meta`.
        whole: N and K of whole layers by module, for one rank of several.

    Raises:
        ModelError: Dynamo cannot trace the model as one graph.
        LoweringError: A compiled piece is not as the graph says.
    """
    found: list[LiveGraph] = []

    def read(
        lowered: GraphModule,
        known: Mapping[str, PlaceholderInfo],
        outside: frozenset[str],
    ) -> Any:
        captured = capture_graph(lowered.graph, known, attributes)
        report = run_passes(
            lowered.graph,
            settings if fused else replace(settings, fuse=False),
            known,
            attributes,
            meta or {},
            spell=fused,
            strict=False,
            whole=whole,
            outside=outside,
        )
        found.append(LiveGraph(report.graph, captured, 0, report.changes))
        raise _StopError

    _trace(model, live_backend(read, fused), head)
    if not found:
        raise ModelError(
            f"{type(model).__name__} ran without being traced, so nothing is known of "
            "its graph; unset TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE"
        )
    live = found[0]
    compared = compare_pieces(live.graph, reports)
    said = {**live.graph.meta, META: str(compared)}
    return replace(live, graph=replace(live.graph, meta=said), compared=compared)


def live_backend(
    use: Callable[[GraphModule, Mapping[str, PlaceholderInfo], frozenset[str]], Any],
    fused: bool = True,
) -> Callable[[GraphModule, Sequence[Any]], Any]:
    """Return a backend of `torch.compile` for a loaded model with its output head.

    Args:
        use: Called with the functional inference graph, what is known of its inputs,
            and the modules that vLLM runs outside of what it compiles; returns what
            runs.
        fused: Whether the engine's norms are vLLM IR, as its pass finds them.
    """

    def compile_graph(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        if fused:
            functionalize_norms(gm)
        outside = _name_head(gm)
        infos = placeholder_infos(gm, inputs, "")
        shapes = [getattr(value, "shape", None) for value in inputs]

        def inference(lowered: GraphModule, _: Sequence[Any]) -> Any:
            known = match_placeholders(lowered.graph, infos, shapes)
            return use(lowered, known, outside)

        return _to_aten(gm, inputs, inference)

    return compile_graph


def _name_head(gm: GraphModule) -> frozenset[str]:
    """Say that the logits are made by the output head, which may share its weight.

    Returns:
        The head's path: vLLM computes logits outside of what it compiles, so that no
        pass changes how.
    """
    found = set()
    for node in gm.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if not stack:
            continue
        key = next(reversed(stack))
        path, kind = stack[key]
        name = kind if isinstance(kind, str) else kind.__name__
        if name.rpartition(".")[2] == "LogitsProcessor":
            base = path.replace("logits_processor", "lm_head")
            node.meta["nn_module_stack"] = {**stack, key: (base, kind)}
            found.add(canonical_path(base))
    return frozenset(found)


def _to_aten(
    gm: GraphModule, inputs: Sequence[Any], inference: Callable[..., Any]
) -> Any:
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    compile_graph = aot_autograd(
        fw_compiler=inference,
        inference_compiler=inference,
        decompositions=select_decomp_table(),
    )
    return compile_graph(gm, inputs)


def _trace(model: nn.Module, compile_graph: Callable[..., Any], head: bool) -> None:
    def forward(self: Any, ids: Tensor, positions: Tensor) -> Any:
        hidden = self(ids, positions)
        return self.compute_logits(hidden) if head else hidden

    device = next(model.parameters()).device
    ids = torch.zeros(TOKENS, dtype=torch.int32, device=device)
    positions = torch.arange(TOKENS, dtype=torch.int64, device=device)
    torch._dynamo.mark_dynamic(ids, 0)
    torch._dynamo.mark_dynamic(positions, 0)
    with fresh_dynamo(), torch.no_grad():
        try:
            torch.compile(forward, backend=compile_graph, fullgraph=True)(
                model, ids, positions
            )
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, _StopError):
                raise error.inner_exception from None
        except _StopError:
            pass
        except torch._dynamo.exc.Unsupported as error:
            raise ModelError(
                f"{type(model).__name__} cannot be traced as one graph: "
                f"{one_line(error)}"
            ) from None


@contextlib.contextmanager
def fresh_dynamo() -> Iterator[None]:
    """Trace without a limit on recompiles, and leave vLLM's compiled code alone."""
    with torch._dynamo.config.patch(recompile_limit=64, specialize_float=True):
        yield


def compare_pieces(
    graph: PrecisionGraph, reports: Sequence[CompileReport], prefix: str = "model"
) -> int:
    """Compare the compiled pieces of a model with its graph; return how many.

    vLLM compiles each kind of piece once: a piece's operators are those of the first
    layer that has them.

    Args:
        graph: Of the whole model.
        reports: What the pass did to each piece that was compiled.
        prefix: Path of the compiled module in the model.

    Raises:
        LoweringError: A GEMM or a norm of a piece is not as the graph says.
    """
    for report in reports:
        for op in report.graph.operators:
            if op.kind not in ("gemm", "norm", "activation"):
                continue
            name = op.name if report.module else f"{prefix}.{op.name}"
            wanted = graph.by_name.get(name)
            edges = graph.operands.get(name, {})
            own = report.graph.operands[op.name]
            same = wanted is not None and all(
                getattr(op, key) == getattr(wanted, key)
                for key in ("kind", "role", "compute_dtype", "provider")
            )
            if not same or any(
                own[key].flow != edge.flow for key, edge in edges.items() if key in own
            ):
                raise LoweringError(
                    f"{name} was compiled as '{op}', and the model was traced as "
                    f"'{wanted}'; this is a fault of the integration, please report it"
                )
    return len(reports)
