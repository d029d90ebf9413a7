"""verl's engine and a rollout server in one process on a CPU, without Ray."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import verl_engines
from verl_engines import make_batch as batch
from verl_engines import make_engine, policy_loss, start

os.environ["VERL_PLATFORM"] = "cpu"
os.environ["VERL_USE_EXTERNAL_MODULES"] = "jetrl_compile.integrations.verl_cpu"
LIBRARY = verl_engines.LIBRARY
LENGTHS = (13, 20, 9, 17)
__all__ = ("LENGTHS", "LIBRARY", "batch", "make_engine", "start")


def model_config(
    folder: Path, *, packed: bool = True, checkpointing: bool = True, **override: Any
) -> Any:
    """verl's config of a model; other keywords go to `override_config`.

    Args:
        folder: Of the model.
        packed: Whether padding is removed.
        checkpointing: Whether activations are recomputed in backward.
        **override: Settings.
    """
    return verl_engines.model_config(
        folder,
        {
            "attn_implementation": "jetrl_reference",
            "jetrl_lowering": "aot",
            **override,
        },
        packed=packed,
        checkpointing=checkpointing,
    )


def random_rows(seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 260, (n,), generator=generator).tolist() for n in LENGTHS]


def train(engine: Any, rows: Sequence[Sequence[int]]) -> Any:
    """One optimizer step; its metrics."""
    data = batch(rows, packed=engine.model_config.use_remove_padding)
    with engine.train_mode():
        return engine.train_batch(data, loss_function=policy_loss)["metrics"]


def log_probs(engine: Any, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The log-prob of each row's tokens but the first."""
    with engine.eval_mode():
        out = engine.infer_batch(batch(rows))["model_output"]["log_probs"]
    return [row[:-1] for row in out.unbind()]
