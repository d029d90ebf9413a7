"""Models to measure: shapes by name, or a config folder; weights are random."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jetrl_compile.errors import ModelError, one_line

NO_MEMORY = "can't allocate memory"  # in the message of PyTorch's CPU allocator


def _shape(
    kind: str,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    key_heads: int,
    vocabulary: int,
    tied: bool = False,
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        **({"head_dim": 128} if kind == "qwen3" else {}),
        "max_position_embeddings": 40960,
    }


# Source: the config.json of each model on Hugging Face.
BUILT_IN: dict[str, dict[str, Any]] = {
    "qwen3-4b": _shape("qwen3", 2560, 9728, 36, 32, 8, 151936, tied=True),
    "qwen3-8b": _shape("qwen3", 4096, 12288, 36, 32, 8, 151936),
    "qwen3-32b": _shape("qwen3", 5120, 25600, 64, 64, 8, 151936),
    "llama3.1-8b": _shape("llama", 4096, 14336, 32, 32, 8, 128256),
    "qwen2.5-7b": _shape("qwen2", 3584, 18944, 28, 28, 4, 152064),
}


@dataclass(frozen=True)
class GemmSize:
    """A linear layer, or several that read the same x, as one GEMM.

    Attributes:
        name: "qkv", "o", "gate_up" or "down".
        n: Out features, of all together.
        k: In features.
    """

    name: str
    n: int
    k: int


def find_config(model: str, layers: int | None = None) -> Any:
    """Return the config of a built-in shape or of a config folder.

    Args:
        model: A name of `BUILT_IN`, or a folder with a `config.json`.
        layers: How many decoder layers to keep; None: all.

    Raises:
        ModelError: It is neither, or the folder's config cannot be read.
    """
    if model in BUILT_IN:
        from transformers import AutoConfig

        given = dict(BUILT_IN[model])
        config: Any = AutoConfig.for_model(given.pop("model_type"), **given)
    elif (Path(model) / "config.json").is_file():
        config = _read_config(model)
    else:
        raise ModelError(
            f"{model!r} is no built-in shape and no folder with a config.json; use one "
            f"of {', '.join(BUILT_IN)}, or a folder"
        )
    if layers is not None:
        _cut(config, layers)
    return config


def _read_config(folder: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many types here
        raise ModelError(
            f"{folder} holds no config that this transformers can read: "
            f"{one_line(error)}; mend the config, or upgrade transformers"
        ) from None


def _cut(config: Any, layers: int) -> None:
    """Keep the first layers of a config."""
    if not 1 <= layers <= config.num_hidden_layers:
        raise ModelError(
            f"{layers} decoder layers were asked for; the model has "
            f"{config.num_hidden_layers}: ask for 1 to {config.num_hidden_layers}"
        )
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]


def check_device(model: str, device: torch.device) -> None:
    """Check that a device is there and that the model is not too large for it.

    Raises:
        ModelError: There is no such device, or a built-in shape is asked for on a CPU.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "no CUDA GPU was found; run this on a machine with a GPU, or give a folder "
            "with a small config and --device cpu"
        )
    if device.type != "cuda" and model in BUILT_IN:
        raise ModelError(
            f"{model} needs a GPU; on a CPU give a folder with a small config"
        )


@contextmanager
def fitting(what: str, device: torch.device, advice: str) -> Iterator[None]:
    """Turn a lack of memory in the body into one line.

    Args:
        what: What is made there.
        device: Where.
        advice: What to do.

    Raises:
        ModelError: Memory ran out.
    """
    try:
        yield
    except RuntimeError as error:  # on a CPU there is no class of its own
        if not isinstance(error, torch.OutOfMemoryError) and NO_MEMORY not in str(
            error
        ):
            raise
        raise ModelError(f"{what} do not fit into {device}; {advice}") from None


def make_model(config: Any, device: torch.device, seed: int = 0) -> nn.Module:
    """Make a causal model with random weights in BF16, in training mode.

    Args:
        config: Of `find_config`.
        device: The weights are made there.
        seed: Of the weights.

    Raises:
        ModelError: No causal model can be made of the config.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    make: Any = AutoModelForCausalLM.from_config  # untyped
    weights = f"the weights of {config.num_hidden_layers} layers"
    try:
        with fitting(weights, device, "cut the model with --layers"), device:
            model: nn.Module = make(
                config, dtype=torch.bfloat16, attn_implementation="sdpa"
            )
    except (ValueError, TypeError) as error:
        raise ModelError(
            f"no causal model can be made of {type(config).__name__}: {one_line(error)}"
        ) from None
    return model.train()


def gemm_sizes(config: Any) -> tuple[GemmSize, ...]:
    """Return the fused GEMMs of a decoder layer of a Llama-like model.

    Raises:
        ModelError: The config lacks one of the sizes.
    """
    hidden, inner, queries, keys = _widths(config)
    return (
        GemmSize("qkv", queries + 2 * keys, hidden),
        GemmSize("o", hidden, queries),
        GemmSize("gate_up", 2 * inner, hidden),
        GemmSize("down", hidden, inner),
    )


def linear_sizes(config: Any) -> tuple[tuple[int, int], ...]:
    """Return out and in features of the linear layers of such a decoder layer.

    Raises:
        ModelError: The config lacks one of the sizes.
    """
    hidden, inner, queries, keys = _widths(config)
    found = ((queries, hidden), (keys, hidden), (hidden, queries))
    return tuple(dict.fromkeys((*found, (inner, hidden), (hidden, inner))))


def activation_widths(config: Any) -> tuple[int, ...]:
    """Return the widths of the stream and of the MLP.

    Raises:
        ModelError: The config lacks one of the sizes.
    """
    return tuple(dict.fromkeys(_widths(config)[:2]))


def _widths(config: Any) -> tuple[int, int, int, int]:
    """Return the widths of the stream, the MLP, all queries, and all keys."""
    try:
        hidden, inner = config.hidden_size, config.intermediate_size
        heads = config.num_attention_heads
        keys = config.num_key_value_heads
    except AttributeError as error:
        raise ModelError(
            f"{type(config).__name__} is no Llama-like config: {one_line(error)}"
        ) from None
    head = getattr(config, "head_dim", None) or hidden // heads
    return hidden, inner, heads * head, keys * head
