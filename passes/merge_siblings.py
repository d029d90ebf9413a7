"""Make one GEMM of the GEMMs of layers that read one tensor: q, k, v; gate, up.

- fprop: the weights lie below each other, so the results lie beside each other.
- dgrad: the gradients that the layers return for their common input are added up; one
  GEMM over all their out features adds them in its FP32 accumulator.
- wgrad: the gradients of the outputs lie beside each other, so the gradients of the
  weights lie below each other. Each is a view of one tensor.

A 128-row block must not belong to two layers, so all weights but the last need out
features that are a multiple of 128; others are left as they are, with the reason.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from jetrl_compile.kernels import fused_ops, ops
from jetrl_compile.kernels.dispatch import select
from jetrl_compile.passes.context import Context, LoweredGemm
from jetrl_compile.passes.expand_fused import ORIGIN, SUM
from jetrl_compile.passes.graph_nodes import (
    emit,
    emit_item,
    kept_meta,
    maker_of,
    refresh_values,
    replace_uses,
    sort_nodes,
)

aten = torch.ops.aten
BLOCK = 128
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def merge_siblings(context: Context) -> int:
    """Merge GEMMs; return how many became part of another."""
    if context.annotated is None or not context.fuse:
        return 0
    worker = _Merger(context)
    worker.run()
    if worker.count:
        sort_nodes(context.graph)
        context.graph.eliminate_dead_code()
        refresh_values(context.graph)
        context.changed()
    return worker.count


def _quantize_of(codes: Any) -> Node | None:
    return maker_of(codes, ops.quantize)


class _Merger:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.graph = context.graph
        self.count = 0
        self.by_name = {
            (gemm.role, gemm.module): node
            for node, gemm in context.lowered.items()
            if len(gemm.names) == 1
        }

    def run(self) -> None:
        groups: dict[Any, list[Node]] = {}
        for (role, _), node in self.by_name.items():
            if role == "fprop":
                groups.setdefault((node.args[0], *node.args[4:10]), []).append(node)
        for siblings in groups.values():
            if len(siblings) < 2:
                continue
            modules = [self.context.lowered[node].module for node in siblings]
            why = self._unfit(siblings)
            if why is None:
                why = self._merge(siblings, modules)
            if why is not None:
                names = ", ".join(modules)
                self.context.notes.append(f"{names}: GEMMs not merged: {why}")

    def _unfit(self, fprop: list[Node]) -> str | None:
        made = [_quantize_of(node.args[2]) for node in fprop]
        if any(q is None for q in made):
            return "their weights are stored in FP8"
        weights = [q.args[0] for q in made if q is not None]
        sizes = [node.meta["val"].shape[1] for node in fprop]
        if any(not isinstance(n, int) or n % BLOCK for n in sizes[:-1]):
            return f"out features {sizes} are not multiples of {BLOCK}"
        if len(set(weights)) < len(weights):
            return "two of them have one weight"
        if len({q.args[1:6] for q in made if q is not None}) > 1:
            return "their weights have different flows, or are stored transposed"
        return None

    def _merge(self, fprop: list[Node], modules: list[str]) -> str | None:
        """Merge layers in all three roles that they have; return why not."""
        dgrads = [self.by_name.get(("dgrad", module)) for module in modules]
        wgrads = [self.by_name.get(("wgrad", module)) for module in modules]
        top = None
        if any(dgrads):
            if not all(dgrads) or not self._alike(dgrads):
                return "their dgrads are not alike"
            top = _sum_of([node for node in dgrads if node is not None])
            if top is None:
                return "the gradients for their input are not added up alone"
        if any(wgrads) and not (all(wgrads) and self._alike(wgrads)):
            return "their wgrads are not alike"
        self._fprop(fprop)
        if top is not None:
            self._dgrad([node for node in dgrads if node is not None], *top)
        if any(wgrads):
            self._wgrad([node for node in wgrads if node is not None])
        return None

    def _alike(self, gemms: Sequence[Node | None]) -> bool:
        """Whether gradients are quantized alike, and the GEMMs differ in them alone."""
        keys = set()
        for node in gemms:
            assert node is not None
            made = _quantize_of(node.args[0])
            if made is None:
                return False
            wgrad = self.context.lowered[node].role == "wgrad"
            shared = node.args[2] if wgrad else None
            other = _quantize_of(node.args[2])
            if not wgrad and other is None:
                return False
            flow = None if wgrad or other is None else other.args[1:6]
            keys.add((shared, flow, made.args[1:6], node.args[4:9]))
        return len(keys) == 1

    def _gemm(self, merged: list[Node], a: tuple[Any, Any], b: tuple[Any, Any]) -> Node:
        known = [self.context.lowered.pop(node) for node in merged]
        shape = replace(known[0].shape, n=sum(gemm.shape.n for gemm in known))
        choice = select(shape, self.context.providers)
        args = (*a, *b, *merged[0].args[4:9], choice.provider.name)
        result = emit(self.graph, ops.gemm, args, merged[0])
        result.meta[ORIGIN] = {
            f"gemm{i}": kept_meta(node) for i, node in enumerate(merged)
        }
        names = tuple(name for gemm in known for name in gemm.names)
        self.context.choices |= dict.fromkeys(names, choice)
        self.context.lowered[result] = LoweredGemm(
            names, known[0].role, known[0].module, shape
        )
        self.count += len(merged)
        return result

    def _quantize(
        self, quantizes: Sequence[Node | None], dim: int, after: Any, at: Node
    ) -> tuple[Node, Node]:
        made = [q for q in quantizes if q is not None]
        args = ([q.args[0] for q in made], dim, *made[0].args[1:6], after)
        parts = emit(self.graph, fused_ops.quantize_parts, args, at)
        return (
            emit_item(self.graph, parts, 0, at),
            emit_item(self.graph, parts, 1, at),
        )

    def _cut(self, whole: Node, merged: list[Node], dim: int) -> None:
        at = 0
        for node in merged:
            end = at + node.meta["val"].shape[dim]
            args = (whole, dim, at, end)
            replace_uses(node, emit(self.graph, aten.slice.Tensor, args, node))
            at = end

    def _fprop(self, merged: list[Node]) -> None:
        first = merged[0]
        with self.graph.inserting_before(first):
            weights = [_quantize_of(node.args[2]) for node in merged]
            b = self._quantize(weights, 0, None, first)
            whole = self._gemm(merged, (first.args[0], first.args[1]), b)
            self._cut(whole, merged, 1)

    def _dgrad(self, merged: list[Node], top: Node, order: Any, view: Any) -> None:
        first = merged[0]
        with self.graph.inserting_before(top):
            dys = [_quantize_of(node.args[0]) for node in merged]
            a = self._quantize(dys, 1, None, first)
            weights = [_quantize_of(node.args[2]) for node in merged]
            b = self._quantize(weights, 0, a[0], first)
            whole = self._gemm(merged, a, b)
            adds: dict[str, Any] = {}
            whole.meta[SUM] = self._steps(merged, order, adds)
            whole.meta[ORIGIN] |= adds
            result = whole
            if view is not None:
                result = emit(self.graph, aten.view.default, (whole, view), top)
        replace_uses(top, result)

    def _steps(
        self, gemms: list[Node], order: Any, adds: dict[str, Any]
    ) -> tuple[Any, ...]:
        """The GEMMs and additions in the order in which the graph had them.

        A GEMM is its number; an addition is its name and the steps that it adds.
        """
        taken: list[tuple[Node, Any]] = [(node, i) for i, node in enumerate(gemms)]
        pending = [order]
        while pending:
            term = pending.pop()
            if isinstance(term, tuple):
                taken.append((term[0], term))
                pending += term[1:]
        position = {node: i for i, node in enumerate(self.graph.nodes)}
        taken.sort(key=lambda item: position[item[0]])
        step = {node: i for i, (node, _) in enumerate(taken)}
        steps: list[Any] = []
        for node, term in taken:
            if isinstance(term, int):
                steps.append(term)
                continue
            name = f"add{len(adds)}"
            adds[name] = kept_meta(node)
            a, b = (gemms[t] if isinstance(t, int) else t[0] for t in term[1:])
            steps.append((name, step[a], step[b]))
        return tuple(steps)

    def _wgrad(self, merged: list[Node]) -> None:
        first = merged[0]
        with self.graph.inserting_before(first):
            dys = [_quantize_of(node.args[0]) for node in merged]
            a = self._quantize(dys, 1, None, first)
            whole = self._gemm(merged, a, (first.args[2], first.args[3]))
            self._cut(whole, merged, 0)


def _sum_of(gemms: list[Node]) -> tuple[Node, Any, Any] | None:
    """The addition that is the sum of GEMMs and of nothing else.

    Returns:
        Its node; the order of additions, a number of a GEMM or (addition, a, b); and
        the shape that the results are viewed in, or None for matrices.
    """
    terms: dict[Node, Any] = {}
    views = set()
    shape = None
    for number, node in enumerate(gemms):
        users = list(node.users)
        if len(users) == 1 and users[0].target in _VIEWS:
            node, shape = users[0], users[0].args[1]
        views.add(str(node.meta["val"].shape))
        terms[node] = number
    if len(views) > 1:
        return None
    while len(terms) > 1:
        found = None
        for node in terms:
            for user in node.users:
                if (
                    len(node.users) == 1
                    and user.target is aten.add.Tensor
                    and not user.kwargs
                    and all(term in terms for term in user.args)
                    and all(len(t.users) == 1 for t in user.args)  # type: ignore[union-attr]
                    and user.args[0] is not user.args[1]
                ):
                    found = user
        if found is None:
            return None
        a, b = found.args
        terms[found] = (found, terms.pop(a), terms.pop(b))  # type: ignore[arg-type]
    ((top, order),) = terms.items()
    return top, order, shape
