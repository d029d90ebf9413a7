"""Load a Hugging Face causal model from a folder."""

import warnings
from pathlib import Path
from typing import Any

from torch import nn

from jetrl_compile.errors import ModelError, one_line


def load_causal_model(folder: Path | str) -> nn.Module:
    """Return the causal language model of a folder, in the dtype it was saved in.

    Args:
        folder: With `config.json` and weights; nothing is downloaded.

    Raises:
        ModelError: The folder holds no config, no weights or no causal model.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ModelError(
            f"{path} holds no config.json; give the folder of a Hugging Face model "
            "with its weights"
        )
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as untyped

    logging: Any = untyped
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: nn.Module = AutoModelForCausalLM.from_pretrained(
                str(path),
                dtype="auto",
                local_files_only=True,
                trust_remote_code=False,
            )
    except Exception as error:  # transformers raises many types here
        raise ModelError(
            f"{path} holds no causal model that this transformers can load: "
            f"{one_line(error)}"
        ) from None
    finally:
        if shown:
            logging.enable_progress_bar()
    return model
