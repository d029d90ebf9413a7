"""Split fused linear layers, as engines and some models have them, into their parts."""

from itertools import pairwise

from jetrl_compile.captured_graph import CapturedNode, Ref
from jetrl_compile.gemm_sites import FUSED_LAYERS, STORED, GemmSite, GemmSites
from jetrl_compile.granularity import BLOCK_128X128
from jetrl_compile.op_classes import (
    ADDS,
    GATED_ACTIVATIONS,
    LOWERED_DEQUANTIZE,
    LOWERED_GEMM,
    PARTIAL_VIEWS,
    SPLITS,
)
from jetrl_compile.precision_graph import Scalar
from jetrl_compile.tensor_sources import TensorSources

BLOCK_ROWS = BLOCK_128X128.rows


class FusedLayers:
    """Parts of each fused layer: known names, row ranges as its readers cut them.

    Attributes:
        biased: For each add of a bias to a fused layer's result, the layer's GEMM.
    """

    def __init__(self, sources: TensorSources, sites: GemmSites) -> None:
        self.sources = sources
        self.sites = sites
        self.biased: dict[int, int] = {}
        self._bounds: dict[int, list[int]] = {}  # of a GEMM, and of its bias add
        self._weights: dict[int, int] = {}
        for index, site in sites.sites.items():
            if site.role != "fprop":
                continue
            names = FUSED_LAYERS.get(site.module.rpartition(".")[2])
            rows = sources.nodes[index].shape[-1:] or (None,)
            if names is None or rows[0] is None:
                continue
            carriers, bounds = self._cuts(index, rows[0], len(names))
            if bounds is None:
                continue
            self._weights.setdefault(sites.stored(site.weight), index)
            if site.bias is not None:
                self._weights[sources.source(site.bias).index] = index
            for carrier in carriers:
                self._bounds[carrier] = bounds
                if carrier != index:
                    self.biased[carrier] = index
                    self._weights[self.bias_of(carrier)] = index

    def split(self, site: GemmSite) -> list[tuple[str, dict[str, Scalar]]]:
        """Return module path and parameters of each layer that a GEMM holds."""
        n, k = self._shape(site)
        gemm = self._weights.get(self.sites.stored(site.weight), -1)
        bounds = self._bounds.get(gemm)
        leaf = site.module.rpartition(".")[2]
        if bounds is None or leaf not in FUSED_LAYERS:
            return [(site.module, {"N": n, "K": k})]
        prefix = site.module.removesuffix(leaf)
        straddled: set[int] = set()
        if site.role == "fprop" and not self._blocks_by_part(site, bounds):
            straddled = {cut for cut in bounds[1:-1] if cut % BLOCK_ROWS}
        found: list[tuple[str, dict[str, Scalar]]] = []
        for name, (low, high) in zip(FUSED_LAYERS[leaf], pairwise(bounds), strict=True):
            params: dict[str, Scalar] = {"N": high - low, "K": k}
            if straddled & {low, high}:
                cuts = " and ".join(map(str, sorted(straddled & {low, high})))
                params["straddles"] = (
                    f"{BLOCK_ROWS}-row blocks of {leaf} cross its seam at row {cuts}"
                )
            found.append((prefix + name, params))
        return found

    def parameter_names(self, index: int) -> list[str] | None:
        """Return the names of the parts of a fused layer's weight or bias."""
        gemm = self._weights.get(index)
        if gemm is None:
            return None
        kind = self.sources.nodes[index].module.rpartition(".")[2]
        return [f"{name}.{kind}" for name, _ in self.split(self.sites.sites[gemm])]

    def parts_read(self, read: int) -> tuple[int, ...] | None:
        """Return which parts a reader of a fused layer's result takes, or None."""
        nodes, parent = self.sources.nodes, self.sources.parent
        made = self.sources.source(read).index
        bounds = self._bounds.get(made)
        if bounds is None:
            return None
        found: tuple[int, int] | None = None
        index = read
        while index != made:
            # The cut next to the layer; later ones cut heads.
            found = self._cut(nodes[index], bounds[-1]) or found
            index = parent[index]
        if found is None:
            return None
        low, high = found
        return tuple(
            part
            for part in range(len(bounds) - 1)
            if bounds[part] < high and low < bounds[part + 1]
        )

    def bias_of(self, carrier: int) -> int:
        """Return the bias that a `biased` node adds."""
        sources = self.sources
        read = next(i for i in sources.inputs[carrier] if sources.is_parameter(i))
        return sources.source(read).index

    def _blocks_by_part(self, site: GemmSite, bounds: list[int]) -> bool:
        """Whether stored scales are those of the parts, each with blocks of its own."""
        nodes = self.sources.nodes
        node = nodes[site.weight]
        if node.attributes.get("blocks_by_part"):
            return True
        scales: Ref | None = None
        if node.target == LOWERED_DEQUANTIZE:
            scales = node.args[1]
        elif nodes[site.node].target == LOWERED_GEMM:
            scales = nodes[site.node].args[3]
        if not isinstance(scales, Ref):
            return False
        if nodes[self.sources.source(scales.index).index].op != "placeholder":
            return False
        rows = nodes[scales.index].shape[0] if nodes[scales.index].shape else None
        parts = pairwise(bounds)
        apart = sum(-(-(high - low) // BLOCK_ROWS) for low, high in parts)
        return rows == apart != -(-bounds[-1] // BLOCK_ROWS)

    def _shape(self, site: GemmSite) -> tuple[int, int]:
        """N and K of the layer, from the GEMM's operands or result; -1 if dynamic."""
        nodes = self.sources.nodes
        node = nodes[site.node]
        a, b = nodes[site.a].shape, nodes[site.b].shape
        n: int | None
        k: int | None
        if node.target == LOWERED_GEMM:  # a b^T
            n, k = {
                "fprop": (b[0], b[1]),
                "dgrad": (b[1], b[0]),
                "wgrad": (a[0], b[0]),
            }[site.role]
        elif site.role == "wgrad":
            n, k = node.shape[::-1] if site.transposed else node.shape
        elif site.role == "dgrad" or node.target in STORED:
            n, k = b[-2:]
        else:
            k, n = b[-2:]
        return (-1 if n is None else n, -1 if k is None else k)

    def _cuts(
        self, index: int, rows: int, parts: int
    ) -> tuple[list[int], list[int] | None]:
        """Where the readers cut a fused result; halves of a gated activation too.

        Returns:
            The GEMM and the bias adds whose results are cut, and the bounds.
        """
        nodes, passes = self.sources.nodes, self.sources.passes
        ranges: set[tuple[int, int]] = set()
        carriers = [index]
        pending = [index]
        gated = False
        while pending:
            for user in self.sources.users[pending.pop()]:
                node = nodes[user]
                cut = self._cut(node, rows)
                if cut is not None:
                    ranges.add(cut)
                elif node.target in GATED_ACTIVATIONS:
                    gated = True
                elif passes[user]:
                    pending.append(user)
                elif self._adds_bias(user, rows):
                    carriers.append(user)
                    pending.append(user)
        if gated and parts == 2:
            return carriers, [0, rows // 2, rows]
        bounds = sorted({bound for pair in ranges for bound in pair} | {0, rows})
        return carriers, bounds if len(bounds) == parts + 1 else None

    def _adds_bias(self, index: int, rows: int) -> bool:
        node = self.sources.nodes[index]
        read = self.sources.inputs[index]
        if node.target not in ADDS or node.backward or len(read) != 2:
            return False
        biases = [i for i in read if self.sources.is_parameter(i)]
        return len(biases) == 1 and self.sources.nodes[biases[0]].shape == (rows,)

    def _cut(self, node: CapturedNode, rows: int) -> tuple[int, int] | None:
        """Return the columns that a node takes of the fused result, or None."""
        if node.target not in PARTIAL_VIEWS or not node.args:
            return None
        source = node.args[0]
        if not isinstance(source, Ref):
            return None
        cut = self.sources.nodes[source.index]
        key = node.args[1] if len(node.args) > 1 else None
        if node.target == "getitem" and isinstance(key, int):
            return self._split_cut(cut, key, rows)
        if cut.shape[-1:] != (rows,):
            return None
        if node.target == "getitem":
            whole = isinstance(key, tuple) and (
                "..." in key or len(key) == len(cut.shape)
            )
            last = key[-1] if isinstance(key, tuple) and whole else None
            if isinstance(last, dict) and "slice" in last:
                low, high, step = last["slice"]
                return _within(low, high, rows) if step in (None, 1) else None
            return None
        if node.target in ("slice", "narrow") and len(node.args) >= 4:
            dim, low, high = node.args[1:4]
            if node.target == "narrow":
                high = low + high
            if dim in (-1, len(cut.shape) - 1):
                return _within(low, high, rows)
        return None

    def _split_cut(
        self, node: CapturedNode, key: int, rows: int
    ) -> tuple[int, int] | None:
        if node.target not in SPLITS or not isinstance(node.args[0], Ref):
            return None
        shape = self.sources.nodes[node.args[0].index].shape
        dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
        if shape[-1:] != (rows,) or dim not in (-1, len(shape) - 1):
            return None
        args = node.args[1] if len(node.args) > 1 else 0
        names = ("split_size", "split_size_or_sections", "split_sizes", "chunks")
        sizes = next((node.kwargs[n] for n in names if n in node.kwargs), args)
        if node.target == "chunk" and isinstance(sizes, int):
            sizes = -(-rows // sizes)
        if isinstance(sizes, int):
            return (key * sizes, min(rows, (key + 1) * sizes)) if sizes else None
        if not all(isinstance(size, int) for size in sizes) or sum(sizes) != rows:
            return None
        low = sum(sizes[:key])
        return (low, low + sizes[key])


def _within(low: object, high: object, rows: int) -> tuple[int, int] | None:
    """Return the bounds of a slice of `rows` columns, or None for all or unknown."""
    first = 0 if low is None else low
    end = rows if high is None else high
    if not isinstance(first, int) or not isinstance(end, int):
        return None
    first = max(0, first + rows) if first < 0 else first
    end = end + rows if end < 0 else min(rows, end)
    return None if (first, end) == (0, rows) or first >= end else (first, end)
