"""Quantize where a tensor is made, and remake wgrad's x in backward.

- RMSNorm, with the residual add before it, and SiLU * mul quantize their results; no
  BF16 copy of what GEMMs alone read is left.
- x for wgrad is made again in backward from what is kept there anyway: the norm's input
  and factor; gate and up, which the backward of SiLU * mul reads; the result of an
  attention. Where nothing of the kind is kept, forward quantizes x twice from one read.
- A gradient is quantized for dgrad and for wgrad from one read, by the backward of
  SiLU * mul itself where it makes the gradient.
"""

from typing import Any

import torch
from torch.fx import Node

from jetrl_compile.kernels import fused_ops, ops
from jetrl_compile.passes.context import Context
from jetrl_compile.passes.expand_fused import EXACT, ORIGIN
from jetrl_compile.passes.fused_patterns import (
    Gated,
    RmsNorm,
    match_gated,
    match_gated_backward,
    match_norm,
    unviewed,
    why_apart,
)
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
_KEEPS = (
    aten.view.default,
    aten.reshape.default,
    aten.permute.default,
    aten.transpose.int,
    aten.clone.default,
    aten.alias.default,
)
NOT_MADE = (-1, 0)  # rows and columns of a transpose that is not wanted


def fuse_quantize(context: Context) -> int:
    """Fuse; return how many quantize operators became part of another."""
    if context.annotated is None:
        return 0
    if not context.fuse:
        if context.saved_gate_up != "bf16":
            context.notes.append(
                "gate and up are kept as they are: nothing is fused here; set fuse=True"
            )
        return 0
    worker = _Fuser(context)
    worker.forward()
    worker.backward()
    if worker.count:
        sort_nodes(context.graph)
        context.graph.eliminate_dead_code()
        refresh_values(context.graph)
        context.changed()
    return worker.count


def _made(codes: Any) -> Node | None:
    return maker_of(codes, ops.quantize, fused_ops.quantize_parts)


