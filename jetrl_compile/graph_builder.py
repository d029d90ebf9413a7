"""Build the precision graph of a captured graph."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jetrl_compile.capture import CapturedGraph, CapturedNode, Ref
from jetrl_compile.describe import Description, describe
from jetrl_compile.formats import Flow
from jetrl_compile.fused_layers import FusedLayers
from jetrl_compile.gemm_sites import GemmSite, GemmSites
from jetrl_compile.lowered_flow import lowered_flow, lowered_provider
from jetrl_compile.node_groups import Group, Grouping
from jetrl_compile.op_classes import ADD_NORMS, LOWERED_GEMM, ROPES
from jetrl_compile.precision_graph import Edge, Operator, PrecisionGraph, make_graph
from jetrl_compile.tensor_sources import TensorSources, narrower

# What an opaque add+norm rounds the residual sum to before it normalizes.
_ADD_NORM_SUM = {"vllm_ir.fused_add_rms_norm": "fp32", "_C.fused_add_rms_norm": "bf16"}


@dataclass(frozen=True)
class BuiltGraph:
    """A precision graph, and how it relates to the captured graph.

    Attributes:
        graph: The precision graph.
        gemms: The weight GEMMs, by the names of their operators.
        node_of: For each operator, the name of the last captured node that is part of
            it: where its result appears.
    """

    graph: PrecisionGraph
    gemms: Mapping[str, GemmSite]
    node_of: Mapping[str, str]


def build_precision_graph(
    captured: CapturedGraph,
    batch_invariant: Mapping[str, bool] | None = None,
    **meta: Any,
) -> BuiltGraph:
    """Return the precision graph of a captured graph, in time linear in its size.

    Args:
        captured: A joint, inference or Dynamo-level graph.
        batch_invariant: For each GEMM provider whether a row's result is independent
            of the batch.
        **meta: The graph's `meta`.
    """
    return _Builder(captured, batch_invariant or {}).build(meta)


class _Builder:
    def __init__(
        self, captured: CapturedGraph, batch_invariant: Mapping[str, bool]
    ) -> None:
        self.batch_invariant = batch_invariant
        self.sources = TensorSources(captured)
        self.nodes = self.sources.nodes
        self.sites = GemmSites(self.sources)
        self.grouping = Grouping(self.sources, self.sites)
        self.fused = FusedLayers(self.sources, self.sites)
        self.operators: list[Operator] = []
        # Edges whose sources are looked up when every operator is known.
        self.pending: list[Callable[[], list[Edge]]] = []
        self.names: Counter[str] = Counter()
        # For each node, the operators of its results: one, or one a slot.
        self.made: dict[int, list[str]] = {}
        self.gemms: dict[str, GemmSite] = {}
        self.node_of: dict[str, str] = {}

    def build(self, meta: Mapping[str, Any]) -> BuiltGraph:
        # An operator stands where its result is ready; masks and positions come first.
        last = {
            group.nodes[0 if group.shape == "index" else -1]: group
            for group in self.grouping.groups
        }
        inputs = 0
        for index, node in enumerate(self.nodes):
            if node.op == "placeholder":
                if node.target == "input":
                    inputs += not node.backward
                self._placeholder(index, node, inputs - 1)
            elif node.op == "attribute":
                self._operator(index, f"{node.module}:constant", "constant")
            elif node.op == "output":
                self._output(index, node)
            elif index in self.sites.sites:
                self._gemm(index, node, self.sites.sites[index])
            elif index in last:
                self._group(last[index])
            elif node.target.startswith("jetrl.") and index not in self.made:
                continue
        edges = self._with_saved([edge for make in self.pending for edge in make()])
        graph = make_graph(self.operators, edges, **meta)
        return BuiltGraph(graph, self.gemms, self.node_of)

    def _name(self, name: str) -> str:
        self.names[name] += 1
        seen = self.names[name]
        return name if seen == 1 else f"{name}.{seen - 1}"

    def _operator(self, index: int, name: str, kind: str, **fields: Any) -> str:
        node = self.nodes[index]
        name = self._name(name)
        fields.setdefault("module", node.module)
        phase = "backward" if node.backward else "forward"
        self.operators.append(Operator(name, kind, phase=phase, **fields))
        self.made[index] = [name]
        self.node_of[name] = node.name
        return name

    def _edge(self, target: str, operand: str, read: int) -> None:
        """Add the edges of one operand: several where a fused layer made it."""

        def make() -> list[Edge]:
            source = self.sources.source(read)
            flow = Flow(source.dtype or "int64")
            return [
                Edge(name, target, self._operand(target, operand), flow)
                for name in self._sources_of(read)
            ]

        self.pending.append(make)

    def _sources_of(self, read: int) -> list[str]:
        """The operators that make a tensor: those parts of a fused layer it holds."""
        source = self.sources.source(read)
        made = self._makers(source.index, source.slot)
        parts = self.fused.parts_read(read) if len(made) > 1 else None
        return made if parts is None else [made[part] for part in parts]

    def _operand(self, target: str, operand: str) -> str:
        key = f"{target} <- {operand}"
        self.names[key] += 1
        return operand if self.names[key] == 1 else f"{operand}.{self.names[key] - 1}"

    def _makers(self, index: int, slot: int) -> list[str]:
        group = self.grouping.group_of.get(index)
        at = 0 if group is not None and group.shape == "index" else -1
        made = self.made.get(index if group is None else group.nodes[at])
        if made is None:
            # Stored codes seen through a dequantize: the parameter that holds them.
            inner = self.sources.inputs[index]
            return self._makers(self.sources.source(inner[0]).index, 0)
        if self.nodes[index].target in ADD_NORMS | ROPES and len(made) > 1:
            return [made[min(slot, len(made) - 1)]]
        return made

    def _placeholder(self, index: int, node: CapturedNode, number: int) -> None:
        if node.target == "input" or not node.module:
            if node.backward:
                self._operator(index, "tangents:input", "input")
            else:
                self._operator(index, f"input.{number}", "input")
            return
        if node.module.endswith("cos_sin_cache"):
            self._operator(
                index,
                "model.rotary_emb:rope_table",
                "rope_table",
                module="model.rotary_emb",
                compute_dtype="fp32",
            )
            return
        if self._holds_scales(index):
            return  # part of the flow of the edge that reads the codes
        module = node.module.rpartition(".")[0]
        parts = self.fused.parameter_names(index) or [node.module]
        names = []
        for name in parts:
            self._operator(
                index,
                name,
                "parameter",
                module=name.rpartition(".")[0] if len(parts) > 1 else module,
                reason=f"stored {node.dtype}",
            )
            names += self.made[index]
        self.made[index] = names

    def _holds_scales(self, index: int) -> bool:
        """Whether a buffer is read only as the scales of stored codes."""
        users = [self.nodes[user] for user in self.sources.users[index]]
        at = {"jetrl.dequantize": (1,), LOWERED_GEMM: (1, 3)}
        return bool(users) and all(
            any(
                isinstance(user.args[slot], Ref) and user.args[slot].index == index
                for slot in at.get(user.target, ())
            )
            for user in users
        )

    def _output(self, index: int, node: CapturedNode) -> None:
        target = self._operator(index, "output", "output", module="")
        seen: set[tuple[int, int]] = set()
        for read in self.sources.inputs[index]:
            source = self.sources.source(read)
            if self.nodes[source.index].backward or (source.index, source.slot) in seen:
                continue
            seen.add((source.index, source.slot))
            self._edge(target, f"out.{len(seen) - 1}", read)

    def _gemm(self, index: int, node: CapturedNode, site: GemmSite) -> None:
        lowered = node.target == LOWERED_GEMM
        provider = lowered_provider(node) if lowered else "aten"
        invariant = self.batch_invariant.get(provider)
        names = []
        for module, params in self.fused.split(site):
            name = self._operator(
                index,
                f"{module}:{site.role}",
                "gemm",
                module=module,
                params=tuple(sorted(params.items())),
                compute_dtype="fp32",
                provider=provider,
                batch_invariant=invariant,
            )
            names.append(name)
            self.gemms[name] = site
        self.made[index] = names
        left, right = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}[
            site.role
        ]
        for number, name in enumerate(names):
            if lowered:
                for operand, codes in ((left, 0), (right, 2)):
                    read, flow = lowered_flow(self.sources, node, codes, site.role)
                    self._gemm_edge(name, operand, read, flow, number, len(names))
            else:
                a, b = site.a, site.b
                if site.role == "wgrad" and site.transposed:
                    a, b = b, a
                self._gemm_edge(name, left, a, None, number, len(names))
                flow = Flow(site.weight_dtype) if right == "w" else None
                self._gemm_edge(name, right, b, flow, number, len(names))
        if site.bias is not None and not lowered:
            self.made[index] = []
            for name in names:
                self._bias(index, name, site)

    def _gemm_edge(
        self, name: str, operand: str, read: int, flow: Flow | None, part: int, of: int
    ) -> None:
        """Add an operand of the `part`-th of `of` layers that one GEMM computes."""

        def make() -> list[Edge]:
            names = self._sources_of(read)
            own = part if operand == "w" and len(names) == of else 0
            used = flow or Flow(self.sources.source(read).dtype)
            return [Edge(names[own], name, operand, used)]

        self.pending.append(make)

    def _link(self, source: str, target: str, operand: str, flow: Flow) -> None:
        self.pending.append(lambda: [Edge(source, target, operand, flow)])

    def _bias(self, index: int, gemm: str, site: GemmSite) -> None:
        """The bias that a GEMM kernel adds to its FP32 accumulator."""
        module = gemm.rpartition(":")[0]
        made = self.made[index]
        name = self._operator(
            index,
            f"{module}:bias_add",
            "bias_add",
            module=module,
            compute_dtype="fp32",
            provider="aten",
        )
        self.made[index] = [*made, name]
        self._link(gemm, name, "x", Flow("fp32"))
        assert site.bias is not None
        self._edge(name, "bias", site.bias)

    def _group(self, group: Group) -> None:
        index = group.nodes[0 if group.shape == "index" else -1]
        first = self.nodes[group.nodes[0]]
        if first.target in ADD_NORMS:
            self._add_norm(index, first)
            return
        if first.target in ROPES:
            self._opaque_rope(index, first)
            return
        what = describe(group, self.sources)
        module = group.module
        if what.kind == "attention" and first.target.startswith("vllm."):
            module = module.removesuffix(".attn")
        reads = self._outside(group)
        self._refine(what, reads)
        if what.kind == "residual_add":
            module = self._module_made(reads[1])
        elif what.kind == "bias_add":
            module = self._module_made(reads[0])
        elif what.role == "grad_sum":
            # The module whose gradient is added last.
            module = self._module_made(
                max(reads, key=lambda read: self.sources.source(read).index)
            )
        name = self._operator(
            index,
            f"{module}:{what.role}" if module else f":{what.role}",
            what.kind,
            module=module,
            params=tuple(sorted(what.params.items())),
            compute_dtype=what.compute_dtype,
            provider="" if what.kind == "index" else self._provider(first),
        )
        for operand, read in self._labelled(what, reads, first):
            self._edge(name, operand, read)

    def _provider(self, node: CapturedNode) -> str:
        return node.target.split(".")[0] if "." in node.target else "aten"

    def _outside(self, group: Group) -> list[int]:
        """What a group reads from outside it: each tensor once, floats or integers."""
        found: dict[tuple[int, int], int] = {}
        for index in group.nodes:
            for read in self.sources.inputs[index]:
                source = self.sources.source(read)
                if source.index not in group.members:
                    found.setdefault((source.index, source.slot), read)
                    kept = found[(source.index, source.slot)]
                    if (
                        narrower(self.sources.source(kept).dtype, source.dtype)
                        != self.sources.source(kept).dtype
                    ):
                        found[(source.index, source.slot)] = read
        return list(found.values())

    def _is_parameter(self, read: int) -> bool:
        node = self.nodes[self.sources.source(read).index]
        return node.op == "placeholder" and node.target != "input"

    def _module_made(self, read: int) -> str:
        source = self.sources.source(read)
        made = self._makers(source.index, source.slot)[-1]
        return made.rpartition(":")[0] or made

    def _refine(self, what: Description, reads: list[int]) -> None:
        """Tell residual and bias adds from other sums; order their operands."""
        if what.role != "add" or len(reads) != 2 or what.params:
            return
        parameters = [read for read in reads if self._is_parameter(read)]
        makers = [self.sources.source(read).index for read in reads]
        if len(parameters) == 1:
            other = next(read for read in reads if read not in parameters)
            if self.sources.source(other).index in self.sites.sites:
                what.kind, what.role = "bias_add", "bias_add"
                reads[:] = [other, parameters[0]]
        elif (
            not parameters
            and not any(self.sources.is_index[i] for i in makers)
            and self.nodes[reads[0]].shape == self.nodes[reads[1]].shape
        ):
            what.kind, what.role = "residual_add", "residual_add"
            reads.sort(key=lambda read: self.sources.source(read).index)

    def _labelled(
        self, what: Description, reads: list[int], first: CapturedNode
    ) -> list[tuple[str, int]]:
        """Name an operator's operands."""
        if what.kind == "residual_add":
            return list(zip(("residual", "branch"), reads, strict=True))
        if what.kind == "bias_add":
            return list(zip(("x", "bias"), reads, strict=True))
        labelled = []
        activations = []
        for read in reads:
            node = self.nodes[self.sources.source(read).index]
            if self._is_parameter(read) and node.module:
                labelled.append((node.module.rpartition(".")[2], read))
            elif self.sources.is_index[self.sources.source(read).index]:
                labelled.append(("index", read))
            else:
                activations.append(read)
        if what.kind == "attention":
            names = ["q", "k", "v"]
        elif what.kind == "rope":
            names = ["x", "cos", "sin"]
            activations.sort(key=self._is_table)
        elif what.kind == "activation" and what.params.get("gated"):
            names = ["gate", "up"]
        else:
            names = ["x"] if len(activations) == 1 else []
        for number, read in enumerate(activations):
            label = names[number] if number < len(names) else f"in.{number}"
            labelled.append((label, read))
        order = {read: number for number, read in enumerate(reads)}
        labelled.sort(key=lambda pair: order[pair[1]])
        return labelled

    def _is_table(self, read: int) -> bool:
        """Whether a rope operand is a cosine or sine table, not the rotated tensor."""
        source = self.sources.source(read).index
        node = self.nodes[source]
        if node.op == "placeholder":
            return True
        return node.target in ("cos", "sin", "mul") and "rotary" in node.module.lower()

    def _add_norm(self, index: int, node: CapturedNode) -> None:
        """An opaque residual add + norm is two operators; results: norm, sum."""
        x, residual, *rest = self.sources.inputs[index]
        rounded = _ADD_NORM_SUM[node.target]
        module = self._module_made(x)
        total = self._operator(
            index,
            f"{module}:residual_add",
            "residual_add",
            module=module,
            compute_dtype=rounded,
            provider=self._provider(node),
        )
        self._edge(total, "residual", residual)
        self._edge(total, "branch", x)
        eps = [arg for arg in node.args if isinstance(arg, float)]
        norm = self._operator(
            index,
            f"{node.module}:norm",
            "norm",
            params=(("eps", eps[0]),) if eps else (),
            compute_dtype="fp32",
            provider=self._provider(node),
        )
        self._link(total, norm, "x", Flow(rounded))
        for read in rest:
            self._edge(norm, "weight", read)
        self.made[index] = [norm, total]

    def _opaque_rope(self, index: int, node: CapturedNode) -> None:
        """An opaque rotary embedding is two operators, one for q and one for k."""
        refs = [arg.index for arg in node.args if isinstance(arg, Ref)]
        positions, q, k, table = refs
        module = node.module.removesuffix(".rotary_emb")
        made = []
        for label, read in (("q", q), ("k", k)):
            name = self._operator(
                index,
                f"{module}:rope.{label}",
                "rope",
                module=module,
                compute_dtype=self.nodes[table].dtype,
                provider=self._provider(node),
            )
            self._edge(name, "x", read)
            self._edge(name, "cos", table)
            self._edge(name, "sin", table)
            self._edge(name, "index", positions)
            made.append(name)
        self.made[index] = made

    def _with_saved(self, edges: list[Edge]) -> list[Edge]:
        """Mark what of each linear layer's input is kept for backward."""
        saved: dict[str, str] = {}
        for edge in edges:
            if edge.operand != "x" or not edge.target.endswith(":wgrad"):
                continue
            name = edge.target.removesuffix(":wgrad")
            node = self.nodes[self.gemms[edge.target].node]
            saved[f"{name}:fprop"] = self._saved_dtype(node, edge)
        rename = self._rope_names(edges)
        marked = []
        for edge in edges:
            kept = saved.get(edge.target) if edge.operand == "x" else None
            flow = edge.flow if kept is None else edge.flow.saved_as(kept)
            marked.append(
                Edge(
                    rename.get(edge.source, edge.source),
                    rename.get(edge.target, edge.target),
                    edge.operand,
                    flow,
                )
            )
        if rename:
            self.operators = [
                replace(op, name=rename.get(op.name, op.name)) for op in self.operators
            ]
            self.node_of = {rename.get(k, k): v for k, v in self.node_of.items()}
        return marked

    def _saved_dtype(self, node: CapturedNode, edge: Edge) -> str:
        """What is kept of x: FP8 if forward quantized it, or its own dtype."""
        if not edge.flow.is_quantized:
            return edge.flow.dtype
        made = self.sources.source(node.args[2].index).index
        if not self.nodes[made].backward or edge.flow.source_dtype == "e4m3":
            return "e4m3"
        return edge.flow.source_dtype or edge.flow.dtype

    def _rope_names(self, edges: list[Edge]) -> dict[str, str]:
        """Name each rotary embedding by the attention operand that it makes."""
        kinds = {op.name: op.kind for op in self.operators}
        rename: dict[str, str] = {}
        for edge in edges:
            if edge.operand not in ("q", "k") or kinds.get(edge.target) != "attention":
                continue
            if kinds[edge.source] == "rope" and not edge.source.endswith(
                f".{edge.operand}"
            ):
                module = edge.source.rpartition(":")[0]
                rename.setdefault(edge.source, f"{module}:rope.{edge.operand}")
        taken = Counter(rename.values())
        return {old: new for old, new in rename.items() if taken[new] == 1}
