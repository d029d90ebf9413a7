"""Split the fused linear layers of inference engines into Hugging Face's layers."""

from jetrl_compile.capture import CapturedNode, Ref
from jetrl_compile.gemm_sites import FUSED_LAYERS, GemmSite, GemmSites
from jetrl_compile.op_classes import GATED_ACTIVATIONS, LOWERED_GEMM, SPLITS
from jetrl_compile.precision_graph import Scalar
from jetrl_compile.tensor_sources import TensorSources

BLOCK_ROWS = 128


class FusedLayers:
    """Parts of each fused layer: known names, row ranges as its readers cut them."""

    def __init__(self, sources: TensorSources, sites: GemmSites) -> None:
        self.sources = sources
        self.sites = sites
        self._bounds: dict[int, list[int]] = {}
        self._weights: dict[int, int] = {}
        for index, site in sites.sites.items():
            if site.role != "fprop":
                continue
            names = FUSED_LAYERS.get(site.module.rpartition(".")[2])
            rows = sources.nodes[index].shape[-1:] or (None,)
            if names is None or rows[0] is None:
                continue
            bounds = self._cuts(index, rows[0], len(names))
            if bounds is not None:
                self._bounds[index] = bounds
                self._weights[sites.stored(site.weight)] = index
                if site.bias is not None:
                    self._weights[sources.source(site.bias).index] = index

    def split(self, site: GemmSite) -> list[tuple[str, dict[str, Scalar]]]:
        """Return module path and parameters of each layer that a GEMM holds."""
        n, k = self._shape(site)
        bounds = self._bounds.get(site.node)
        if bounds is None:
            return [(site.module, {"N": n, "K": k})]
        parent, _, leaf = site.module.rpartition(".")
        prefix = f"{parent}." if parent else ""
        found: list[tuple[str, dict[str, Scalar]]] = []
        straddled = [cut for cut in bounds[1:-1] if cut % BLOCK_ROWS]
        for name, low, high in zip(
            FUSED_LAYERS[leaf], bounds[:-1], bounds[1:], strict=True
        ):
            params: dict[str, Scalar] = {"N": high - low, "K": k}
            if straddled and {low, high} & set(straddled):
                cuts = ", ".join(map(str, straddled))
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

    def parts_read(self, read: int) -> list[int] | None:
        """Return which parts a reader of a fused layer's result takes, or None."""
        nodes, inputs = self.sources.nodes, self.sources.inputs
        cuts: list[tuple[int, int]] = []
        index = read
        made = self.sources.source(read).index
        bounds = self._bounds.get(made)
        if bounds is None:
            return None
        while index != made:
            cut = self._cut(nodes[index], bounds[-1])
            if cut is not None:
                cuts.append(cut)
            index = inputs[index][0]
        if len(cuts) != 1:
            return None
        low, high = cuts[0]
        return [
            part
            for part in range(len(bounds) - 1)
            if bounds[part] < high and low < bounds[part + 1]
        ]

    def _shape(self, site: GemmSite) -> tuple[int, int]:
        """N and K of the layer, from the GEMM's operands or result; -1 if dynamic."""
        nodes = self.sources.nodes
        node = nodes[site.node]
        a, b = nodes[site.a].shape, nodes[site.b].shape
        if node.target == LOWERED_GEMM:  # a b^T
            n, k = {
                "fprop": (b[0], b[1]),
                "dgrad": (b[1], b[0]),
                "wgrad": (a[0], b[0]),
            }[site.role]
        elif site.role == "wgrad":
            n, k = node.shape[::-1] if site.transposed else node.shape
        elif site.role == "dgrad" or node.target == "linear":
            n, k = b[-2:]
        else:
            k, n = b[-2:]
        return (-1 if n is None else n, -1 if k is None else k)

    def _cuts(self, index: int, rows: int, parts: int) -> list[int] | None:
        """Where the readers cut a fused result; halves of a gated activation too."""
        ranges: set[tuple[int, int]] = set()
        pending = [index]
        gated = False
        while pending:
            for user in self.sources.users[pending.pop()]:
                node = self.sources.nodes[user]
                cut = self._cut(node, rows)
                if cut is not None:
                    ranges.add(cut)
                elif node.target in GATED_ACTIVATIONS:
                    gated = True
                elif self.sources.passes[user]:
                    pending.append(user)
        if gated and parts == 2:
            return [0, rows // 2, rows]
        bounds = sorted({bound for pair in ranges for bound in pair} | {0, rows})
        return bounds if len(bounds) == parts + 1 else None

    def _cut(self, node: CapturedNode, rows: int) -> tuple[int, int] | None:
        """Return the columns that a node takes of the fused result, or None."""
        if node.target == "getitem":
            key = node.args[1] if len(node.args) > 1 else None
            if isinstance(key, int) and isinstance(node.args[0], Ref):
                return self._split_cut(
                    self.sources.nodes[node.args[0].index], key, rows
                )
            last = key[-1] if isinstance(key, tuple) and key else None
            if isinstance(last, dict) and "slice" in last:
                low, high, _ = last["slice"]
                return (low or 0, rows if high is None else high)
            return None
        if node.target == "slice" and len(node.args) >= 4:
            dim, low, high = node.args[1:4]
            shape = self.sources.nodes[node.args[0].index].shape
            if dim in (-1, len(shape) - 1) and shape[-1:] == (rows,):
                return (low or 0, min(rows, high))
        return None

    def _split_cut(
        self, node: CapturedNode, key: int, rows: int
    ) -> tuple[int, int] | None:
        if node.target not in SPLITS:
            return None
        sizes = node.kwargs.get("split_size", node.args[1] if len(node.args) > 1 else 0)
        sizes = node.kwargs.get("split_sizes", sizes)
        if node.target == "chunk" and isinstance(sizes, int):
            sizes = -(-rows // sizes)
        if isinstance(sizes, int):
            return (key * sizes, min(rows, (key + 1) * sizes)) if sizes else None
        low = sum(sizes[:key])
        return (low, low + sizes[key])