def _is_backward(node: Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def _flow(quantize: Node) -> tuple[Any, ...]:
    """Rows, columns, scale format and amax floor of a `quantize`."""
    rows, cols, _, scale_format, floor = quantize.args[1:6]
    return rows, cols, scale_format, floor


class _Fuser:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.graph = context.graph
        self.count = 0

    def forward(self) -> None:
        """Fuse what makes x."""
        straight: dict[Node, None] = {}
        for node, gemm in self.context.lowered.items():
            made = _made(node.args[0])
            if gemm.role == "fprop" and made is not None:
                straight[made] = None
        for quantize in straight:
            if quantize.target is not ops.quantize or quantize.args[3]:
                continue
            x = quantize.args[0]
            assert isinstance(x, Node)
            turned = self._turned(x)
            result = unviewed(x)
            norm, gated = match_norm(result), match_gated(result)
            others = self._other_readers(result)
            apart = f"{others[0].target} reads it too" if others else None
            apart = apart or why_apart(result, x, norm)
            if (norm or gated) and apart:
                self.context.notes.append(
                    f"{self._name(quantize)}: not fused with what makes x: {apart}"
                )
                norm = gated = None
            if norm is not None:
                self._norm(norm, quantize, turned)
            elif gated is not None:
                self._gate(gated, quantize, turned)
            elif turned is not None:
                self._plain(x, quantize, turned)

    def _name(self, quantize: Node) -> str:
        names = [
            gemm.names[0]
            for node, gemm in self.context.lowered.items()
            if _made(node.args[0]) is quantize
        ]
        return names[0] if names else quantize.name

    def _turned(self, x: Node) -> Node | None:
        """The quantize of x^T that forward makes for wgrad."""
        for user in x.users:
            if user.target is ops.quantize and user.args[3] and not _is_backward(user):
                return user
        return None

    def _other_readers(self, result: Any) -> list[Node]:
        """Forward readers of a result beside quantize operators."""
        found, pending = [], [result]
        while pending:
            for user in pending.pop().users:
                if user.target in _KEEPS:
                    pending.append(user)
                elif user.target is not ops.quantize and not _is_backward(user):
                    found.append(user)
        return found

    def _replace(self, quantize: Node, codes: Node, scales: Node) -> None:
        """Let the readers of a quantize read other codes and scales."""
        for item in list(quantize.users):
            item.replace_all_uses_with(codes if item.args[1] == 0 else scales)
        self.count += 1

    def _items(self, node: Node, slots: tuple[int, ...], anchor: Node) -> list[Node]:
        return [emit_item(self.graph, node, slot, anchor) for slot in slots]

    def _readers(self, quantize: Node) -> list[Node]:
        """The GEMMs that read a quantize."""
        items = list(quantize.users)
        return list(dict.fromkeys(user for item in items for user in item.users))

    def _in_backward(
        self, turned: Node, target: Any, args: tuple[Any, ...], origin: Any
    ) -> None:
        """Make x^T in backward, once the gradient is quantized."""
        readers = self._readers(turned)
        reader = readers[0]
        with self.graph.inserting_before(reader):
            node = emit(self.graph, target, (*args, reader.args[0]), reader)
            if origin:
                node.meta[ORIGIN] = origin
            self._replace(turned, *self._items(node, (0, 1), reader))

    def _plain(self, x: Node, straight: Node, turned: Node) -> None:
        readers = self._readers(turned)
        if self._kept_anyway(x) and len(readers) == 1:
            self._in_backward(turned, ops.quantize, (x, *turned.args[1:6]), None)
        else:
            self._twice([x], 0, straight, turned)

    def _kept_anyway(self, x: Node) -> bool:
        """Whether backward reads x itself, seen through views."""
        root = x
        while root.target in _KEEPS:
            source = root.args[0]
            assert isinstance(source, Node)
            root = source
        pending = [root]
        while pending:
            for user in pending.pop().users:
                if _is_backward(user):
                    return True
                if user.target in _KEEPS:
                    pending.append(user)
        return False

    def _twice(self, parts: list[Any], dim: int, straight: Node, turned: Node) -> None:
        offset = 1 if straight.target is ops.quantize else 2
        rows, cols, _, scale_format, floor = straight.args[offset : offset + 5]
        rows_t, cols_t, _, format_t, floor_t = turned.args[offset : offset + 5]
        if (scale_format, floor) != (format_t, floor_t):
            self.context.notes.append(
                f"{self._name(straight)}: quantized from two reads: for wgrad it has "
                "another scale format or floor"
            )
            return
        args = (parts, dim, rows, cols, rows_t, cols_t, scale_format, floor)
        with self.graph.inserting_before(straight):
            node = emit(self.graph, fused_ops.quantize_twice, args, straight)
            items = self._items(node, (0, 1, 2, 3), straight)
        self._replace(straight, *items[:2])
        self._replace(turned, *items[2:])

    def _norm(self, norm: RmsNorm, straight: Node, turned: Node | None) -> None:
        rows, cols, scale_format, floor = _flow(straight)
        a, b = norm.added or (norm.x, None)
        number, tensor = (
            (0.0, norm.eps) if isinstance(norm.eps, Node) else (norm.eps, None)
        )
        quantizer = (rows, cols, *NOT_MADE, scale_format, floor)
        args = (a, b, norm.weight, number, tensor, *quantizer)
        origin = norm.origin()
        at = norm.x if norm.added else norm.wide
        with self.graph.inserting_before(at):
            node = emit(self.graph, fused_ops.rms_norm_quantize, args, straight)
            node.meta[ORIGIN] = origin
            codes, scales = self._items(node, (0, 1), straight)
            rstd = emit_item(self.graph, node, 4, norm.rstd or norm.wide)
            x = norm.x
            if norm.added:
                x = emit_item(self.graph, node, 5, norm.x)
        if norm.added:
            replace_uses(norm.x, x)
        if norm.rstd is not None:
            replace_uses(norm.rstd, rstd)
        self._replace(straight, codes, scales)
        if turned is not None:
            remade = (x, rstd, norm.weight, *turned.args[1:6])
            self._in_backward(turned, fused_ops.scale_rows_quantize, remade, origin)

    def _gate(self, gated: Gated, straight: Node, turned: Node | None) -> None:
        name = self._name(straight)
        rows, cols, scale_format, floor = _flow(straight)
        region, backward = NOT_MADE, None
        if turned is not None:
            backward = self._gated_backward(gated, turned)
            if _flow(turned)[2:] != _flow(straight)[2:]:
                self.context.notes.append(
                    f"{name}: x for wgrad is quantized apart: it has another scale "
                    "format or floor"
                )
            elif backward is None:
                region = (turned.args[1], turned.args[2])  # type: ignore[assignment]
        trains = any(gemm.role != "fprop" for gemm in self.context.lowered.values())
        if trains and backward is None and self.context.saved_gate_up != "bf16":
            self.context.notes.append(
                f"{name}: gate and up are kept as they are: no kernel is both their "
                "backward and wgrad's quantizer here"
            )
        args = (gated.gate, gated.up, rows, cols, *region, scale_format, floor)
        with self.graph.inserting_before(straight):
            node = emit(self.graph, fused_ops.silu_mul_quantize, args, straight)
            node.meta[ORIGIN] = {
                "act": kept_meta(gated.forward),
                "product": kept_meta(gated.result),
                EXACT: gated.exact,
            }
            items = self._items(node, (0, 1, 2, 3), straight)
        self._replace(straight, *items[:2])
        if turned is not None and region != NOT_MADE:
            self._replace(turned, *items[2:])
        elif turned is not None and backward is not None:
            self._gate_backward(name, gated, turned, *backward)

    def _gated_backward(self, gated: Gated, x: Node) -> tuple[Node, Node, Node] | None:
        """The two quantize operators of [dgate, dup], and dy, if one kernel makes all.

        They are merged, and have one scale format and floor, which `x` has too.
        """
        for dup in () if gated.silu is None else gated.silu.users:
            for view in (dup, *dup.users):
                for user in view.users:
                    if user.target is not fused_ops.quantize_parts or user.args[1] != 1:
                        continue
                    parts: Any = user.args[0]
                    if len(parts) != 2 or unviewed(parts[1]) is not dup:
                        continue
                    dy = match_gated_backward(unviewed(parts[0]), dup, gated)
                    pair = self._pair(user)
                    formats = {node.args[5:7] for node in pair or ()}
                    if dy is not None and pair and formats == {x.args[4:6]}:
                        return (*pair, dy)
        return None

    def _pair(self, quantize: Node) -> tuple[Node, Node] | None:
        """The straight and the transposed quantize of the same parts."""
        first: Any = quantize.args[0]
        found: dict[bool, Node] = {}
        for user in first[0].users:
            if (
                user.target is quantize.target
                and user.args[:2] == quantize.args[:2]
                and user.args[-1] is None
            ):
                found[bool(user.args[4])] = user
        return (found[False], found[True]) if len(found) == 2 else None

    def _gate_backward(
        self, name: str, gated: Gated, x: Node, straight: Node, turned: Node, dy: Node
    ) -> None:
        flows = [straight.args[2:4], turned.args[2:4], x.args[1:3]]
        gate, up, kept = gated.gate, gated.up, self._keep(name, gated, straight)
        args = (dy, *kept, *[n for f in flows for n in f], *straight.args[5:7])
        parts: Any = straight.args[0]
        with self.graph.inserting_before(straight):
            node = emit(
                self.graph, fused_ops.silu_mul_backward_quantize, args, straight
            )
            node.meta[ORIGIN] = {
                "act": kept_meta(gated.silu),
                "product": kept_meta(gated.result),
                "act_backward": kept_meta(unviewed(parts[0])),
                "product_backward": kept_meta(unviewed(parts[1])),
                "kept": (gate, up),
                EXACT: gated.exact,
            }
            items = self._items(node, (0, 1, 2, 3, 4, 5), straight)
        self._replace(straight, *items[:2])
        self._replace(turned, *items[2:4])
        self._replace(x, *items[4:])

    def _keep(
        self, name: str, gated: Gated, backward: Node
    ) -> tuple[Any, Any, Any, Any]:
        """What backward reads of gate and up: them, or codes that forward kept."""
        gate, up = gated.gate, gated.up
        if self.context.saved_gate_up == "bf16":
            return gate, up, None, None
        whole = unviewed(gate)
        width = gate.meta["val"].shape[-1]
        same = (
            whole.target is aten.slice.Tensor
            and unviewed(up).target is aten.slice.Tensor
            and unviewed(up).args[0] is whole.args[0]
            and isinstance(width, int)
            and width % 128 == 0
        )
        if not same:
            self.context.notes.append(
                f"{name}: gate and up are kept in BF16: they are not the halves of "
                "one GEMM's result in multiples of 128"
            )
            return gate, up, None, None
        source, anchor = whole.args[0], gated.result
        with self.graph.inserting_before(anchor):
            args = (source, 1, 128, False, *backward.args[5:7], None)
            codes, scales = self._items(
                emit(self.graph, ops.quantize, args, anchor), (0, 1), anchor
            )
        with self.graph.inserting_before(backward):
            halves = [
                emit(self.graph, aten.slice.Tensor, (t, 1, at, at + size), backward)
                for t, size in ((codes, width), (scales, width // 128))
                for at in (0, size)
            ]
        return halves[0], halves[1], halves[2], halves[3]

    def backward(self) -> None:
        """Quantize each gradient for dgrad and wgrad from one read."""
        for node, gemm in list(self.context.lowered.items()):
            straight = _made(node.args[0])
            if gemm.role != "dgrad" or straight is None or not straight.users:
                continue
            if straight.target is ops.quantize:
                x: Any = straight.args[0]
                turned = self._turned_gradient(x)
                if turned is not None:
                    self._twice([x], 0, straight, turned)
            else:
                pair = self._pair(straight)
                if pair is not None:
                    self._twice(straight.args[0], straight.args[1], *pair)  # type: ignore[arg-type]

    def _turned_gradient(self, dy: Node) -> Node | None:
        for user in dy.users:
            if (
                user.target is ops.quantize
                and user.args[3]
                and user.args[6] is None
                and _is_backward(user)
            ):
                return user
        return None
