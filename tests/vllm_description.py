"""A description of the Dynamo-level graphs of Qwen3, Llama and Qwen2 in vLLM 0.24.

Written by hand from vLLM's model code (model_executor/models/{qwen3,llama,qwen2}.py and
layers/{linear,layernorm,activation,rotary_embedding,attention}): which operators it
calls, in which order, at which dtypes. It is no capture of a running engine.
"""

from dataclasses import dataclass

from node_writer import NodeWriter, Shape

from jetrl_compile.captured_graph import CapturedGraph, CapturedNode, Ref


@dataclass(frozen=True)
class Engine:
    """What to describe: sizes, and which implementations the engine runs.

    Attributes:
        model: "qwen3", "llama" or "qwen2".
        linear: "bf16"; "stored" for E4M3 weights that are dequantized before the
            product; "lowered" for `jetrl.quantize` and `jetrl.gemm`.
        blocks: "fused" for 128x128 blocks over the whole fused weight, "by_part".
        add_norm: "native" (vLLM IR), "vllm_c" (its CUDA kernel), "vllm_c_in_place"
            (that kernel called directly), "own" (an implementation that says in `sum`
            what it rounds to), "silent" (one that does not).
        attention: "in_place", "functionalized" or "returning".
        rope: "native", "in_place" or "functionalized".
        activation: "native", "opaque" or "fp32".
        head: "none" (as compiled), "bf16" or "fp32".
        provider: The kernel of its lowered GEMMs.
        scale: Whether the engine tells the scale of its attention.
    """

    model: str = "qwen3"
    layers: int = 2
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 512
    vocabulary: int = 512
    linear: str = "stored"
    blocks: str = "fused"
    add_norm: str = "native"
    attention: str = "in_place"
    rope: str = "native"
    table_dtype: str = "bf16"
    activation: str = "native"
    norm_weight_dtype: str = "bf16"
    head: str = "none"
    provider: str = "reference"
    scale: bool = True

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim


def describe_engine(engine: Engine) -> CapturedGraph:
    """Return the description of a model's forward, as Dynamo hands it on."""
    return CapturedGraph(tuple(_Model(engine).build().nodes))


