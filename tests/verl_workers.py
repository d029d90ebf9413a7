"""verl's engine and a rollout server in one process, without Ray."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

os.environ["VERL_PLATFORM"] = "cpu"
os.environ["VERL_USE_EXTERNAL_MODULES"] = "jetrl_compile.integrations.verl_cpu"
LIBRARY = "jetrl_compile.integrations.verl"
LENGTHS = (13, 20, 9, 17)


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
    folder: Path, *, packed: bool = True, checkpointing: bool = True, **override: Any
) -> Any:
    """verl's config of a model; other keywords go to `override_config`.

    Args:
        folder: Of the model.
        packed: Whether padding is removed.
        checkpointing: Whether activations are recomputed in backward.
        **override: Settings.
    """
    from verl.workers.config import HFModelConfig

    return HFModelConfig(
        path=str(folder),
        external_lib=LIBRARY,
        override_config={
            "attn_implementation": "jetrl_reference",
            "jetrl_lowering": "aot",
            **override,
        },
        use_remove_padding=packed,
        enable_gradient_checkpointing=checkpointing,
    )


def make_engine(
    model: Any, strategy: str = "fsdp2", *, backend: str | None = None, **config: Any
) -> Any:
    """An engine from verl's registry, as a worker makes it; not initialized."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig
    from verl.workers.engine import EngineRegistry

    return EngineRegistry.new(
        model_type="language_model",
        backend=backend or strategy,
        model_config=model,
        engine_config=FSDPEngineConfig(
            strategy=strategy,
            use_torch_compile=False,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=2,
            infer_micro_batch_size_per_gpu=2,
            use_remove_padding=model.use_remove_padding,
            **config,
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=1e-2, lr_warmup_steps=0, total_training_steps=10
        ),
        checkpoint_config=CheckpointConfig(),
    )


def batch(rows: Sequence[Sequence[int]], *, packed: bool = True) -> Any:
    """A batch of token sequences, as verl's workers get it."""
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
        micro_batch_size_per_gpu=2,
        temperature=1.0,
        calculate_entropy=True,
        pad_token_id=0,
    )
    return data


def random_rows(seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 260, (n,), generator=generator).tolist() for n in LENGTHS]


def train(engine: Any, rows: Sequence[Sequence[int]]) -> Any:
    """One optimizer step; its metrics."""

    def loss(model_output: Any, data: Any, dp_group: Any) -> Any:
        return -model_output["log_probs"].values().mean() / 2, {}

    data = batch(rows, packed=engine.model_config.use_remove_padding)
    with engine.train_mode():
        return engine.train_batch(data, loss_function=loss)["metrics"]


def log_probs(engine: Any, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The log-prob of each row's tokens but the first."""
    with engine.eval_mode():
        out = engine.infer_batch(batch(rows))["model_output"]["log_probs"]
    return [row[:-1] for row in out.unbind()]
