"""Steps of sequences on a backend of vLLM's attention, and what they should get.

With vLLM installed its classes run, without its kernels; else stand-ins of them.
"""

from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

HEADS, HEADS_K, SIZE, PAGE = 8, 2, 64, 16
NAME = "model.layers.0.self_attn.attn"


def stand_ins() -> dict[str, ModuleType]:
    """What the backend imports of vLLM."""

    class Support(Enum):
        ALWAYS = 3
        UNIFORM_BATCH = 2

    class Kind(str, Enum):
        DECODER = "decoder"
        ENCODER = "encoder"

    class LayerBase:
        pass

    class Builder:
        def __init__(
            self, spec: Any, names: list[str], config: Any, device: Any
        ) -> None:
            pass

        def build(self, prefix: int, common: Any, fast_build: bool = False) -> Any:
            schedule = None if fast_build else torch.zeros(1)
            return SimpleNamespace(**vars(common), scheduler_metadata=schedule)

        def update_block_table(self, metadata: Any, table: Any, slots: Any) -> Any:
            given = {**vars(metadata), "block_table": table, "slot_mapping": slots}
            return SimpleNamespace(**given)

    class Impl:
        def __init__(self, *args: Any, **more: Any) -> None:
            self.num_heads, self.head_size, self.scale, self.num_kv_heads = args[:4]
            self.attn_type = more.get("attn_type", Kind.DECODER)
            self.alibi_slopes, window = args[4], args[5]
            self.sliding_window = (-1, -1) if window is None else (window - 1, 0)
            self.logits_soft_cap = more.get("logits_soft_cap") or 0
            self.sinks = more.get("sinks")
            self.kv_sharing_target_layer_name = more.get("kv_sharing_target_layer_name")

        def do_kv_cache_update(self, layer: Any, *given: Any) -> None:
            modules[flash].reshape_and_cache_flash(
                *given[:2], *given[2].unbind(1), given[3]
            )

        def forward(
            self, layer: Any, q: Any, k: Any, v: Any, cache: Any, step: Any, *o: Any
        ) -> Any:
            if step is None:
                return o[0].fill_(0)
            keys, values = cache.unbind(1)
            modules[flash].flash_attn_varlen_func(
                q=q,
                k=keys,
                v=values,
                out=o[0],
                cu_seqlens_q=step.query_start_loc,
                seqused_k=step.seq_lens,
                block_table=step.block_table,
                softmax_scale=self.scale,
            )
            return o[0]

    flash = "vllm.v1.attention.backends.flash_attn"
    layers = "vllm.model_executor.layers.attention_layer_base"
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {
            "get_layers_from_vllm_config": lambda config, kind, names: {
                name: config.compilation_config.static_forward_context[name]
                for name in names
            }
        },
        "vllm.forward_context": {"get_forward_context": None},
        layers: {"AttentionLayerBase": LayerBase},
        "vllm.v1.attention.backend": {
            "AttentionCGSupport": Support,
            "AttentionType": Kind,
        },
        flash: {
            "FlashAttentionBackend": type("FlashAttentionBackend", (), {}),
            "FlashAttentionImpl": Impl,
            "FlashAttentionMetadataBuilder": Builder,
        },
    }
    modules: dict[str, Any] = {name: ModuleType(name) for name in contents}
    for name, own in contents.items():
        vars(modules[name]).update(own)
    return modules


