"""Which nodes of a captured graph are weight GEMMs, and which of the three each is."""

from dataclasses import dataclass

from jetrl_compile.captured_graph import CapturedNode, Ref
from jetrl_compile.op_classes import (
    BF16_GEMM,
    EMBEDDINGS,
    LOWERED_GEMM,
    LOWERED_QUANTIZE,
    LOWERED_REQUANTIZE,
    MATMULS,
    SAME_MATRIX,
)
from jetrl_compile.tensor_sources import TensorSources, WeightSource

# Fused linear layers of inference engines, and the Hugging Face layers they hold.
FUSED_LAYERS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}

# Whose right operand is the weight as it is stored, (N, K).
STORED = ("linear", BF16_GEMM)


@dataclass(frozen=True, slots=True)
class GemmSite:
    """One weight GEMM.

    Attributes:
        node: Its index in the captured graph.
        role: "fprop", "dgrad" or "wgrad".
        module: Path of the linear layer.
        weight: The weight's node; for wgrad, that of the weight it is the gradient of.
        transposed: Whether the matrix that multiplies from the right is the stored
            weight transposed (nn.Linear: True in fprop; Conv1D: False). For wgrad,
            whether it is written x^T dy, with a (K, N) result, instead of dy^T x.
        a: The node read as the left operand; b: as the right operand, -1 if lowered
            operands hide it.
        bias: The node of a bias that the same operator adds, or None.
        weight_dtype: Short name of the dtype that the weight was rounded to.
    """

    node: int
    role: str
    module: str
    weight: int
    transposed: bool
    a: int
    b: int
    bias: int | None = None
    weight_dtype: str = ""


def operands(node: CapturedNode) -> tuple[int, int, int | None] | None:
    """Return the left, right and bias operands of a matmul, or None for another op.

    For those of `STORED`, the right operand is the weight as stored, (N, K).
    """
    if node.target not in MATMULS and node.target != BF16_GEMM:
        return None
    args = [arg.index if isinstance(arg, Ref) else None for arg in node.args]
    keyed = {k: v.index for k, v in node.kwargs.items() if isinstance(v, Ref)}
    if node.target in ("addmm", "baddbmm"):
        bias, a, b = (args + [None] * 3)[:3]
    else:
        a, b, bias = (args + [None] * 3)[:3]
        a = keyed.get("input", a)
        b = keyed.get("weight", keyed.get("mat2", keyed.get("other", b)))
        bias = keyed.get("bias", bias) if node.target == "linear" else None
    return None if a is None or b is None else (a, b, bias)


def quantized_operand(
    sources: TensorSources, index: int
) -> tuple[CapturedNode, int] | None:
    """Return the quantize (or dequantized storage) that makes a `jetrl.gemm` operand.

    Returns:
        Its node and index, or None where the codes are stored in the model.
    """
    made = sources.source(index).index
    node = sources.nodes[made]
    if node.target in (LOWERED_QUANTIZE, LOWERED_REQUANTIZE):
        return node, made
    return None


