"""A model in the shape of vLLM's Qwen3, Llama and Qwen2, in plain PyTorch.

Its classes are called as vLLM's, its operators are in vLLM's namespaces, and it is
loaded as vLLM loads: so the integration's passes, storage and refit run on it without
vLLM. What it leaves out is vLLM's own machinery, which the GPU tests run.
"""

from collections.abc import Iterable
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn
from vllm_operators import define_operators

from jetrl_compile.integrations.vllm import storage
from jetrl_compile.integrations.vllm.layout import make_layout
from jetrl_compile.integrations.vllm.quantized_linear import quantized_linear
from jetrl_compile.integrations.vllm.settings import Reports, Settings
from jetrl_compile.integrations.vllm.weight_state import WeightState
from jetrl_compile.recipe import JETRL

PACKED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
STACKED = (
    ("qkv_proj", "q_proj", "q"),
    ("qkv_proj", "k_proj", "k"),
    ("qkv_proj", "v_proj", "v"),
    ("gate_up_proj", "gate_proj", 0),
    ("gate_up_proj", "up_proj", 1),
)
HEAD_SIZES: dict[str, int] = {}  # of attentions, by name


class _Method:
    """As vLLM's layers have one each, which may be exchanged."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        assert JETRL.flows is not None
        return quantized_linear(layer, x, bias, JETRL.flows, "reference")


class _Linear(nn.Module):
    """What vLLM's linear layers share: loading, and the quantized GEMM."""

    def __init__(self, model: "EngineModel", prefix: str, sizes: list[int], cols: int):
        super().__init__()
        self.quant_config = model.config_of_engine
        self.tp_rank, self.tp_size = model.place
        self.num_kv_head_replicas = 1
        layout = make_layout(self, prefix, sizes, cols, PACKED, JETRL.flows.fprop_w)  # type: ignore[union-attr]
        setattr(self, storage.LAYOUT, layout)
        setattr(self, storage.LOADED, set())
        self.quant_config.state.add(layout)
        self.weight = nn.Parameter(
            torch.empty(sum(sizes), cols, dtype=torch.bfloat16), requires_grad=False
        )
        self.weight.weight_loader = storage.counting(self.load, self)  # type: ignore[attr-defined]
        self.bias: nn.Parameter | None = None
        self.quant_method = _Method()

    def load(self, param: Tensor, weight: Tensor, key: Any = None) -> None:
        part = getattr(self, storage.LAYOUT).part(key)
        own = weight[part.source[: weight.dim()]]
        param.data[part.low : part.low + part.rows].copy_(own)

    def add_bias(self) -> None:
        size = self.weight.shape[0]
        self.bias = nn.Parameter(
            torch.zeros(size, dtype=torch.bfloat16), requires_grad=False
        )
        self.bias.weight_loader = self.load  # type: ignore[attr-defined]

    def finish(self) -> None:
        storage.store(self, self.quant_config.state)

    def forward(self, x: Tensor) -> Tensor:
        return self.quant_method.apply(self, x, self.bias)


class ColumnParallelLinear(_Linear):
    pass


class QKVParallelLinear(ColumnParallelLinear):
    pass


class MergedColumnParallelLinear(ColumnParallelLinear):
    pass


class RowParallelLinear(_Linear):
    def forward(self, x: Tensor) -> Tensor:
        part: Tensor = super().forward(x)
        return part if self.tp_size == 1 else torch.ops.vllm.all_reduce(part, "tp:0")


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.ones(size, dtype=torch.bfloat16), requires_grad=False
        )
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return torch.ops.vllm_ir.rms_norm(x, self.weight, self.eps)
        return torch.ops.vllm_ir.fused_add_rms_norm(x, residual, self.weight, self.eps)


class RotaryEmbedding(nn.Module):
    cos_sin_cache: Tensor

    def __init__(self, size: int, base: float) -> None:
        super().__init__()
        self.size = size
        inverse = 1.0 / base ** (torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(256).float(), inverse)
        table = torch.cat((angles.cos(), angles.sin()), -1).to(torch.bfloat16)
        self.register_buffer("cos_sin_cache", table, persistent=False)

    def forward(self, positions: Tensor, *tensors: Tensor) -> list[Tensor]:
        cos, sin = self.cos_sin_cache.index_select(0, positions.flatten()).chunk(2, -1)
        return [self.rotate(x, cos, sin) for x in tensors]

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        by_head = x.view(x.shape[0], -1, self.size)
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        x1, x2 = by_head.chunk(2, -1)
        turned = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)
        return turned.reshape(x.shape)


class Impl:
    def __init__(self, scale: float) -> None:
        self.scale = scale


class Attention(nn.Module):
    def __init__(self, name: str, heads: int, kv_heads: int, size: int) -> None:
        super().__init__()
        self.name, self.heads, self.kv_heads, self.size = name, heads, kv_heads, size
        self.impl, self.kv_cache_dtype = Impl(size**-0.5), "auto"

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        whole = output.view(-1, self.heads, self.size)
        torch.ops.vllm.unified_attention_with_output(
            q.view(-1, self.heads, self.size),
            k.view(-1, self.kv_heads, self.size),
            v.view(-1, self.kv_heads, self.size),
            whole,
            self.name,
        )
        return whole.view(-1, self.heads * self.size)