class _Model(NodeWriter):
    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    def build(self) -> "_Model":
        e = self.engine
        ids = self.placeholder("input", "input_ids", "int32", (None,))
        self.positions = self.placeholder("input", "positions", "int64", (None,))
        table = self.weight("model.embed_tokens", (e.vocabulary, e.hidden))
        self.table = self.placeholder(
            "buffer",
            "model.layers.0.self_attn.rotary_emb.cos_sin_cache",
            e.table_dtype,
            (4096, e.head_dim),
        )
        self.module = ("model.embed_tokens", "VocabParallelEmbedding")
        long = self.call("long", ids, dtype="int64", shape=(None,))
        hidden = self.call("embedding", long, table, shape=(None, e.hidden))
        residual: Ref | None = None
        for number in range(e.layers):
            hidden, residual = self.layer(f"model.layers.{number}", hidden, residual)
        hidden, _ = self.norm("model.norm", hidden, residual)
        if e.head != "none":
            hidden = self.logits(hidden)
        self._add(CapturedNode("output", "output", "output", ((hidden,),)))
        return self

    def weight(self, module: str, shape: Shape, dtype: str = "bf16") -> Ref:
        return self.placeholder("parameter", f"{module}.weight", dtype, shape)

    def layer(
        self, base: str, hidden: Ref, residual: Ref | None
    ) -> tuple[Ref, Ref | None]:
        e = self.engine
        hidden, summed = self.norm(f"{base}.input_layernorm", hidden, residual)
        residual = summed
        attn = f"{base}.self_attn"
        sizes = (e.q_size, e.kv_size, e.kv_size)
        qkv = self.linear(f"{attn}.qkv_proj", hidden, sizes, e.model == "qwen2")
        self.module = (attn, "Attention")
        split = self.call("split", qkv, sizes, dtype="", outputs=("bf16",) * 3, dim=-1)
        q, k, v = (
            self.call("getitem", split, slot, shape=(None, size))
            for slot, size in enumerate(sizes)
        )
        if e.model == "qwen3":
            q = self.head_norm(attn, "q_norm", q, e.heads)
            k = self.head_norm(attn, "k_norm", k, e.kv_heads)
        q, k = self.rotate(attn, q, k)
        mixed = self.attend(attn, q, k, v)
        hidden = self.linear(f"{attn}.o_proj", mixed, (e.hidden,), k=e.q_size)
        hidden, residual = self.norm(
            f"{base}.post_attention_layernorm", hidden, residual
        )
        both = self.linear(f"{base}.mlp.gate_up_proj", hidden, (e.intermediate,) * 2)
        product = self.activate(f"{base}.mlp.act_fn", both)
        hidden = self.linear(
            f"{base}.mlp.down_proj", product, (e.hidden,), k=e.intermediate
        )
        return hidden, residual

    def norm(
        self, module: str, x: Ref, residual: Ref | None, eps: float = 1e-6
    ) -> tuple[Ref, Ref]:
        """vLLM's RMSNorm: the norm, and the sum that goes on as the residual."""
        weight = self.weight(module, self.shape(x)[-1:], self.engine.norm_weight_dtype)
        self.module = (module, "RMSNorm")
        shape = self.shape(x)
        if residual is None:
            out = self.call("vllm_ir.rms_norm", x, weight, eps, None, shape=shape)
            return out, x
        impl = self.engine.add_norm
        if impl == "vllm_c_in_place":
            self.call(
                "_C.fused_add_rms_norm",
                *(x, residual, weight, eps),
                dtype="",
                mutates=(0, 1),
            )
            return x, residual
        attributes = {
            "native": {"impl": "native"},
            "vllm_c": {"impl": "vllm_c"},
            "own": {"impl": "jetrl", "sum": "bf16"},
            "silent": {"impl": "somebody"},
        }[impl]
        both = self.call(
            "vllm_ir.fused_add_rms_norm",
            *(x, residual, weight, eps, None),
            dtype="",
            outputs=("bf16", "bf16"),
            attributes=attributes,
        )
        out = self.call("getitem", both, 0, shape=shape)
        return out, self.call("getitem", both, 1, shape=shape)

    def head_norm(self, attn: str, name: str, x: Ref, heads: int) -> Ref:
        size = self.engine.head_dim
        self.module = (attn, "Attention")
        by_head = self.view(x, -1, heads, size)
        out, _ = self.norm(f"{attn}.{name}", by_head, None)
        self.module = (attn, "Attention")
        return self.view(out, -1, heads * size)

    def linear(
        self,
        module: str,
        x: Ref,
        sizes: tuple[int, ...],
        bias: bool = False,
        k: int | None = None,
    ) -> Ref:
        e = self.engine
        n, k = sum(sizes), k or e.hidden
        out: Shape = (None, n)
        dtype = "bf16" if e.linear == "bf16" else "e4m3"
        weight = self.weight(module, (n, k), dtype)
        added = None
        if bias:
            added = self.placeholder("parameter", f"{module}.bias", "bf16", (n,))
        self.module = (module, "QKVParallelLinear")
        if e.linear == "bf16":
            return self.call("linear", x, weight, added, shape=out)
        rows = sum(-(-size // 128) for size in sizes)
        if e.blocks == "fused":
            rows = -(-n // 128)
        scales = self.placeholder(
            "buffer", f"{module}.weight_scale_inv", "fp32", (rows, -(-k // 128))
        )
        if e.linear == "stored":
            plain = self.call(
                "jetrl.dequantize", weight, scales, 128, 128, "bf16", shape=(n, k)
            )
            return self.call("linear", x, plain, added, shape=out)
        quantize = self.call(
            "jetrl.quantize",
            *(x, 1, 128, False, "fp32", 1e-10, None),
            dtype="",
            outputs=("e4m3", "fp32"),
        )
        codes = self.call("getitem", quantize, 0, dtype="e4m3", shape=(None, k))
        groups = self.call(
            "getitem", quantize, 1, dtype="fp32", shape=(None, -(-k // 128))
        )
        result = self.call(
            "jetrl.gemm",
            *(codes, groups, weight, scales, 1, 128, 128, 128, "bf16", e.provider),
            shape=out,
        )
        return self.call("add", result, added, shape=out) if bias else result

    def rotate(self, attn: str, q: Ref, k: Ref) -> tuple[Ref, Ref]:
        e = self.engine
        self.module = (f"{attn}.rotary_emb", "RotaryEmbedding")
        if e.rope != "native":
            shapes = self.shape(q), self.shape(k)
            functional = e.rope == "functionalized"
            both = self.call(
                "_C.rotary_embedding",
                *(self.positions, q, k, e.head_dim, self.table, True),
                dtype="",
                mutates=() if functional else (1, 2),
                outputs=("bf16", "bf16") if functional else (),
            )
            if not functional:
                return q, k
            rotated_q = self.call("getitem", both, 0, shape=shapes[0])
            return rotated_q, self.call("getitem", both, 1, shape=shapes[1])
        flat = self.call("flatten", self.positions, dtype="int64", shape=(None,))
        half, width = e.head_dim // 2, e.head_dim
        chosen = self.call(
            "index_select",
            self.table,
            0,
            flat,
            dtype=e.table_dtype,
            shape=(None, width),
        )
        pair = self.call(
            "chunk", chosen, 2, dtype="", outputs=(e.table_dtype,) * 2, dim=-1
        )
        tables = []
        for slot in (0, 1):
            part = self.call(
                "getitem", pair, slot, dtype=e.table_dtype, shape=(None, half)
            )
            tables.append(
                self.call(
                    "unsqueeze", part, -2, dtype=e.table_dtype, shape=(None, 1, half)
                )
            )
        return self.rotate_one(q, tables), self.rotate_one(k, tables)

    def rotate_one(self, x: Ref, tables: list[Ref]) -> Ref:
        """ApplyRotaryEmb.forward_static: cos and sin are cast to x's dtype."""
        e = self.engine
        heads = (self.shape(x)[-1] or 0) // e.head_dim
        whole, part = (None, heads, e.head_dim), (None, heads, e.head_dim // 2)
        by_head = self.call("view", x, -1, heads, e.head_dim, shape=whole)
        rotated = self.last(by_head, None, e.head_dim)
        rest = self.last(by_head, e.head_dim, None)
        wide = e.table_dtype == "fp32"
        dtype = "fp32" if wide else "bf16"
        if wide:  # enable_fp32_compute
            rotated = self.call("float", rotated, dtype=dtype, shape=whole)
        cos, sin = (
            self.call("to", t, dtype, dtype=dtype, shape=self.shape(t)) for t in tables
        )
        pair = self.call("chunk", rotated, 2, dtype="", outputs=(dtype, dtype), dim=-1)
        x1, x2 = (
            self.call("getitem", pair, i, dtype=dtype, shape=part) for i in (0, 1)
        )
        products = [
            self.call("mul", a, b, dtype=dtype, shape=part)
            for a, b in ((x1, cos), (x2, sin), (x2, cos), (x1, sin))
        ]
        first = self.call("sub", *products[:2], dtype=dtype, shape=part)
        second = self.call("add", *products[2:], dtype=dtype, shape=part)
        out = self.call("cat", (first, second), dtype=dtype, shape=whole, dim=-1)
        if wide:
            out = self.call("to", out, "bf16", shape=whole)
        joined = self.call("cat", (out, rest), shape=whole, dim=-1)
        return self.call(
            "reshape", joined, (-1, heads * e.head_dim), shape=self.shape(x)
        )

    def attend(self, attn: str, q: Ref, k: Ref, v: Ref) -> Ref:
        e = self.engine
        layer = f"{attn}.attn"
        self.module = (layer, "Attention")
        known = {"scale": e.head_dim**-0.5, "kv_cache_dtype": "auto"} if e.scale else {}
        q = self.view(q, -1, e.heads, e.head_dim)
        k = self.view(k, -1, e.kv_heads, e.head_dim)
        v = self.view(v, -1, e.kv_heads, e.head_dim)
        shape: Shape = (None, e.heads, e.head_dim)
        name = "vllm.unified_attention"
        if e.attention == "returning":
            out = self.call(name, q, k, v, layer, shape=shape, attributes=known)
            return self.view(out, -1, e.q_size)
        name += "_with_output"
        empty = self.call("empty", (None, e.q_size), shape=(None, e.q_size))
        output = self.view(empty, -1, e.heads, e.head_dim)
        update = self.call("vllm.unified_kv_cache_update", k, v, layer, shape=(0,))
        functional = e.attention == "functionalized"
        done = self.call(
            name,
            *(q, k, v, output, layer),
            dtype="",
            mutates=() if functional else (3,),
            outputs=("bf16",) if functional else (),
            attributes=known,
            kv_cache_dummy_dep=update,
        )
        if functional:
            output = self.call("getitem", done, 0, shape=shape)
        return self.view(output, -1, e.q_size)

    def activate(self, module: str, both: Ref) -> Ref:
        size = self.engine.intermediate
        shape: Shape = (None, size)
        self.module = (module, "SiluAndMul")
        if self.engine.activation == "opaque":
            empty = self.call("empty", (None, size), shape=shape)
            self.call("_C.silu_and_mul", empty, both, dtype="", mutates=(0,))
            return empty
        gate, up = self.last(both, None, size), self.last(both, size, None)
        if self.engine.activation == "native":
            silu = self.call("silu", gate, shape=shape)
            return self.call("mul", silu, up, shape=shape)
        wide = self.call("float", gate, dtype="fp32", shape=shape)
        silu = self.call("silu", wide, dtype="fp32", shape=shape)
        product = self.call("mul", silu, up, dtype="fp32", shape=shape)
        return self.call("to", product, "bf16", shape=shape)

    def logits(self, hidden: Ref) -> Ref:
        """What `compute_logits` runs after the compiled model."""
        e = self.engine
        weight = self.weight("lm_head", (e.vocabulary, e.hidden))
        self.module = ("lm_head", "ParallelLMHead")
        out: Shape = (None, e.vocabulary)
        if e.head == "bf16":
            return self.call("linear", hidden, weight, None, shape=out)
        x = self.call("to", hidden, "fp32", dtype="fp32", shape=self.shape(hidden))
        w = self.call("to", weight, "fp32", dtype="fp32", shape=self.shape(weight))
        return self.call("linear", x, w, None, dtype="fp32", shape=out)