class GemmSites:
    """Finds the weight GEMMs of a graph by what their operands are.

    Attributes:
        sites: Them, by node index.
        lost: Paths of modules whose weight GEMM reads in forward what a matrix product
            of backward reads, which is no layer's gradient as far as is known.
    """

    def __init__(self, sources: TensorSources) -> None:
        self.sources = sources
        self.sites: dict[int, GemmSite] = {}
        self.lost: list[str] = []
        self._by_weight: dict[int, GemmSite] = {}
        self._by_module: dict[str, GemmSite] = {}
        self._by_input: dict[int, list[GemmSite]] = {}
        # The weights whose dgrad reads a gradient.
        self._by_gradient: dict[int, set[int]] = {}
        left: list[int] = []
        for index, node in enumerate(sources.nodes):
            if node.op != "call":
                continue
            lowered = node.target == LOWERED_GEMM
            found = self._lowered if lowered else self._plain
            site = found(index, node)
            if site is not None:
                self._add(site)
            elif node.backward and (lowered or operands(node) is not None):
                left.append(index)
        # What reads no weight may be a weight's gradient: of the layer that reads the
        # same x, runs in the same module, and whose dgrad reads the same dy.
        for index in left:
            site = self._wgrad(index, sources.nodes[index])
            if site is not None:
                self._add(site)
            else:
                self._lose(sources.nodes[index])

    def _lose(self, node: CapturedNode) -> None:
        found = operands(node)
        if found is None or len(node.shape) != 2:
            return
        for operand in found[:2]:
            readers = self._by_input.get(self._origin(operand), ())
            self.lost += [site.module for site in readers]

    def _add(self, site: GemmSite) -> None:
        self.sites[site.node] = site
        if site.role == "fprop":
            self._by_weight.setdefault(site.weight, site)
            self._by_module.setdefault(site.module, site)
            self._by_input.setdefault(self._origin(site.a), []).append(site)
        elif site.role == "dgrad":
            weights = self._by_gradient.setdefault(self._origin(site.a), set())
            weights.add(site.weight)

    def stored(self, weight: int) -> int:
        """Return the placeholder behind a weight: through a dequantize to its codes."""
        node = self.sources.nodes[weight]
        if node.op == "call" and self.sources.inputs[weight]:
            return self.sources.source(self.sources.inputs[weight][0]).index
        return weight

    def _module(self, node: CapturedNode, weight: int) -> str:
        """Prefer a linear module that ran it (a tied weight has another's name)."""
        if node.module and "Linear" in node.module_class:
            return node.module
        stored = self.stored(weight)
        # A weight that its module holds under another name is a layer of its own.
        name = self.sources.nodes[stored].module
        path, _, leaf = name.rpartition(".")
        if leaf != "weight":
            path = name
        tied = any(
            self.sources.nodes[user].target in EMBEDDINGS
            for user in self.sources.users[stored]
        )
        if tied and node.module:
            return node.module
        return path if name else node.module or self.sources.nodes[stored].name

    def _plain(self, index: int, node: CapturedNode) -> GemmSite | None:
        found = operands(node)
        if found is None:
            return None
        a, b, bias = found
        weight = self.sources.weight(b)
        if node.target in STORED and weight is not None:
            weight = WeightSource(weight.index, not weight.transposed, weight.dtype)
        if not node.backward:
            if weight is None or (node.target == "bmm" and not self._same(b)):
                return None
            if self.sources.of_parameters[a]:  # makes a weight of weights
                return None
            module = self._module(node, weight.index)
            return GemmSite(
                index,
                "fprop",
                module,
                weight.index,
                weight.transposed,
                a,
                b,
                bias,
                weight.dtype,
            )
        if weight is not None and weight.index in self._by_weight:
            # dx = dy w: the stored matrix as it is for nn.Linear.
            forward = self._forward(node, weight.index)
            return GemmSite(
                index,
                "dgrad",
                forward.module,
                weight.index,
                weight.transposed,
                a,
                b,
                None,
                weight.dtype,
            )
        return None

    def _same(self, index: int) -> bool:
        """Whether a batched right operand is one matrix, expanded."""
        return self.sources.weight(index) is not None

    def _forward(self, node: CapturedNode, weight: int) -> GemmSite:
        by_module = self._by_module.get(node.module)
        if by_module is not None and by_module.weight == weight:
            return by_module
        return self._by_weight[weight]

    def _wgrad(self, index: int, node: CapturedNode) -> GemmSite | None:
        lowered = node.target == LOWERED_GEMM
        if lowered:
            a, b = node.args[0].index, node.args[2].index
        else:
            found = operands(node)
            assert found is not None
            a, b, _ = found
            if len(node.shape) == 3:
                return None  # a product for each of the batch, which are added up later
        for transposed, x, dy in ((False, b, a), (True, a, b)):
            forward = self._reader(node, x, dy, transposed)
            if forward is not None and not (lowered and transposed):
                return GemmSite(
                    index, "wgrad", forward.module, forward.weight, transposed, a, b
                )
        return None

    def _reader(
        self, node: CapturedNode, x: int, dy: int, transposed: bool
    ) -> GemmSite | None:
        """The forward GEMM that reads x and whose weight has the shape of `node`."""
        found = []
        for site in self._by_input.get(self._origin(x), ()):
            stored = self.sources.nodes[self.stored(site.weight)].shape
            flipped = node.target != LOWERED_GEMM and transposed == site.transposed
            shapes = [stored[::-1] if flipped else stored]
            if node.target == LOWERED_GEMM:  # (N, K), however the weight is stored
                shapes.append(stored[::-1])
            if len(stored) != 2 or node.shape[-2:] in shapes:
                found.append(site)
        weights = self._by_gradient.get(self._origin(dy), set())
        for fits in (
            lambda site: self.sources.nodes[site.node].module == node.module,
            lambda site: site.weight in weights,
        ):
            found = list(filter(fits, found)) or found
        return found[0] if len({site.weight for site in found}) == 1 else None

    def _origin(self, index: int) -> int:
        """The tensor behind an operand: before quantization, where there is one."""
        made = quantized_operand(self.sources, index)
        if made is None:
            return self._matrix(index)
        return self._origin(made[0].args[0].index)

    def _matrix(self, index: int) -> int:
        """The tensor behind transposes, reshapes."""
        nodes, inputs = self.sources.nodes, self.sources.inputs
        while nodes[index].target in SAME_MATRIX and inputs[index]:
            index = inputs[index][0]
        return index

    def _lowered(self, index: int, node: CapturedNode) -> GemmSite | None:
        """Read a `jetrl.gemm` back: its role follows from what its operands hold."""
        a, b = node.args[0].index, node.args[2].index
        made = quantized_operand(self.sources, b)
        weight = self.sources.weight(b if made is None else made[0].args[0].index)
        if weight is None:
            return None
        if node.backward:
            if weight.index not in self._by_weight:
                return None
            role, module = "dgrad", self._forward(node, weight.index).module
        else:
            role, module = "fprop", self._module(node, weight.index)
        return GemmSite(
            index, role, module, weight.index, False, a, b, None, weight.dtype
        )
