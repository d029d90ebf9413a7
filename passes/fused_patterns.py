"""The forms of norms and gated activations that have a fused kernel.

A form is matched operator by operator, in the order that Hugging Face's model code
writes it; anything else (a weight of 1 + w, a product in FP32) has no kernel and stays
as it is.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from jetrl_compile.kernels import exact_ops
from jetrl_compile.kernels.reference_exact import NARROW
from jetrl_compile.passes.graph_nodes import kept_meta
from jetrl_compile.passes.graph_writer import EXACT

aten = torch.ops.aten
cast = torch.ops.prims.convert_element_type.default
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


@dataclass(frozen=True)
class RmsNorm:
    """weight * bf16(x * rsqrt(mean(x^2) + eps)), with x = a + b or one tensor.

    Attributes:
        result: The node of the result.
        x: What is normalized.
        added: The two terms of x, if it is a sum that may be fused, or None.
        weight: The weight.
        eps: A number, or the node of one.
        rstd: The node of rsqrt(...); None where nothing reads it.
        wide: The node of x in FP32, or of the operator of exact mode.
        exact: Whether it is that operator.
    """

    result: Node
    x: Node
    added: tuple[Node, Node] | None
    weight: Node
    eps: Any
    rstd: Node | None
    wide: Node
    exact: bool = False

    def origin(self) -> dict[str, Any]:
        """The metadata of what a fused operator replaces, by role."""
        shift = self.wide
        if self.rstd is not None and not self.exact:
            shift = self.rstd.all_input_nodes[0]
        return {
            "norm": kept_meta(self.result),
            "add": kept_meta(self.x),
            "shift": kept_meta(shift),
            EXACT: self.exact,
        }


@dataclass(frozen=True)
class Gated:
    """bf16(silu(gate)) * up.

    Attributes:
        result: The node of the product.
        silu: The node of silu(gate) in BF16; None where backward does not read it, and
            the operator of exact mode computes both.
        gate: The gate.
        up: The other factor.
        exact: Whether it is that operator.
    """

    result: Node
    silu: Node | None
    gate: Node
    up: Node
    exact: bool = False

    @property
    def forward(self) -> Any:
        """The node that has the activation's metadata in forward."""
        return self.result if self.exact else self.silu


def unviewed(node: Any) -> Any:
    """Return the tensor behind reshapes."""
    while isinstance(node, Node) and node.target in VIEWS:
        node = node.args[0]
    return node


def calls(node: Any, target: Any) -> bool:
    """Whether something is a call of an operator without keyword arguments."""
    return isinstance(node, Node) and node.target is target and not node.kwargs


def casts(node: Any, dtype: torch.dtype, source: torch.dtype | None = None) -> bool:
    """Whether something is a cast to a dtype (from one)."""
    return (
        calls(node, cast)
        and node.args[1] == dtype
        and (source is None or node.args[0].meta["val"].dtype == source)
    )


def match_norm(result: Any) -> RmsNorm | None:
    """Return the RMSNorm that a node is the result of, or None."""
    if calls(result, operator.getitem) and calls(result.args[0], exact_ops.rms_norm):
        return _exact_norm(result)
    if not calls(result, aten.mul.Tensor):
        return None
    weight, narrow = result.args
    if not casts(narrow, torch.bfloat16, torch.float32):
        return None
    if not isinstance(weight, Node) or weight.meta["val"].dtype != torch.bfloat16:
        return None
    product = narrow.args[0]
    if not calls(product, aten.mul.Tensor) or weight.meta["val"].dim() != 1:
        return None
    wide, rstd = product.args
    if not casts(wide, torch.float32, torch.bfloat16):
        return None
    if not calls(rstd, aten.rsqrt.default) or not calls(rstd.args[0], aten.add.Tensor):
        return None
    mean, eps = rstd.args[0].args
    if not calls(mean, aten.mean.dim) or mean.args[1:] != ([-1], True):
        return None
    square = mean.args[0]
    if not calls(square, aten.pow.Tensor_Scalar) or square.args != (wide, 2):
        return None
    while calls(eps, cast):
        eps = eps.args[0]
    if isinstance(eps, Node) and eps.meta["val"].dim() != 0:
        return None
    x = wide.args[0]
    if str(weight.meta["val"].shape[0]) != str(x.meta["val"].shape[-1]):
        return None
    return RmsNorm(result, x, _terms(x), weight, eps, rstd, wide)


