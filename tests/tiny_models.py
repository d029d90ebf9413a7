"""Tiny random models of seven architectures, and what a recipe names in them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from jetrl_compile.backend import jetrl
from jetrl_compile.pipeline import CompileReport
from jetrl_compile.report_sink import collect_reports

VOCABULARY = 320
# Three heads of 64 and one pair of keys: every projection has a partial block.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
# torch.utils.mkldnn, which Inductor imports, uses what torch.jit deprecates.
IGNORE_SCRIPT_METHOD = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)
# Inductor's advice for a GPU that has TensorFloat32.
IGNORE_TF32 = pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
# Inductor's advice for a softmax over few elements on a GPU.
IGNORE_SOFTMAX = pytest.mark.filterwarnings(
    r"ignore:\s*Online softmax is disabled:UserWarning"
)
# transformers caches a version check that Dynamo traces through.
IGNORE_LRU_CACHE = pytest.mark.filterwarnings(
    "ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"
)


_HEAD = {"head_dim": 64}
# Every expert is chosen: with fewer, a rounding that flips a choice changes the
# function that is differentiated, and no bound on gradients holds.
_MOE = {
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 4,
    **_HEAD,
}
_NO_DROPOUT = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
ARCHITECTURES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig, {}),
    "mistral": (tf.MistralForCausalLM, tf.MistralConfig, {}),
    "qwen2": (tf.Qwen2ForCausalLM, tf.Qwen2Config, {}),
    "qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config, _HEAD),
    "gemma3": (tf.Gemma3ForCausalLM, tf.Gemma3TextConfig, _HEAD),
    "qwen3_moe": (tf.Qwen3MoeForCausalLM, tf.Qwen3MoeConfig, _MOE),
    "gpt2": (tf.GPT2LMHeadModel, tf.GPT2Config, _NO_DROPOUT),
}


def make_model(
    name: str, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **changes: Any
) -> Any:
    """A model with random weights, in training mode."""
    torch.manual_seed(seed)
    model_class, config_class, more = ARCHITECTURES[name]
    config = config_class(**{**_SIZES, **more, **changes})
    return model_class(config).to(dtype).train()


def tokens(batch: int = 2, length: int = 48, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (batch, length), generator=generator)


def loss_of(model: Callable[..., Any], ids: Tensor) -> Any:
    """The next-token loss in FP32, of logits as the model gives them."""
    logits = model(input_ids=ids, use_cache=False).logits
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
    )


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of the parameters that have one; they are cleared."""
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def sqnr(wanted: Tensor, got: Tensor) -> float:
    """Signal to quantization noise, in dB."""
    signal = wanted.double().square().sum().item()
    noise = (wanted.double() - got.double()).square().sum().item()
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def compiled(model: Any, **options: Any) -> Callable[..., Any]:
    """The model, compiled as one graph, without Inductor unless it is asked for."""
    dynamic = options.pop("dynamic", None)
    fullgraph = options.pop("fullgraph", True)
    options.setdefault("lowering", "aot")
    result: Callable[..., Any] = torch.compile(
        model, backend=jetrl, fullgraph=fullgraph, dynamic=dynamic, options=options
    )
    return result


def linear_modules(model: nn.Module) -> set[str]:
    """The paths of the layers that the default recipe names."""
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and name != "lm_head"
    }


def step(
    model: nn.Module, ids: Tensor, **options: Any
) -> tuple[Tensor, dict[str, Tensor], list[CompileReport]]:
    """Compile; return the loss, the gradients and the reports of one training step."""
    with collect_reports() as reports:
        loss = loss_of(compiled(model, **options), ids)
        loss.backward()
    return loss.detach(), gradients(model), reports


class Recorder:
    """Keeps the partitioned graphs: forward and backward, or inference."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def interpret(self, graph: torch.fx.GraphModule, _: CompileReport) -> Any:
        self.graphs.append(graph)
        return graph.forward


def results_of(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The tensors that a partitioned graph returns."""
    (results,) = graph.graph.output_node().args
    assert isinstance(results, (tuple, list))
    return [node for node in results if isinstance(node, torch.fx.Node)]


class Mlp(nn.Module):
    """norm, gate, up, SiLU * mul, down, residual; widths that no block divides."""

    def __init__(self, hidden: int = 192, inner: int = 320, bias: bool = False) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        gated = nn.functional.silu(self.gate_proj(h)) * self.up_proj(h)
        result: Tensor = x + self.down_proj(gated)
        return result


def make_mlp(dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Mlp:
    torch.manual_seed(0)
    return Mlp(**sizes).to(dtype)


def activations(
    *shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True, seed: int = 3
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).to(dtype)
    return x.requires_grad_(grad)


def backward(y: Any, seed: int = 4) -> None:
    """Run backward from a random gradient."""
    generator = torch.Generator().manual_seed(seed)
    y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
