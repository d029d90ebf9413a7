"""What each operator of a live vLLM engine and of its trainer computed, in exact mode.

vLLM's compiled graphs show no values between two attentions. So attention is recorded
while the engine samples, and the rest of its graph runs again on the same tokens: the
graph after the engine's own passes, operator by operator, with the recorded results in
the place of attention. In exact mode that has the bits of what the engine computed.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from jetrl_compile.capture import canonical_path, op_name
from jetrl_compile.integrations.vllm.compile_pass import run_passes
from jetrl_compile.integrations.vllm.graph_reading import EngineContext
from jetrl_compile.integrations.vllm.live_graph import fresh_dynamo, live_backend
from jetrl_compile.integrations.vllm.live_model import (
    attention_facts,
    config_of,
    head_shapes,
    parts_of,
)
from jetrl_compile.pipeline import CompileReport
from jetrl_compile.precision_graph import PrecisionGraph
from jetrl_compile.recorder import Recorder

# Attention by its module's path: of q, k, v, each (T, heads, D), (T, heads, D).
Attend = Callable[[str, Tensor, Tensor, Tensor], Tensor]
ATTENTION = "vllm.unified_attention_with_output"
CACHE_UPDATE = "vllm.unified_kv_cache_update"


@dataclass(frozen=True)
class Run:
    """What one side computed for one sequence.

    Attributes:
        logits: (T, V), BF16.
        values: By operator; its result for all T tokens.
        graph: The precision graph that ran.
    """

    logits: Tensor
    values: Mapping[str, Tensor]
    graph: PrecisionGraph


@contextmanager
def recorded_attention(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Record what an engine's attentions return within the body.

    One sequence at a time, and no CUDA graph may hold attention: then its rows are the
    sequence's tokens in order.

    Args:
        model: Of vLLM's.

    Yields:
        By module: the results of its calls, (tokens, Hq, D) each.
    """
    found: dict[str, list[Tensor]] = {}

    def record(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(forward)

        def run(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            metadata = given["attn_metadata"]
            if metadata is not None:  # else vLLM measures memory
                rows = given["output"][: metadata.num_actual_tokens]
                found.setdefault(name, []).append(rows.clone())
            return result

        return run

    with ExitStack() as changed:
        for name in attention_facts(model):
            layer: Any = model.get_submodule(name)
            own = record(name, layer.impl.forward)
            changed.enter_context(mock.patch.object(layer.impl, "forward", own))
        yield found


class _Replay(Interpreter):
    """Runs an engine's graph; records operators, and asks for attention."""

    def __init__(
        self, module: GraphModule, names: Mapping[str, list[str]], attend: Attend
    ) -> None:
        super().__init__(module)
        self.names, self.attend = names, attend
        self.values: dict[str, Tensor] = {}

    def run_node(self, n: Node) -> Any:
        """Run a node; keep its value if an operator ends there."""
        target = _called(n)
        if target == ATTENTION:
            result = self._attention(n)
        elif target == CACHE_UPDATE:
            result = torch.empty(0)  # what follows waits for it, and reads nothing
        else:
            result = super().run_node(n)
        for operator in self.names.get(n.name, ()):
            made = result if isinstance(result, (tuple, list)) else (result,)
            value = next((one for one in made if isinstance(one, Tensor)), None)
            if value is not None:
                self.values.setdefault(operator, value.detach().clone())
        return result

    def _attention(self, node: Node) -> Any:
        stack = node.meta["nn_module_stack"]
        module = canonical_path(next(reversed(stack.values()))[0])
        given: Any = self.map_nodes_to_values(node.kwargs, node)
        out = self.attend(module, *(given[key] for key in ("query", "key", "value")))
        made: Any = node.meta["val"]
        return tuple(
            out.reshape(-1, *one.shape[1:]) if isinstance(one, Tensor) else one
            for one in made
        )


def _called(node: Node) -> str:
    """The operator that a node calls, also inside of `auto_functionalized`."""
    if node.op != "call_function":
        return ""
    name = op_name(node.target)
    if "auto_functionalized" in name and node.args:
        return op_name(node.args[0])
    return name


def torch_wrap(fused: bool) -> AbstractContextManager[Any]:
    """Return what lets vLLM IR be traced as the engine compiled it."""
    import vllm.ir

    wrapped: AbstractContextManager[Any] = vllm.ir.enable_torch_wrap(fused)
    return wrapped


def replay(model: nn.Module, ids: Tensor, attend: Attend) -> Run:
    """Run a loaded model's graph on one sequence, operator by operator.

    Args:
        model: Of vLLM's, in exact mode.
        ids: (T,), int32, on the model's device.
        attend: Gives attention's results.
    """
    config = config_of(model)
    settings = replace(config.settings(), fuse=False)
    facts, whole = attention_facts(model), head_shapes(model) or None
    runs: list[tuple[_Replay, PrecisionGraph]] = []

    def use(lowered: GraphModule, known: Any, outside: frozenset[str]) -> Any:
        graph = lowered.graph
        more: dict[str, Any] = {"strict": False, "whole": whole, "outside": outside}
        run_passes(graph, settings, known, facts, **more)
        lowered.recompile()
        context = EngineContext(
            graph, known, settings.recipe, "rollout", settings.providers
        )
        context.attributes, context.whole = facts, whole
        names: dict[str, list[str]] = {}
        for operator, node in context.built.node_of.items():
            if context.built.graph.by_name[operator].kind != "parameter":
                names.setdefault(node, []).append(operator)
        assert context.nodes[-1].graph is graph, "each operator has a value"
        runs.append((_Replay(lowered, names, attend), context.built.graph))
        return runs[-1][0].run

    def forward(self: Any, ids: Tensor, positions: Tensor) -> Any:
        return self.compute_logits(self(ids, positions))

    positions = torch.arange(len(ids), device=ids.device)
    with fresh_dynamo(), torch_wrap(config.fused), torch.no_grad():
        backend: Any = live_backend(use)
        compiled = torch.compile(forward, backend=backend, fullgraph=True)
        logits: Tensor = compiled(model, ids, positions)
    (found,) = runs
    return Run(logits, _own_columns(model, found[0].values), found[1])


def _own_columns(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cut what a GEMM of several layers, or of a padded vocabulary, made for others."""
    columns = {
        name: slice(part.low, part.low + part.rows)
        for name, (_, part) in parts_of(model).items()
    }
    columns |= {name: slice(rows) for name, (rows, _) in head_shapes(model).items()}
    kinds = ("fprop", "bias_add")
    own = {f"{name}:{kind}": columns[name] for name in columns for kind in kinds}
    whole = slice(None)
    return {name: value[..., own.get(name, whole)] for name, value in values.items()}


def run_trainer(trainer: nn.Module, ids: Tensor) -> Run:
    """Run a trainer's model on one sequence in exact mode, operator by operator.

    What has no exact kernel runs as it is, and is named in the graph.

    Args:
        trainer: A Hugging Face causal model.
        ids: (T,), on the model's device.
    """
    recorder = Recorder()
    reports: list[CompileReport] = []
    options = {
        "exact": True,
        "lowering": "aot",
        "fuse": False,  # so that each operator has a value
        "recorder": recorder,
        "report": reports.append,
    }
    torch._dynamo.reset()
    called: Any = torch.compile(
        trainer, backend="jetrl", fullgraph=True, options=options
    )
    config: Any = torch._dynamo.config
    try:
        with config.patch(specialize_float=True), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
            logits = called(input_ids=ids[None].long(), use_cache=False).logits
    finally:
        torch._dynamo.reset()
    return Run(logits[0].detach(), dict(recorder.values), reports[0].graph)


def parting(engine: Run, trainer: Run, token: int) -> str:
    """Return the first operator whose value for a token differs in bits; "" if none.

    Args:
        engine: Its values.
        trainer: Its values, and the order of operators.
        token: Of the sequence.
    """
    length = len(engine.logits)
    for op in trainer.graph.operators:
        if op.phase != "forward" or op.name not in trainer.values:
            continue
        if op.name not in engine.values:
            continue
        left, right = (
            _of_token(run.values[op.name], length, token) for run in (engine, trainer)
        )
        if left is None or right is None or left.numel() != right.numel():
            continue
        if left.dtype != right.dtype or not torch.equal(left, right):
            return op.name
    return ""


def _of_token(value: Tensor, length: int, token: int) -> Tensor | None:
    """The part of a value that belongs to one token of one sequence, None if unknown.

    Args:
        value: (T, ...), (1, T, ...) or, of rotations and some attentions, (1, H, T, D).
        length: T.
        token: In the sequence.
    """
    if value.dim() == 4 and value.shape[0] == 1 and value.shape[2] == length:
        return value[0, :, token].flatten()
    if value.dim() > 2 and value.shape[:2] == (1, length):
        return value[0, token].flatten()
    return value[token].flatten() if value.shape[0] == length else None
