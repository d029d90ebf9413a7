"""Quantize each operand of each annotated GEMM, once a tensor and direction.

- Siblings that read one tensor share its codes.
- x for wgrad is quantized in forward from BF16, beside the codes for fprop, and only
  these FP8 codes are kept for backward; or (recipe `jetrl_paper`) the fprop codes are
  kept and requantized in backward.
- A weight is quantized in forward for fprop and again, transposed, in backward for
  dgrad. What is made in backward from tensors of forward alone reads the gradient's
  codes as its last argument, `after`: without it a partitioner may make it in forward
  and keep it.
- Codes that the model stores (a rollout model) are read as they are.
"""

from dataclasses import dataclass, field

import torch
from torch.fx import Node

from jetrl_compile.errors import LoweringError
from jetrl_compile.formats import Flow
from jetrl_compile.gemm_sites import GemmSite
from jetrl_compile.kernels import ops  # noqa: F401  (registers torch.ops.jetrl)
from jetrl_compile.passes.context import Context, Quantized
from jetrl_compile.passes.graph_nodes import emit, emit_item

aten = torch.ops.aten
_TRANSPOSES = (aten.permute.default, aten.t.default, aten.transpose.int)


def insert_quantize(context: Context) -> int:
    """Insert the quantize operators; return how many."""
    if context.annotated is None:
        return 0
    worker = _Inserter(context)
    order = sorted(context.built.gemms.items(), key=lambda item: item[1].node)
    for name, site in order:
        node = context.nodes[site.node]
        first = worker.decided.setdefault(node, name)
        if first != name:
            worker.check_same(first, name)
        elif node in context.operands or node.target is torch.ops.jetrl.gemm.default:
            continue  # a second run
        elif context.annotated.is_fp8(context.annotated.by_name[name]):
            context.operands[node] = worker.operands(name, site)
    return worker.count


@dataclass
class _Inserter:
    context: Context
    count: int = 0
    decided: dict[Node, str] = field(default_factory=dict)
    made: dict[tuple[object, ...], Quantized] = field(default_factory=dict)
    forward_x: dict[Node, tuple[Quantized, Flow]] = field(default_factory=dict)

    def check_same(self, first: str, name: str) -> None:
        """Check that all layers of a fused GEMM have the same flows."""
        annotated = self.context.annotated
        assert annotated is not None
        a, b = (
            {k: e.flow for k, e in annotated.operands[n].items()} for n in (first, name)
        )
        if a != b:
            raise LoweringError(
                f"{first} and {name} are one GEMM but the recipe gives them different "
                "flows; name both or neither in the recipe"
            )

    def operands(self, name: str, site: GemmSite) -> tuple[Quantized, Quantized]:
        """Return the two quantized operands of a GEMM, left then right."""
        annotated = self.context.annotated
        assert annotated is not None
        flows = {k: e.flow for k, e in annotated.operands[name].items()}
        node = self.context.nodes[site.node]
        left, right = self.context.nodes[site.a], self.context.nodes[site.b]
        if site.role == "fprop":
            x = self._quantize(left, flows["x"], False, node)
            self.forward_x[left] = (x, flows["x"])
            self._wgrad_in_forward(name, left, node)
            return x, self._weight(site, flows["w"], node, None)
        if site.role == "dgrad":
            dy = self._quantize(left, flows["dy"], False, node)
            return dy, self._weight(site, flows["w"], node, dy.codes)
        # dy^T x, or the same product written x^T dy and transposed afterwards.
        first, second = (right, left) if site.transposed else (left, right)
        dy_node, dy_flip = _untransposed(first)
        x_node, x_flip = _untransposed(second)
        if site.transposed:
            dy_flip, x_flip = not dy_flip, not x_flip
        dy = self._quantize(dy_node, flows["dy"], dy_flip, node)
        x = self._wgrad_x(site, x_node, not x_flip, flows["x"], node, dy)
        return dy, x

    def _wgrad_in_forward(self, fprop: str, x: Node, anchor: Node) -> None:
        """Make wgrad's copy of x in forward, where the layer has a wgrad."""
        annotated, recipe = self.context.annotated, self.context.recipe
        # By the operator's name: the layers of a fused GEMM have names of their own.
        wgrad = f"{fprop.rpartition(':')[0]}:wgrad"
        assert annotated is not None
        assert recipe.flows is not None
        if recipe.flows.saved_x != "wgrad_operand" or wgrad not in annotated.operands:
            return
        flow = annotated.operands[wgrad]["x"].flow
        if flow.is_quantized:
            self._quantize(x, flow, True, anchor)

    def _wgrad_x(
        self,
        site: GemmSite,
        x: Node,
        transpose: bool,
        flow: Flow,
        anchor: Node,
        after: Quantized,
    ) -> Quantized:
        if flow.source_dtype != "e4m3":
            return self._quantize(x, flow, transpose, anchor)
        made = self.forward_x.get(x)
        if made is None:
            raise LoweringError(
                f"{site.module}:wgrad reads an x whose fprop codes are not at hand; "
                "use the recipe 'jetrl', which quantizes it from BF16"
            )
        codes, before = made
        key = ("requantize", codes.codes, str(flow), transpose)
        if key not in self.made:
            assert before.granularity is not None
            assert flow.granularity is not None
            args = (
                codes.codes,
                codes.scales,
                before.granularity.rows,
                before.granularity.cols,
                flow.granularity.rows,
                flow.granularity.cols,
                transpose,
                flow.scale_format,
                flow.amax_floor,
                after.codes,
            )
            target = torch.ops.jetrl.requantize.default
            self.made[key] = self._emit(target, args, anchor)
        return self.made[key]

    def _weight(
        self, site: GemmSite, flow: Flow, anchor: Node, after: Node | None
    ) -> Quantized:
        stored = self.context.nodes[site.weight]
        if stored.op == "call_function":  # jetrl.dequantize of codes that are stored
            codes, scales = stored.args[0], stored.args[1]
            assert isinstance(codes, Node)
            assert isinstance(scales, Node)
            return Quantized(codes, scales)
        return self._quantize(stored, flow, not site.transposed, anchor, after)

    def _quantize(
        self,
        x: Node,
        flow: Flow,
        transpose: bool,
        anchor: Node,
        after: Node | None = None,
    ) -> Quantized:
        assert flow.granularity is not None
        backward = after is not None
        key = (x, str(flow.saved_as(None)), transpose, backward)
        if key not in self.made:
            args = (
                x,
                flow.granularity.rows,
                flow.granularity.cols,
                transpose,
                flow.scale_format,
                flow.amax_floor,
                after,
            )
            self.made[key] = self._emit(torch.ops.jetrl.quantize.default, args, anchor)
        return self.made[key]

    def _emit(
        self, target: torch._ops.OpOverload, args: tuple[object, ...], anchor: Node
    ) -> Quantized:
        graph = self.context.graph
        self.count += 1
        with graph.inserting_before(anchor):
            node = emit(graph, target, args, anchor)
            parts = [emit_item(graph, node, slot, anchor) for slot in (0, 1)]
        return Quantized(*parts)


def _untransposed(node: Node) -> tuple[Node, bool]:
    """Return the matrix behind a transpose, and whether there was one."""
    flipped = False
    while node.op == "call_function" and node.target in _TRANSPOSES:
        source = node.args[0]
        assert isinstance(source, Node)
        node, flipped = source, not flipped
    return node, flipped
