"""Write a model folder for verl: real SmolLM2, or a random model of some config.

python -m jetrl_compile.examples.verl_grpo.make_model smollm2 FOLDER
python -m jetrl_compile.examples.verl_grpo.make_model tiny FOLDER
python -m jetrl_compile.examples.verl_grpo.make_model small FOLDER
python -m jetrl_compile.examples.verl_grpo.make_model CONFIG_FOLDER FOLDER
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from jetrl_compile.examples.smollm2 import load_smollm2, quiet, smollm2_tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")
TINY = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
SMALL = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with a chat template, made without any file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    # The stubs of tokenizers know no setters.
    parts: Any = made
    parts.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    parts.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast  # untyped
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        bos_token="<|endoftext|>",
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(kind: str, folder: Path, *, layers: int | None, seed: int) -> int:
    """Write a model folder.

    Args:
        kind: "smollm2", "tiny" or "small" (random Qwen3s with a tokenizer of bytes:
            two layers for a CPU, four for a GPU with vLLM, whose vocabulary is the
            tokenizer's), or a folder with a config and a tokenizer, for random weights.
        folder: Where to write.
        layers: Decoder layers, if other than the config's; not for SmolLM2.
        seed: Of random weights.

    Returns:
        The number of parameters.
    """
    torch.manual_seed(seed)
    tokenizer: Any
    if kind == "smollm2":
        model: Any = load_smollm2()
        tokenizer = smollm2_tokenizer()
    else:
        if kind in ("tiny", "small"):
            tokenizer = byte_tokenizer()
            sizes = TINY if kind == "tiny" else {**SMALL, "vocab_size": len(tokenizer)}
            config: Any = Qwen3Config(**sizes)  # type: ignore[arg-type]
            config.bos_token_id = tokenizer.bos_token_id
            config.eos_token_id = tokenizer.eos_token_id
            config.pad_token_id = tokenizer.pad_token_id
        else:
            config = AutoConfig.from_pretrained(kind, local_files_only=True)
            tokenizer = AutoTokenizer.from_pretrained(kind, local_files_only=True)
        if layers is not None:
            config.num_hidden_layers = layers
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[:layers]
        make: Any = AutoModelForCausalLM.from_config  # untyped
        model = make(config, dtype=torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    with quiet():
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    for name in ("generation_config.json",):
        source = Path(kind) / name
        if source.is_file():
            shutil.copy(source, folder / name)
    return int(sum(parameter.numel() for parameter in model.parameters()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the model folder that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("kind", help="smollm2, tiny, small, or a config's folder")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="decoder layers")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    count = make_model(
        chosen.kind, chosen.folder, layers=chosen.layers, seed=chosen.seed
    )
    print(f"{chosen.folder}: {chosen.kind}, {count:,} parameters")


if __name__ == "__main__":
    main()
