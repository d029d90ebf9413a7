"""Write fused operators out as the operators that they stand for.

The precision graph of a fused graph is built from this form, so it has the operators of
the model, whatever was fused. What is written follows from the fused operator's own
arguments; from its metadata come only names (the modules of the operators) and, for a
GEMM that adds up several dgrads, the order of the additions that it replaced.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from jetrl_compile.errors import LoweringError
from jetrl_compile.kernels import exact_ops, fused_ops, ops, weight_ops
from jetrl_compile.passes.graph_nodes import emit
from jetrl_compile.passes.graph_writer import (
    EXACT,
    ORIGIN,
    SUM,
    GraphWriter,
    Origin,
    Parts,
    Value,
)

__all__ = ["EXACT", "ORIGIN", "SUM", "Expander", "expand_fused"]

aten = torch.ops.aten
cast = torch.ops.prims.convert_element_type.default
_VIEWS = (aten.view.default, aten.reshape.default)


class Expander(GraphWriter):
    """Writes fused operators out."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        # silu(gate) * up by its inputs: backward reads what forward made.
        self.gated: dict[tuple[Any, Any], tuple[Node, Node, Node]] = {}
        # The same product by the operator of exact mode, and as a matrix.
        self.products: dict[tuple[Any, Any], tuple[Node, Node]] = {}
        # The result of a norm, as a matrix, by x, the factor and the weight.
        self.normed: dict[tuple[Any, Any, Any], Node] = {}
        self.rules: dict[Any, Callable[[Node], Value]] = {
            fused_ops.quantize_parts: self._quantize_parts,
            fused_ops.quantize_twice: self._quantize_twice,
            fused_ops.rms_norm_quantize: self._rms_norm,
            fused_ops.scale_rows_quantize: self._scale_rows,
            fused_ops.silu_mul_quantize: self._silu_mul,
            fused_ops.silu_mul_backward_quantize: self._silu_mul_backward,
            weight_ops.gemm_weights: self._gemm_weights,
            ops.gemm: self._gemm,
            ops.quantize: self._single,
            ops.requantize: self._single,
            operator.getitem: self._item,
            aten.slice.Tensor: self._slice,
        }

    def run(self) -> Graph:
        """Return the written-out graph."""
        for node in self.source.nodes:
            rule = self.rules.get(node.target) if node.op == "call_function" else None
            self.own = {}
            value = None if rule is None else rule(node)
            self.made[node] = self.copy(node) if value is None else value
        return self.graph

    def _single(self, node: Node) -> Value:
        """Copy a quantize: of a part of several layers' result, after such a one."""
        source = self.made[node.args[0]]  # type: ignore[index]
        if isinstance(source, Parts) and node.target is ops.quantize:
            rows, cols, transpose, *rest, _ = node.args[1:]
            flow = (rows, cols, *rest)
            return self.each(
                source.nodes, source.dim, flow, bool(transpose), None, node
            )
        args = self.args_and_after(node)
        return emit(self.graph, node.target, args, node)

    def _quantize_parts(self, node: Node) -> Value:
        parts, dim, rows, cols, transpose, *rest, after = self.args_and_after(node)
        flow = (rows, cols, *rest)
        return self.each(parts, dim, flow, transpose, after, node)

    def _quantize_twice(self, node: Node) -> Value:
        parts, dim, rows, cols, rows_t, cols_t, *rest = self.args(node)
        straight = self.each(parts, dim, (rows, cols, *rest), False, None, node)
        if rows_t < 0:
            return (*straight, None, None)
        turned = self.each(parts, dim, (rows_t, cols_t, *rest), True, None, node)
        return (*straight, *turned)

    def _item(self, node: Node) -> Value:
        made, slot = self.made[node.args[0]], node.args[1]  # type: ignore[index]
        return made[int(slot)] if isinstance(made, tuple) else None  # type: ignore[arg-type]

    def _slice(self, node: Node) -> Value:
        """A part of a GEMM of several layers is the GEMM of one."""
        whole, *where = node.args
        made = self.made[whole]  # type: ignore[index]
        if not isinstance(made, Parts):
            return None
        dim, start, end = (*where, 0, None)[:3] if len(where) < 3 else where[:3]
        at = 0
        for part in made.nodes:
            size = part.meta["val"].shape[made.dim]
            if dim == made.dim and (start, end) == (at, at + size):
                return part
            at += size
        return None

    def _gemm(self, node: Node) -> Value:
        a, a_scales, b, b_scales, *rest = node.args
        codes_a, codes_b = self.made[a], self.made[b]  # type: ignore[index]
        scales_a, scales_b = self.made[a_scales], self.made[b_scales]  # type: ignore[index]
        return self._gemms(node, (codes_a, scales_a), (codes_b, scales_b), rest)

    def _gemms(
        self,
        node: Node,
        a: tuple[Value, Value],
        b: tuple[Value, Value],
        rest: Sequence[Any],
    ) -> Value:
        left, right = isinstance(a[0], Parts), isinstance(b[0], Parts)
        if not left and not right:
            return emit(self.graph, ops.gemm, (*a, *b, *rest), node)
        number = len(a[0].nodes if left else b[0].nodes)

        def part(pair: tuple[Value, Value], index: int) -> tuple[Node, Node]:
            return (
                (pair[0].nodes[index], pair[1].nodes[index])
                if isinstance(pair[0], Parts)
                else pair
            )

        origins = node.meta.get(ORIGIN, {})

        def one(i: int) -> Node:
            args = (*part(a, i), *part(b, i), *rest)
            origin = Origin(node, f"gemm{i}") if origins else node
            return emit(self.graph, ops.gemm, args, origin)

        if not (left and right):
            return Parts(tuple(map(one, range(number))), 0 if left else 1)
        made: list[Node] = []
        for step in node.meta[SUM]:
            if isinstance(step, int):
                made.append(one(step))
                continue
            role, first, second = step
            terms = (made[first], made[second])
            made.append(emit(self.graph, aten.add.Tensor, terms, Origin(node, role)))
        return made[-1]

    def _gemm_weights(self, node: Node) -> Value:
        a, a_scales, weights, transpose, *rest = node.args
        a_rows, a_cols, rows, cols, scale_format, floor, *last = rest
        after = self.made[a] if transpose else None  # type: ignore[index]
        if isinstance(after, Parts):
            after = after.nodes[0]
        copies = [self.node(w) for w in weights]  # type: ignore[union-attr,arg-type]
        flow = (rows, cols, scale_format, floor)
        b = self.each(copies, 0, flow, bool(transpose), after, node)
        left = (self.made[a], self.made[a_scales])  # type: ignore[index]
        return self._gemms(node, left, b, (a_rows, a_cols, rows, cols, *last))

    def _flat(self, x: Node, origin: Any) -> Node:
        """The matrix of (..., C)."""
        if x.meta["val"].dim() == 2:
            return x
        width = x.meta["val"].shape[-1]
        return self.write(aten.reshape.default, (x, [-1, width]), origin)

    def _scaled(self, wide: Node, rstd: Node, weight: Node, origin: Any) -> Node:
        product = self.write(aten.mul.Tensor, (wide, rstd), origin)
        narrow = self.write(cast, (product, torch.bfloat16), origin)
        return self.write(aten.mul.Tensor, (weight, narrow), origin)

    def _rms_norm(self, node: Node) -> Value:
        x, residual, weight, eps, eps_tensor, *_ = self.args(node)
        norm = Origin(node, "norm")
        total = None
        if residual is not None:
            args = (x, residual)
            x = total = self.write(aten.add.Tensor, args, Origin(node, "add"))
        if node.meta.get(ORIGIN, {}).get(EXACT):
            number = eps if eps_tensor is None else None
            given = (x, weight, number, eps_tensor)
            made = self.write(exact_ops.rms_norm, given, norm)
            rstd = self.write(operator.getitem, (made, 1), norm)
            y = self._flat(self.write(operator.getitem, (made, 0), norm), norm)
            return self._normed(node, x, rstd, weight, y, total)
        wide = self.write(cast, (x, torch.float32), norm)
        square = self.write(aten.pow.Tensor_Scalar, (wide, 2), norm)
        mean = self.write(aten.mean.dim, (square, [-1], True), norm)
        if eps_tensor is not None:
            eps = self.write(cast, (eps_tensor, torch.float32), norm)
        shift = Origin(node, "shift")  # an eps that is a tensor is added outside
        shifted = self.write(aten.add.Tensor, (mean, eps), shift)
        rstd = self.write(aten.rsqrt.default, (shifted,), norm)
        y = self._flat(self._scaled(wide, rstd, weight, norm), norm)
        return self._normed(node, x, rstd, weight, y, total)

    def _normed(
        self, node: Node, x: Node, rstd: Node, weight: Node, y: Node, total: Any
    ) -> Value:
        """Quantize the result of a norm."""
        rows, cols, rows_t, cols_t, *rest = self.args(node)[5:]
        self.normed[x, rstd, weight] = y
        straight = self.quantize(y, (rows, cols, *rest), False, None, node)
        turned: tuple[Value, Value] = (None, None)
        if rows_t >= 0:
            turned = self.quantize(y, (rows_t, cols_t, *rest), True, None, node)
        return (*straight, *turned, rstd, total)

    def _scale_rows(self, node: Node) -> Value:
        x, rstd, weight, rows, cols, transpose, *rest, after = self.args_and_after(node)
        y = self.normed.get((x, rstd, weight))
        if y is None:
            norm = Origin(node, "norm")
            wide = self.write(cast, (x, torch.float32), norm)
            y = self._flat(self._scaled(wide, rstd, weight, norm), norm)
        return self.quantize(y, (rows, cols, *rest), transpose, after, node)

    def _gate(self, gate: Node, up: Node, node: Node) -> tuple[Node, Node, Node]:
        """silu(gate) in BF16, its product with up, and that product as a matrix."""
        if (gate, up) not in self.gated:
            act = Origin(node, "act")
            silu = self._silu(gate, act)
            if node.meta.get(ORIGIN, {}).get(EXACT):  # forward made the product
                return (silu, *self.products[gate, up])
            product = self.write(aten.mul.Tensor, (silu, up), Origin(node, "product"))
            self.gated[gate, up] = (silu, product, self._flat(product, node))
        return self.gated[gate, up]

    def _silu(self, gate: Node, act: Origin) -> Node:
        wide = self.write(cast, (gate, torch.float32), act)
        negative = self.write(aten.neg.default, (wide,), act)
        power = self.write(aten.exp.default, (negative,), act)
        divisor = self.write(aten.add.Tensor, (power, 1), act)
        quotient = self.write(aten.div.Tensor, (wide, divisor), act)
        return self.write(cast, (quotient, torch.bfloat16), act)

    def _silu_mul(self, node: Node) -> Value:
        gate, up, rows, cols, rows_t, cols_t, *rest = self.args(node)
        if node.meta.get(ORIGIN, {}).get(EXACT):
            args, act = (gate, up), Origin(node, "act")
            product = self.write(exact_ops.silu_mul, args, act)
            y = self._flat(product, node)
            self.products[gate, up] = product, y
        else:
            _, _, y = self._gate(gate, up, node)
        straight = self.quantize(y, (rows, cols, *rest), False, None, node)
        if rows_t < 0:
            return (*straight, None, None)
        return (
            *straight,
            *self.quantize(y, (rows_t, cols_t, *rest), True, None, node),
        )

    def _kept(
        self, node: Node, index: int, codes: Node, scales: Node, rest: Sequence[Any]
    ) -> Any:
        """The gate, or up, whose codes forward kept for backward."""
        tensor: Any = self.made[node.meta[ORIGIN]["kept"][index]]
        source = tensor
        while source.target in _VIEWS:
            source = source.args[0]
        made: Any = codes.args[0]
        if (
            codes.target is not operator.getitem
            or (scales.target, scales.args) != (operator.getitem, (made, 1))
            or codes.args[1] != 0
            or (made.target, made.args[0]) != (ops.quantize, source)
            or made.args[1:6] != (1, 128, False, *rest)
        ):
            raise LoweringError(
                f"{node}: the codes of {('gate', 'up')[index]} that forward keeps are "
                f"not those of {source}; this is a fault of the compiler, please "
                "report it"
            )
        return tensor

    def _silu_mul_backward(self, node: Node) -> Value:
        dy, gate, up, gate_scales, up_scales, *numbers = self.args(node)
        rows, cols, rows_dy, cols_dy, rows_x, cols_x, *rest = numbers
        act, product = Origin(node, "act_backward"), Origin(node, "product_backward")
        if gate_scales is not None:
            gate = self._kept(node, 0, gate, gate_scales, rest)
            up = self._kept(node, 1, up, up_scales, rest)
        silu, _, y = self._gate(gate, up, node)
        dup = self.write(aten.mul.Tensor, (dy, silu), product)
        outer = self.write(aten.mul.Tensor, (dy, up), product)
        wide_outer = self.write(cast, (outer, torch.float32), act)
        wide = self.write(cast, (gate, torch.float32), act)
        sigmoid = self.write(aten.sigmoid.default, (wide,), act)
        scaled = self.write(aten.mul.Tensor, (wide_outer, sigmoid), act)
        rest_of_one = self.write(aten.sub.Tensor, (1, sigmoid), act)
        slope = self.write(aten.mul.Tensor, (wide, rest_of_one), act)
        slope = self.write(aten.add.Tensor, (slope, 1), act)
        dgate = self.write(aten.mul.Tensor, (scaled, slope), act)
        dgate = self.write(cast, (dgate, torch.bfloat16), act)
        both = [self._flat(dgate, node), self._flat(dup, node)]
        straight = self.each(both, 1, (rows, cols, *rest), False, None, node)
        turned = self.each(both, 1, (rows_dy, cols_dy, *rest), True, None, node)
        remade = self.quantize(y, (rows_x, cols_x, *rest), True, None, node)
        return (*straight, *turned, *remade)


def expand_fused(graph: Graph) -> Graph:
    """Return a graph without fused operators: the same one, if it has none."""
    plain = {
        ops.gemm,
        ops.quantize,
        ops.requantize,
        operator.getitem,
        aten.slice.Tensor,
    }
    expander = Expander(graph)
    fused = expander.rules.keys() - plain
    found = any(node.target in fused for node in graph.nodes)
    return expander.run() if found else graph