@dataclass
class Rollout:
    """Sequences that a backend attends to, step by step, and what they should get."""

    backend: Any
    context: Any
    calls: list[str]
    spread: int = 200  # pages of the cache
    tables: dict[str, list[int]] = field(default_factory=dict)
    seen: dict[str, tuple[list[Tensor], list[Tensor]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        shape = (self.spread, 2, PAGE, HEADS_K, SIZE)
        self.cache = torch.randn(shape, generator=self.generator).bfloat16()
        self.free = torch.randperm(self.spread, generator=self.generator).tolist()
        self.impl = self.make_impl()
        self.builder = self.make_builder(self.impl)

    def make_impl(
        self,
        *,
        heads: int = HEADS,
        size: int = SIZE,
        window: int | None = None,
        alibi: list[float] | None = None,
        **more: Any,
    ) -> Any:
        made = self.backend.DecodeImpl(
            heads, size, size**-0.5, HEADS_K, alibi, window, "auto", **more
        )
        made.vllm_flash_attn_version = 3
        return made

    def make_builder(
        self, *impls: Any, caching: bool = False, captured: int = 0
    ) -> Any:
        base: Any = import_module("vllm.model_executor.layers.attention_layer_base")

        class Layer(base.AttentionLayerBase):  # type: ignore[misc]
            def __init__(self, impl: Any) -> None:
                self.impl, self.layer_name = impl, NAME
                self._q_scale = self._k_scale = self._v_scale = torch.ones(())

            def get_attn_backend(self) -> None: ...

            def get_kv_cache_spec(self, config: Any) -> None: ...

        layers = {f"{NAME}{i}": Layer(impl) for i, impl in enumerate(impls)}
        self.layer = next(iter(layers.values()))
        mode = SimpleNamespace(has_full_cudagraphs=lambda: False)
        config = SimpleNamespace(
            model_config=SimpleNamespace(
                get_num_attention_heads=lambda _: HEADS,
                get_num_kv_heads=lambda _: HEADS_K,
                get_head_size=lambda: SIZE,
            ),
            parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1),
            cache_config=SimpleNamespace(
                cache_dtype="auto", enable_prefix_caching=caching
            ),
            compilation_config=SimpleNamespace(
                cudagraph_mode=mode,
                max_cudagraph_capture_size=captured,
                static_forward_context=layers,
            ),
            attention_config=SimpleNamespace(
                flash_attn_max_num_splits_for_cuda_graph=32
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=16),
        )
        spec = SimpleNamespace(
            dtype=torch.bfloat16, block_size=PAGE, num_kv_heads=HEADS_K, head_size=SIZE
        )
        device = torch.device("cpu")
        return self.backend.DecodeBuilder(spec, list(layers), config, device)

    def step(self, prefix: int = 0, padding: int = 0, **batch: int) -> list[str]:
        """Run a step of some new tokens a sequence; return which of vLLM's ran.

        Args:
            prefix: Tokens that all sequences begin with, as vLLM says it.
            padding: Rows without a sequence, as a captured graph has them.
            **batch: New tokens by sequence.
        """
        slots, lengths, starts = [], [], [0]
        for name, count in batch.items():
            table = self.tables.setdefault(name, [])
            keys, _ = self.seen.setdefault(name, ([], []))
            for place in range(len(keys), len(keys) + count):
                if place % PAGE == 0:
                    table.append(self.free.pop())
                slots.append(table[-1] * PAGE + place % PAGE)
            lengths.append(len(keys) + count)
            starts.append(starts[-1] + count)
        tokens = starts[-1]
        rows = tokens + padding + 3  # vLLM's buffers go on behind a step
        qkv = torch.randn((rows, HEADS + 2 * HEADS_K, SIZE), generator=self.generator)
        q, k, v = qkv.bfloat16().tensor_split((HEADS, HEADS + HEADS_K), 1)
        tables = torch.zeros((len(batch) + padding, 8), dtype=torch.int32)
        for row, name in enumerate(batch):
            tables[row, : len(self.tables[name])] = torch.tensor(self.tables[name])
        common = step_of(
            lengths + [0] * padding,
            starts + [tokens + row + 1 for row in range(padding)],
            tables,
            slots + [-1] * padding,
        )
        made = self.builder.build(prefix, common)
        out = torch.full((rows, HEADS, SIZE), float("nan")).bfloat16()
        self.context.attn_metadata = {NAME: made}
        self.calls.clear()
        update = self.impl.do_kv_cache_update
        update(self.layer, k, v, self.cache, common.slot_mapping)
        self.impl.forward(self.layer, q, k, v, self.cache, made, out)
        assert out[common.num_actual_tokens :].isnan().all(), "another step's rows"
        for row, (name, count) in enumerate(batch.items()):
            keys, values = self.seen[name]
            for at in range(starts[row], starts[row] + count):
                keys.append(k[at])
                values.append(v[at])
                wanted = attention(q[at], torch.stack(keys), torch.stack(values))
                torch.testing.assert_close(
                    out[at].double(), wanted, rtol=2**-7, atol=2**-7
                )
        self.check_cache()
        return list(self.calls)

    def check_cache(self) -> None:
        """Check that all keys and values are where they should be."""
        for name, kept in self.seen.items():
            pages = torch.tensor(self.tables[name])
            for which, rows in enumerate(kept):
                found = self.cache[pages, which].flatten(0, 1)[: len(rows)]
                assert torch.equal(found, torch.stack(rows)), name


def step_of(
    lengths: list[int], starts: list[int], tables: Tensor, slots: list[int]
) -> Any:
    """Return what vLLM's runner says of a step."""
    counts = [end - start for start, end in pairwise(starts)]
    starting = torch.tensor(starts, dtype=torch.int32)
    return SimpleNamespace(
        query_start_loc=starting,
        query_start_loc_cpu=starting,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(lengths),
        num_actual_tokens=starts[-1],
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        block_table_tensor=tables,
        block_table=tables,
        slot_mapping=torch.tensor(slots),
        causal=True,
        mm_req_doc_ranges=None,
    )


def attention(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    group = q.shape[0] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("hd,nhd->hn", q.double(), keys) * q.shape[-1] ** -0.5
    return torch.einsum("hn,nhd->hd", scores.softmax(1), values)