class SiluAndMul(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return nn.functional.silu(x[..., :half]) * x[..., half:]


class SelfAttention(nn.Module):
    def __init__(self, model: "EngineModel", base: str) -> None:
        super().__init__()
        c = model.config
        size = c.head_dim
        ranks = model.place[1]
        heads, kv_heads = c.num_attention_heads // ranks, c.num_key_value_heads // ranks
        self.sizes = [heads * size, kv_heads * size, kv_heads * size]
        self.head_dim = size
        self.qkv_proj = QKVParallelLinear(
            model, f"{base}.qkv_proj", self.sizes, c.hidden_size
        )
        if c.model_type == "qwen2":
            self.qkv_proj.add_bias()
        self.o_proj = RowParallelLinear(
            model, f"{base}.o_proj", [c.hidden_size], heads * size
        )
        self.rotary_emb = model.rope
        self.attn = Attention(f"{base}.attn", heads, kv_heads, size)
        if c.model_type == "qwen3":
            self.q_norm = RMSNorm(size, c.rms_norm_eps)
            self.k_norm = RMSNorm(size, c.rms_norm_eps)

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x).split(self.sizes, dim=-1)
        if hasattr(self, "q_norm"):
            q = self.q_norm(q.view(q.shape[0], -1, self.head_dim)).view(q.shape)
            k = self.k_norm(k.view(k.shape[0], -1, self.head_dim)).view(k.shape)
        q, k = self.rotary_emb(positions, q, k)
        out: Tensor = self.o_proj(self.attn(q, k, v))
        return out


class MLP(nn.Module):
    def __init__(self, model: "EngineModel", base: str) -> None:
        super().__init__()
        c = model.config
        inner = c.intermediate_size // model.place[1]
        self.gate_up_proj = MergedColumnParallelLinear(
            model, f"{base}.gate_up_proj", [inner] * 2, c.hidden_size
        )
        self.down_proj = RowParallelLinear(
            model, f"{base}.down_proj", [c.hidden_size], inner
        )
        self.act_fn = SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_up_proj(x)))
        return out


class DecoderLayer(nn.Module):
    def __init__(self, model: "EngineModel", base: str) -> None:
        super().__init__()
        c = model.config
        self.self_attn = SelfAttention(model, f"{base}.self_attn")
        self.mlp = MLP(model, f"{base}.mlp")
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(
        self, positions: Tensor, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual, x = x, self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(positions, x)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Vocabulary(nn.Embedding):
    """An embedding or output head, whose rows the engine pads."""

    def __init__(self, config: Any, pad: int) -> None:
        rows = -(-config.vocab_size // pad) * pad
        super().__init__(rows, config.hidden_size, dtype=torch.bfloat16)
        self.org_vocab_size = config.vocab_size
        self.weight.requires_grad_(False)
        weight: Any = self.weight
        weight.weight_loader = self._load

    def _load(self, param: nn.Parameter, weight: Tensor) -> None:
        param.data[: len(weight)].copy_(weight)
        param.data[len(weight) :].zero_()


class Backbone(nn.Module):
    def __init__(self, model: "EngineModel", pad: int) -> None:
        super().__init__()
        c = model.config
        self.embed_tokens = Vocabulary(c, pad)
        self.layers = nn.ModuleList(
            DecoderLayer(model, f"model.layers.{i}") for i in range(c.num_hidden_layers)
        )
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x, residual = self.embed_tokens(ids), None
        for layer in self.layers:
            x, residual = layer(positions, x, residual)
        out, _ = self.norm(x, residual)
        return out  # type: ignore[no-any-return]


class LogitsProcessor(nn.Module):
    def forward(self, head: nn.Module, x: Tensor) -> Tensor:
        own: Any = head
        return nn.functional.linear(x, own.weight)[..., : own.org_vocab_size]


class Config:
    """What the integration keeps in vLLM's quantization config."""

    def __init__(self, fused: bool) -> None:
        self.state, self.reports, self.fused = WeightState(), Reports(), fused
        self.push_plan: Any = None

    def settings(self) -> Settings:
        return Settings(JETRL, ("reference",))


class EngineModel(nn.Module):
    """A causal model as an engine has it, with the weights of Hugging Face's."""

    def __init__(
        self,
        trainer: nn.Module,
        *,
        fused: bool = True,
        rank: int = 0,
        ranks: int = 1,
        pad: int = 1,
    ) -> None:
        super().__init__()
        define_operators()
        self.place = (rank, ranks)
        causal: Any = trainer
        config: Any = causal.config
        self.config = config
        self.config_of_engine = Config(fused)
        base = config.rope_parameters["rope_theta"]
        self.rope = RotaryEmbedding(config.head_dim, base)
        self.model = Backbone(self, pad)
        del self.rope
        if config.tie_word_embeddings:
            self.lm_head: nn.Module = self.model.embed_tokens
        else:
            self.lm_head = Vocabulary(config, pad)
        self.logits_processor = LogitsProcessor()
        self.load_weights((n, p.detach()) for n, p in trainer.named_parameters())
        for layer in storage.quantized_layers(self).values():
            assert isinstance(layer, _Linear)
            layer.finish()

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = self.model(ids, positions)
        return out

    def compute_logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.logits_processor(self.lm_head, hidden)
        return out

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """As vLLM's models: parts of fused layers go to their shards."""
        own = dict(self.named_parameters(remove_duplicate=False))
        for name, weight in weights:
            for fused, part, key in STACKED:
                if f".{part}." in name:
                    fused_param: Any = own[name.replace(part, fused)]
                    fused_param.weight_loader(fused_param, weight, key)
                    break
            else:
                param = own[name]
                loader = getattr(param, "weight_loader", None)
                if loader is None:
                    param.data.copy_(weight)
                else:
                    loader(param, weight)


def make_trainer(kind: str, **sizes: Any) -> nn.Module:
    """A small trainer's model in BF16, with norm weights that are not 1."""
    chosen = {
        "vocab_size": 256,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
        **sizes,
    }
    makers: dict[str, Any] = {
        "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**chosen)),
        "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**chosen)),
        "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**chosen)),
    }
    torch.manual_seed(0)
    model: nn.Module = makers[kind]().to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    return model
