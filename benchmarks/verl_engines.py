"""verl's engines in one process of one rank, without Ray, and batches for them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

LIBRARY = "jetrl_compile.integrations.verl"


def start() -> None:
    """Make the process group of one rank, as verl's workers do."""
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "0"),
    ):
        os.environ[name] = value
    from verl.utils.distributed import initialize_global_process_group_ray

    initialize_global_process_group_ray()


def model_config(
    folder: Path | str,
    override: dict[str, Any],
    *,
    library: str | None = LIBRARY,
    packed: bool = True,
    checkpointing: bool = True,
) -> Any:
    """Return verl's config of a model.

    Args:
        folder: Of the model.
        override: verl's `override_config`.
        library: verl's `external_lib`.
        packed: Whether padding is removed.
        checkpointing: Whether activations are recomputed in backward.
    """
    from verl.workers.config import HFModelConfig

    return HFModelConfig(
        path=str(folder),
        external_lib=library,
        override_config=override,
        use_remove_padding=packed,
        enable_gradient_checkpointing=checkpointing,
    )


def make_engine(
    model: Any,
    strategy: str = "fsdp2",
    *,
    backend: str | None = None,
    micro: int = 2,
    infer_micro: int | None = None,
    learning_rate: float = 1e-2,
    plain: bool = False,
    compiled_entropy: bool = False,
    **config: Any,
) -> Any:
    """Return an engine from verl's registry, as a worker makes it; not initialized.

    Args:
        model: From `model_config`.
        strategy: verl's.
        backend: The registry's key; None: the strategy.
        micro: Sequences of a micro-batch that trains.
        infer_micro: Sequences of one that does not; None: `micro`.
        learning_rate: Of AdamW.
        plain: Whether it is verl's own, whatever a library has registered.
        compiled_entropy: verl's `use_torch_compile`, which it has on by default.
        **config: More of `FSDPEngineConfig`.
    """
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    given: dict[str, Any] = dict(
        model_config=model,
        engine_config=FSDPEngineConfig(
            strategy=strategy,
            use_torch_compile=compiled_entropy,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=micro,
            infer_micro_batch_size_per_gpu=infer_micro or micro,
            use_remove_padding=model.use_remove_padding,
            **config,
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=learning_rate, lr_warmup_steps=0, total_training_steps=10
        ),
        checkpoint_config=CheckpointConfig(),
    )
    if plain:
        return FSDPEngineWithLMHead(**given)
    kind = {"model_type": "language_model", "backend": backend or strategy}
    return EngineRegistry.new(**kind, **given)


def make_batch(
    rows: Sequence[Sequence[int]],
    *,
    packed: bool = True,
    micro: int = 2,
    entropy: bool = True,
) -> Any:
    """Return a batch of token sequences, as verl's workers get it.

    Args:
        rows: Token ids.
        packed: Whether padding is removed.
        micro: Sequences of a micro-batch.
        entropy: Whether entropies are asked for.
    """
    from verl.utils import tensordict_utils as tu
    from verl.utils.dataset.dataset_utils import DatasetPadMode

    def nested(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.nested_tensor(tensors, layout=torch.jagged)

    data = tu.get_tensordict(
        {
            "input_ids": nested([torch.tensor(row) for row in rows]),
            "position_ids": nested([torch.arange(len(row)) for row in rows]),
            "loss_mask": nested([torch.ones(len(r), dtype=torch.long) for r in rows]),
        },
        {},
    )
    tu.assign_non_tensor(
        data,
        use_remove_padding=packed,
        pad_mode=DatasetPadMode.NO_PADDING,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=micro,
        temperature=1.0,
        calculate_entropy=entropy,
        pad_token_id=0,
    )
    return data


def policy_loss(model_output: Any, data: Any, dp_group: Any) -> Any:
    """A loss of log-probs alone, as large for a short batch as for a long one."""
    return -model_output["log_probs"].values().mean() / 2, {}
