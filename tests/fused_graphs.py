"""Graphs in which GEMMs are merged and quantization is fused, for the tests of both."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tiny_models import activations, backward, compiled, make_model
from torch import Tensor, nn
from torch.fx import Graph, Node
from traced_graphs import capture_context, fresh

from jetrl_compile.passes.context import Context
from jetrl_compile.pipeline import PASSES
from jetrl_compile.precision_graph import Edge, PrecisionGraph

# Sizes of which every projection has whole blocks, so that siblings can be merged.
WHOLE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FUSED: dict[str, Any] = {"fuse": True}
SAVED: dict[str, Any] = {"fuse": True, "saved_gate_up": "e4m3"}
CACHED: dict[str, Any] = {"fuse": True, "cache_weights": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "fused": FUSED,
    "saved": SAVED,
    "cached": CACHED,
    "cached_only": {"cache_weights": True},
}


class RmsNorm(nn.Module):
    """As Llama and Qwen write it."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


Gradients = Mapping[str, Tensor | None]


def check_same(wanted: Gradients, got: Gradients) -> None:
    """Check that two sets of gradients have the same bits."""
    assert wanted.keys() == got.keys()
    for name, gradient in wanted.items():
        other = got[name]
        assert gradient is not None
        assert other is not None
        assert torch.equal(gradient, other), name


class GatedMlp(nn.Module):
    """norm, gate, up, SiLU * mul, down, residual; all of it has fused kernels."""

    def __init__(self, hidden: int = 256, inner: int = 256, bias: bool = False) -> None:
        super().__init__()
        self.norm = RmsNorm(hidden)
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        gated = nn.functional.silu(self.gate_proj(h)) * self.up_proj(h)
        result: Tensor = x + self.down_proj(gated)
        return result


def make_gated(**sizes: Any) -> GatedMlp:
    torch.manual_seed(0)
    return GatedMlp(**sizes).to(torch.bfloat16)


def layer_of(name: str = "qwen3", length: int = 24, **changes: Any) -> Any:
    """A decoder layer, and what calls it on two sequences and returns its result."""
    model = make_model(name, **{**WHOLE, **changes}).model
    x = activations(2, length, model.config.hidden_size)
    tables = model.rotary_emb(x, torch.arange(length)[None])

    def run(layer: Callable[..., Any]) -> Tensor:
        result: Tensor = layer(x, position_embeddings=tables)
        return result

    return model.layers[0], run


def run_layer(name: str = "qwen3", **options: Any) -> None:
    """Compile a decoder layer; forward and backward."""
    layer, run = layer_of(name)
    backward(run(compiled(layer, **options)))


def layer_context(name: str = "qwen3", recipe: Any = "jetrl", **sizes: Any) -> Context:
    """The joint graph of a decoder layer, before the first pass."""
    layer, run = layer_of(name, **sizes)
    return capture_context(lambda call: backward(run(call)), layer, recipe)


def with_options(context: Context, **options: Any) -> Context:
    """The same graph, untouched, with other options."""
    other = fresh(context)
    for name, value in options.items():
        setattr(other, name, value)
    return other


def lowered(context: Context, until: str = "", **options: Any) -> Context:
    """Run the passes, or those before the one that is named."""
    other = with_options(context, **options)
    for name, run in PASSES:
        if name == until:
            break
        run(other)
    return other


def calls(graph: Graph, target: Any) -> list[Node]:
    return list(graph.find_nodes(op="call_function", target=target))


def flows(graph: PrecisionGraph) -> list[Edge]:
    """The edges, but for what is kept for backward: fused kernels may remake it."""
    return [
        Edge(e.source, e.target, e.operand, e.flow.saved_as(None)) for e in graph.edges
    ]


def formulas(graph: PrecisionGraph) -> dict[str, str]:
    return {op.name: op.formula for op in graph.operators if op.phase == "forward"}
