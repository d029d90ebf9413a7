"""Hand-built precision graphs of a Qwen-like decoder, for tests and benchmarks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from jetrl_compile.differences import Difference
from jetrl_compile.formats import Flow, blocks, groups
from jetrl_compile.precision_graph import Edge, Operator, PrecisionGraph, make_graph

BF16 = Flow("bf16")
FP32 = Flow("fp32")
INT64 = Flow("int64")
PROJECTIONS = {
    "self_attn.q_proj": (4096, 2048),
    "self_attn.k_proj": (1024, 2048),
    "self_attn.v_proj": (1024, 2048),
    "self_attn.o_proj": (2048, 4096),
    "mlp.gate_proj": (6144, 2048),
    "mlp.up_proj": (6144, 2048),
    "mlp.down_proj": (2048, 6144),
}


@dataclass
class Builder:
    """Collects operators and edges of one phase."""

    phase: str
    operators: list[Operator] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)

    def add(self, operator: Operator, **reads: tuple[str, Flow]) -> str:
        self.operators.append(operator)
        for operand, (source, flow) in reads.items():
            self.edges.append(Edge(source, operator.name, operand, flow))
        return operator.name

    def parameter(self, module: str) -> str:
        name = f"{module}.weight"
        return self.add(Operator(name, "parameter", module))

    def gemm(self, module: str, x: str, fp8: bool = True) -> str:
        n, k = PROJECTIONS.get(module.split(".", 3)[-1], (151936, 2048))
        save = "e4m3" if fp8 else "bf16"
        x_flow = groups("K") if fp8 else BF16
        return self.add(
            Operator(
                f"{module}:fprop",
                "gemm",
                module,
                (("K", k), ("N", n)),
                "fp32",
                "deep_gemm" if fp8 else "aten",
                True if fp8 else None,
                reason="" if fp8 else "the recipe keeps the role lm_head",
            ),
            x=(x, x_flow.saved_as(save) if self.phase == "train" else x_flow),
            w=(self.parameter(module), blocks("K") if fp8 else BF16),
        )

    def norm(self, module: str, x: str) -> str:
        return self.add(
            Operator(f"{module}:norm", "norm", module, (("eps", 1e-6),), "fp32"),
            x=(x, BF16),
            w=(self.parameter(module), BF16),
        )

    def residual(self, name: str, module: str, x: str, residual: str) -> str:
        return self.add(
            Operator(name, "residual_add", module, (), "bf16"),
            x=(x, BF16),
            residual=(residual, BF16),
        )

    def layer(self, index: int, hidden: str, tables: str) -> str:
        base = f"model.layers.{index}"
        attn, mlp = f"{base}.self_attn", f"{base}.mlp"
        x = self.norm(f"{base}.input_layernorm", hidden)
        q, k, v = (self.gemm(f"{attn}.{part}_proj", x) for part in "qkv")
        ropes = {
            part: self.add(
                Operator(f"{attn}:rope.{part}", "rope", attn, (), "fp32"),
                x=(source, BF16),
                table=(tables, FP32),
            )
            for part, source in (("q", q), ("k", k))
        }
        mixed = self.add(
            Operator(
                f"{attn}:attention",
                "attention",
                attn,
                (("causal", True), ("scale", 0.08838834764831845)),
                "fp32",
                "flash_attention",
                False,
            ),
            q=(ropes["q"], BF16),
            k=(ropes["k"], BF16),
            v=(v, BF16),
        )
        out = self.gemm(f"{attn}.o_proj", mixed)
        hidden = self.residual(f"{base}:residual_add", base, out, hidden)
        x = self.norm(f"{base}.post_attention_layernorm", hidden)
        gate, up = (self.gemm(f"{mlp}.{part}_proj", x) for part in ("gate", "up"))
        act = self.add(
            Operator(f"{mlp}:activation", "activation", mlp, (("fn", "silu"),), "fp32"),
            gate=(gate, BF16),
            up=(up, BF16),
        )
        down = self.gemm(f"{mlp}.down_proj", act)
        return self.residual(f"{base}:residual_add.1", base, down, hidden)

    def backward(self, layers: int) -> None:
        for index in reversed(range(layers)):
            for part in reversed(PROJECTIONS):
                module = f"model.layers.{index}.{part}"
                for role, left, right in (
                    ("dgrad", groups("N"), blocks("N")),
                    ("wgrad", groups("M"), blocks("M")),
                ):
                    other = f"{module}.weight" if role == "dgrad" else f"{module}:fprop"
                    self.add(
                        Operator(f"{module}:{role}", "gemm", module, phase="backward"),
                        dy=("lm_head:fprop", left),
                        **{"w" if role == "dgrad" else "x": (other, right)},
                    )


def decoder_graph(phase: str, layers: int = 2) -> PrecisionGraph:
    """Return the graph of a decoder; "train" has saved tensors and a backward part."""
    build = Builder(phase)
    tokens = build.add(Operator("input.0", "input", compute_dtype="int64"))
    positions = build.add(Operator("input.1", "input", compute_dtype="int64"))
    index = build.add(
        Operator(f"model:{'mask' if phase == 'train' else 'slots'}", "index", "model"),
        x=(positions, INT64),
    )
    tables = build.add(
        Operator("model.rotary_emb:rope_table", "rope_table", "model.rotary_emb"),
        positions=(index, INT64),
    )
    hidden = build.add(
        Operator("model.embed_tokens:embedding", "embedding", "model.embed_tokens"),
        x=(tokens, INT64),
        w=(build.parameter("model.embed_tokens"), BF16),
    )
    for number in range(layers):
        hidden = build.layer(number, hidden, tables)
    hidden = build.norm("model.norm", hidden)
    logits = build.gemm("lm_head", hidden, fp8=False)
    build.add(Operator("output.0", "output"), x=(logits, BF16))
    if phase == "train":
        build.backward(layers)
    engine = "verl" if phase == "train" else "vllm"
    return make_graph(
        build.operators,
        build.edges,
        phase=phase,
        recipe="jetrl",
        model="sample",
        engine=engine,
    )


# Edits of graphs -------------------------------------------------------------------


def with_edges(
    graph: PrecisionGraph, change: Callable[[Edge], Edge | None]
) -> PrecisionGraph:
    changed = (change(edge) for edge in graph.edges)
    return replace(graph, edges=tuple(edge for edge in changed if edge is not None))


def with_operators(
    graph: PrecisionGraph, change: Callable[[Operator], Operator]
) -> PrecisionGraph:
    return replace(graph, operators=tuple(map(change, graph.operators)))


def one_edge(graph: PrecisionGraph, edge: Edge, **changes: Any) -> PrecisionGraph:
    return with_edges(graph, lambda e: replace(e, **changes) if e is edge else e)


def one_operator(graph: PrecisionGraph, op: Operator, **changes: Any) -> PrecisionGraph:
    return with_operators(graph, lambda o: replace(o, **changes) if o is op else o)


Named = tuple[int, str, str]  # level, name of the operator or edge, attribute


def names(found: Iterable[Difference]) -> list[Named]:
    return [(item.level, item.name, item.attribute) for item in found]


def without_fp8(
    graph: PrecisionGraph, matches: Callable[[str], bool]
) -> PrecisionGraph:
    """Leave layers in BF16, as a skip list does."""

    def change(edge: Edge) -> Edge:
        skipped = edge.flow.is_quantized and matches(edge.target)
        return replace(edge, flow=Flow("bf16")) if skipped else edge

    return with_edges(graph, change)
