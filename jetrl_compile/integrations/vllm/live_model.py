"""What a loaded model of vLLM's knows of itself: its config, its weights' names."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from jetrl_compile.errors import ModelError
from jetrl_compile.integrations.vllm.layout import LayerLayout, Part
from jetrl_compile.integrations.vllm.storage import LAYOUT, quantized_layers


def config_of(model: nn.Module) -> Any:
    """Return the quantization config `jetrl` of a loaded model.

    Raises:
        ModelError: The model was loaded without it.
    """
    for layer in model.modules():
        config = getattr(layer, "quant_config", None)
        if config is not None and hasattr(config, "state"):
            return config
    raise ModelError(f"{type(model).__name__} was loaded without quantization='jetrl'")


def guard_heads(model: nn.Module) -> int:
    """Let output heads refuse where the model must not generate; return how many.

    vLLM makes some models' heads (OLMo 2, Qwen3-Next, GPT-OSS) without the quantization
    config, which could not give them its method then.

    Args:
        model: A model that was loaded with `quantization="jetrl"`.
    """
    guard = getattr(config_of(model), "guard", None)
    count = 0
    for module in model.modules() if guard is not None else ():
        names = {base.__name__ for base in type(module).__mro__}
        method = getattr(module, "quant_method", None)
        if "VocabParallelEmbedding" in names and not hasattr(method, "state"):
            assert guard is not None
            module.quant_method = guard()
            count += 1
    return count


def parts_of(model: nn.Module) -> dict[str, tuple[nn.Module, Part]]:
    """Return, for each Hugging Face layer in FP8, the layer that holds it and where."""
    found = {}
    for layer in quantized_layers(model).values():
        layout: LayerLayout = getattr(layer, LAYOUT)
        for part in layout.parts:
            found[part.name] = (layer, part)
    return found


def plain_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that are no part of FP8 storage, by vLLM's names."""
    stored = {
        id(parameter)
        for layer in quantized_layers(model).values()
        for name, parameter in layer.named_parameters(recurse=False)
        if name != "bias"
    }
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) not in stored
    }


def tied_parameters(model: nn.Module) -> dict[str, str]:
    """Return further names of parameters, with the names that they have above."""
    first = {id(p): name for name, p in model.named_parameters()}
    return {
        name: first[id(p)]
        for name, p in model.named_parameters(remove_duplicate=False)
        if first[id(p)] != name
    }


def has_experts(module: Any) -> bool:
    """Whether a module holds fused experts, whose names no checkpoint has."""
    return hasattr(module, "w13_weight")


def whole_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return N and K of the unsharded FP8 layers, by Hugging Face's module paths."""
    return {name: part.shape for name, (_, part) in parts_of(model).items()}


def head_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return N and K of output heads whose vocabulary the engine pads, by module path.

    What it makes for the rows of padding is cut off behind the head.
    """
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        rows = getattr(module, "org_vocab_size", None)
        weight = getattr(module, "weight", None)
        if rows is not None and isinstance(weight, Tensor) and weight.shape[0] > rows:
            found[name] = (int(rows), int(weight.shape[1]))
    return found


def vocabulary_rows(module: Any) -> slice | None:
    """Return which rows of an embedding or head a rank has; None for other modules."""
    indices = getattr(module, "shard_indices", None)
    if indices is None:
        return None
    return slice(indices.org_vocab_start_index, indices.org_vocab_end_index)


def attention_facts(model: nn.Module) -> Mapping[str, Mapping[str, Any]]:
    """Return what attentions do, which vLLM's graph does not show, by module."""
    found = {}
    for name, layer in model.named_modules():
        implementation = getattr(layer, "impl", None)
        scale = getattr(implementation, "scale", None)
        if scale is not None and hasattr(layer, "kv_cache_dtype"):
            dtype = str(layer.kv_cache_dtype)
            found[name] = {"scale": float(scale), "kv_cache_dtype": dtype}
            kernel = getattr(getattr(layer, "quant_config", None), "attention", "")
            if kernel:
                found[name]["impl"] = f"jetrl.attention.{kernel}"
    return found