def why_apart(result: Node, x: Node, norm: RmsNorm | None) -> str | None:
    """Return why what makes a tensor does not quantize it, or None.

    Args:
        result: What is made.
        x: The view of it that is quantized.
        norm: The RMSNorm that makes it, if one does.
    """
    made, read = (t.meta["val"].shape[-1] for t in (result, x))
    if str(made) != str(read):
        return f"it is made in rows of {made} and read in rows of {read}"
    if norm is not None and norm.exact and int(made) <= NARROW:
        return f"exact mode adds up rows of up to {NARROW} in an order of their own"
    return None


def _exact_norm(result: Node) -> RmsNorm | None:
    node: Any = result.args[0]
    if result.args[1] != 0:
        return None
    x, weight, *eps = node.args
    rstd = next((user for user in node.users if user.args[1] == 1), None)
    return RmsNorm(result, x, _terms(x), weight, eps[eps[0] is None], rstd, node, True)


def _terms(x: Node) -> tuple[Node, Node] | None:
    """The two tensors that x is the sum of."""
    if not calls(x, aten.add.Tensor):
        return None
    a, b = x.args
    if not isinstance(a, Node) or not isinstance(b, Node):
        return None
    shapes = {str(t.meta["val"].shape) for t in (a, b, x)}
    dtypes = {t.meta["val"].dtype for t in (a, b, x)}
    return (a, b) if len(shapes) == 1 and dtypes == {torch.bfloat16} else None


def match_gated(result: Any) -> Gated | None:
    """Return the gated SiLU that a node is the result of, or None."""
    if calls(result, exact_ops.silu_mul):
        gate, up = result.args
        return Gated(result, _silu_of(gate), gate, up, True)
    if not calls(result, aten.mul.Tensor):
        return None
    silu, up = result.args
    if not casts(silu, torch.bfloat16, torch.float32) or not isinstance(up, Node):
        return None
    quotient = silu.args[0]
    if not calls(quotient, aten.div.Tensor):
        return None
    wide, divisor = quotient.args
    if not casts(wide, torch.float32, torch.bfloat16):
        return None
    if not calls(divisor, aten.add.Tensor) or divisor.args[1] != 1:
        return None
    power = divisor.args[0]
    if not calls(power, aten.exp.default) or not calls(power.args[0], aten.neg.default):
        return None
    if power.args[0].args[0] is not wide or up.meta["val"].dtype != torch.bfloat16:
        return None
    shapes = {str(t.meta["val"].shape) for t in (silu, up, result)}
    return Gated(result, silu, wide.args[0], up) if len(shapes) == 1 else None


def _silu_of(gate: Node) -> Node | None:
    """The node of silu(gate) that backward reads."""
    for wide in gate.users:
        for quotient in wide.users if casts(wide, torch.float32) else ():
            if not calls(quotient, aten.div.Tensor) or quotient.args[0] is not wide:
                continue
            for silu in quotient.users:
                if casts(silu, torch.bfloat16):
                    return silu
    return None


def match_gated_backward(dgate: Any, dup: Any, forward: Gated) -> Node | None:
    """Return the gradient of a gated SiLU's result, given those of its inputs."""
    if not calls(dup, aten.mul.Tensor) or dup.args[1] is not forward.silu:
        return None
    dy = dup.args[0]
    if not casts(dgate, torch.bfloat16, torch.float32):
        return None
    whole = dgate.args[0]
    if not calls(whole, aten.mul.Tensor):
        return None
    scaled, slope = whole.args
    if not calls(scaled, aten.mul.Tensor) or not calls(slope, aten.add.Tensor):
        return None
    outer, sigmoid = scaled.args
    wide = _sigmoid_of(sigmoid)
    if (
        not casts(outer, torch.float32)
        or not casts(wide, torch.float32)
        or wide.args[0] is not forward.gate
    ):
        return None
    product, one = slope.args
    if one != 1 or not calls(product, aten.mul.Tensor):
        return None
    other, rest = product.args
    if not casts(other, torch.float32) or other.args[0] is not forward.gate:
        return None
    if not calls(rest, aten.sub.Tensor) or rest.args != (1, sigmoid):
        return None
    gradient = outer.args[0]
    if not calls(gradient, aten.mul.Tensor) or gradient.args != (dy, forward.up):
        return None
    return dy if isinstance(dy, Node) else None


def _sigmoid_of(node: Any) -> Any:
    """What a node is the sigmoid of; torch 2.11 writes it as 1 / (1 + exp(-x))."""
    if calls(node, aten.sigmoid.default):
        return node.args[0]
    if not calls(node, aten.mul.Tensor) or node.args[1] != 1:
        return None
    inner: Any = node.args[0]
    for target in (aten.reciprocal.default, aten.add.Tensor, aten.exp.default):
        if not calls(inner, target) or (
            target is aten.add.Tensor and inner.args[1] != 1
        ):
            return None
        inner = inner.args[0]
    return inner.args[0] if calls(inner, aten.neg.default) else None
