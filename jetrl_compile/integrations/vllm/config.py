"""The quantization config `jetrl` of vLLM."""

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from jetrl_compile.errors import ModelError, RecipeError
from jetrl_compile.integrations.vllm.compilation import set_up
from jetrl_compile.integrations.vllm.exact import log_probs_kernel, set_up_exact
from jetrl_compile.integrations.vllm.layout import kind_of, part_names
from jetrl_compile.integrations.vllm.linear import JetRLLinearMethod
from jetrl_compile.integrations.vllm.own_attention import (
    DECODE_KERNEL,
    set_up_decode,
)
from jetrl_compile.integrations.vllm.settings import Reports, Settings, read_settings
from jetrl_compile.integrations.vllm.weight_state import WeightState
from jetrl_compile.kernels.exact_kernels import bf16_gemm_provider
from jetrl_compile.kernels.exact_ops import bf16_gemm

NAME = "jetrl"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class JetRLConfig(QuantizationConfig):
    """One FP8 precision flow with the trainer, from BF16 weights.

    Attributes:
        given: Settings of the checkpoint's `quantization_config`.
        state: Of the model's weights.
        reports: What the passes did, a `CompileReport` a compiled graph.
        fused: Whether vLLM compiles the model, so that the passes run.
        attention: In exact mode, the kernel of attention.
        decode_attention: Else, what runs it where each sequence has one query.
        log_probs: In exact mode, the kernel of `jetrl::log_probs` for the trainer.
        push_plan: Where pushed weights go, once it is known.
    """

    def __init__(self, given: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.given = dict(given or {})
        self.state = WeightState()
        self.reports = Reports()
        self.fused = False
        self.push_plan: Any = None
        self.attention = ""
        self.decode_attention = ""
        self.log_probs = "aten"
        self._settings: Settings | None = None

    def get_name(self) -> Any:
        """Return what users write: LLM(..., quantization="jetrl")."""
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that a model may have."""
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the oldest GPU: Hopper, as the first with FP8 block scaling."""
        return 90

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no names: the weights are BF16, and quantized here."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "JetRLConfig":
        """Make a config of a checkpoint's `quantization_config`."""
        return cls({k: v for k, v in config.items() if k != "quant_method"})

    def settings(self) -> Settings:
        """Return the settings of the engine that is being made."""
        if self._settings is None:
            engine = get_current_vllm_config()
            self._settings = read_settings(self.given, engine)
            self.fused = set_up(engine, self._settings, self.reports)
            if self._settings.exact:
                self.attention = set_up_exact(engine, self.fused)
                self.log_probs = log_probs_kernel(engine)
            elif self._settings.recipe.flows is not None:
                kept = set_up_decode(engine)
                self.decode_attention = f"vLLM's: {kept}" if kept else DECODE_KERNEL
        return self._settings

    def get_quant_method(
        self, layer: torch.nn.Module, prefix: str
    ) -> QuantizeMethodBase | None:
        """Return how a layer is stored and run; None for vLLM's own way."""
        settings = self.settings()
        if isinstance(layer, VocabParallelEmbedding):  # ParallelLMHead is one
            return self.guard()
        if any(base.__name__ == "MLAAttention" for base in type(layer).__mro__):
            raise ModelError(
                f"{prefix} is multi-head latent attention, which keeps products of "
                "kv_b_proj in BF16 that no push reaches; only attention with keys and "
                "values of its own has a checked flow"
            )
        if not isinstance(layer, LinearBase):
            return None
        if not self._is_quantized(layer, prefix, settings):
            return UnquantizedLinearMethod()
        assert settings.recipe.flows is not None
        return JetRLLinearMethod(
            prefix,
            settings.recipe.flows,
            self.packed_modules_mapping,
            self.state,
            settings.providers,
            settings.dummy,
        )

    def guard(self) -> "GuardedEmbeddingMethod":
        """Return the method of an embedding or output head."""
        return GuardedEmbeddingMethod(self.state, self.settings().exact)

    def _is_quantized(self, layer: Any, prefix: str, settings: Settings) -> bool:
        """Whether the recipe quantizes the layers that an engine's layer holds."""
        kind_of(layer)
        role = "router" if _is_router(layer) else "linear"
        sizes = getattr(layer, "output_sizes", None) or [layer.output_size]
        names = part_names(prefix, len(sizes), self.packed_modules_mapping)
        reasons = {
            name: settings.recipe.reason_to_keep(name, role, "rollout")
            for name in names
        }
        kept = [name for name, reason in reasons.items() if reason is not None]
        if kept and len(kept) < len(names):
            raise RecipeError(
                f"recipe {settings.recipe.name!r} keeps {', '.join(kept)} in high "
                f"precision and not the other layers that vLLM fuses into {prefix}; "
                f"name all of {', '.join(names)} or none"
            )
        return not kept


def _is_router(layer: Any) -> bool:
    """Whether a layer makes one number for each expert."""
    config = _text_config(get_current_vllm_config())
    experts = {getattr(config, name, None) for name in _EXPERTS} - {None, 0}
    return kind_of(layer) == "replicated" and layer.output_size in experts


def _text_config(engine: VllmConfig) -> Any:
    config: Any = engine.model_config.hf_config
    return getattr(config, "text_config", config)


class GuardedEmbeddingMethod(UnquantizedEmbeddingMethod):
    """Embeddings and output heads in BF16; no logits from weights of two pushes.

    vLLM computes the logits of each step outside its compiled graphs and CUDA graphs,
    so this is where a model can refuse.
    """

    def __init__(self, state: WeightState, exact: bool = False) -> None:
        super().__init__()
        self.state = state
        self.provider = ""  # of the output head, in exact mode
        if exact:
            cuda = torch.cuda.is_available()
            self.provider = bf16_gemm_provider("cuda" if cuda else "cpu")

    def apply(
        self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Return the logits of hidden states x.

        Raises:
            RefitError: A push of weights failed, or is not complete.
        """
        if not torch.compiler.is_compiling():
            self.state.check()
        if self.provider:
            weight: Any = layer.weight
            product: Tensor = bf16_gemm(x, weight, self.provider)
            return product if bias is None else product + bias
        logits: Tensor = super().apply(layer, x, bias)
        return logits
