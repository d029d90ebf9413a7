"""The trainer's config on its way to vLLM's workers, as JSON."""

import json
from typing import Any


def config_document(config: Any) -> str:
    """Return a Hugging Face config, of its text part, as JSON.

    Args:
        config: Of the trainer's model.
    """
    text: str = config.get_text_config().to_json_string(use_diff=False)
    return text


def read_config(document: str) -> Any:
    """Return the config of `config_document`."""
    from transformers import AutoConfig

    values: dict[str, Any] = json.loads(document)
    return AutoConfig.for_model(**values)
