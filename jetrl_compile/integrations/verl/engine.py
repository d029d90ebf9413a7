"""verl's FSDP2 engine with FP8 decoder layers: actor, old log-prob and reference.

Everything that a trainer computes in verl goes through an engine, and a worker's engine
is made from verl's registry. Ours is verl's own, whose decoder layers are compiled
before `fully_shard`.
"""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from verl.utils import tensordict_utils as tu
from verl.workers.engine.base import BaseEngine
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from jetrl_compile.digests import stored_layers
from jetrl_compile.errors import ModelError
from jetrl_compile.exact_attention import NAME as EXACT_ATTENTION
from jetrl_compile.exact_attention import use_exact_attention
from jetrl_compile.integrations.verl.exact import (
    check_attention,
    check_exact_config,
    compare_log_probs,
    nested_log_probs,
)
from jetrl_compile.integrations.verl.phases import (
    ACTOR_UPDATE,
    OLD_LOG_PROB,
    REFERENCE,
    PhaseLedger,
)
from jetrl_compile.integrations.verl.settings import Settings, read_settings, take_off
from jetrl_compile.integrations.verl.sync import (
    WeightSync,
    as_metrics,
    log_probs_kernel,
    set_current,
)
from jetrl_compile.layers import compile_layers
from jetrl_compile.pipeline import CompileReport
from jetrl_compile.tracing import trace_model


class JetRLEngine(FSDPEngineWithLMHead):
    """verl's engine for `strategy=fsdp2`, with one FP8 precision flow.

    Attributes:
        settings: What verl's config says of this package.
        ledger: Which FP8 GEMMs ran in which phase.
        sync: The checks of rollouts; None for a reference model.
        engine_config: verl's `FSDPEngineConfig`.
    """

    engine_config: Any

    def __init__(
        self,
        model_config: Any,
        engine_config: Any,
        optimizer_config: Any,
        checkpoint_config: Any,
    ) -> None:
        self.settings: Settings = read_settings(model_config.override_config)
        _check_config(model_config, engine_config)
        take_off(model_config.hf_config)
        if self.settings.exact:
            check_exact_config(model_config, engine_config)
            model_config.hf_config._attn_implementation = EXACT_ATTENTION
        self.ledger: PhaseLedger
        self.sync: WeightSync | None = None
        super().__init__(
            model_config, engine_config, optimizer_config, checkpoint_config
        )

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        """Trace the model, compile its decoder layers, then shard it."""
        settings = self.settings
        if settings.exact:
            check_attention(module, _device_type())
            use_exact_attention(cast(PreTrainedModel, module))
        shell = bf16_shell(module)
        how: Any = {"recipe": settings.recipe, "exact": settings.exact}
        train = trace_model(shell, phase="train", **how)
        reports: list[CompileReport] = []
        stands_for = compile_layers(
            module, **settings.backend_options, report=reports.append
        )
        self.ledger = PhaseLedger(train, stands_for)
        self.ledger.reports = reports
        self.ledger.watch(module)
        if not self.engine_config.forward_only:
            rollout = trace_model(shell, phase="rollout", **how)
            layers = stored_layers(rollout, shell)
            self.sync = WeightSync(settings, train, layers, self.rank, shell)
            set_current(self.sync)
        given = self.engine_config
        resident = settings.resident_reference or not _has_accelerator()
        if given.forward_only and resident:
            # verl keeps a reference model's parameters in pinned memory of the host,
            # which torch has with an accelerator only; on a CPU they are there anyway.
            self.engine_config = dataclasses.replace(
                given, forward_only=False, offload_policy=False
            )
            self._is_offload_param = self._is_offload_optimizer = False
            for parameter in module.parameters():  # as FSDP2 gathers them; buffers stay
                parameter.data = parameter.data.to(torch.bfloat16)
        try:
            return super()._build_fsdp_module(module)  # type: ignore[no-any-return]
        finally:
            self.engine_config = given

    def forward_backward_batch(
        self, data: Any, loss_function: Any, forward_only: bool = False
    ) -> Any:
        """Run a mini-batch as verl does, and count FP8 GEMMs the first time.

        Raises:
            LoweringError: Fewer GEMMs ran in FP8 than the recipe says.
            ContainmentError: In exact mode, an old log-prob is not the rollout's.
        """
        self.ledger.begin()
        outputs = super().forward_backward_batch(data, loss_function, forward_only)
        phase = ACTOR_UPDATE
        if forward_only:
            phase = REFERENCE if self.engine_config.forward_only else OLD_LOG_PROB
        count = self.ledger.end(phase, training=not forward_only)
        if count is not None and self.rank == 0:
            print(f"jetrl: {phase} runs {count} GEMMs in FP8", flush=True)
        if self.sync is not None and self.settings.exact and phase == OLD_LOG_PROB:
            found = compare_log_probs(data, outputs["model_output"]["log_probs"])
            if found is not None:
                self.sync.check_log_probs(found.tokens, found.equal, found.first)
        if self.sync is not None and not forward_only:
            own = {"jetrl/fp8_gemms": float(len(self.ledger.ran[phase]))}
            outputs["metrics"] |= as_metrics(own | self.sync.metrics())
        return outputs

    def prepare_model_outputs(
        self,
        output: Any,
        output_args: Any,
        micro_batch: Any,
        logits_processor_func: Any,
    ) -> Any:
        """Compute log-probs in FP32 where verl would in BF16: on a CPU.

        In exact mode they are those of `jetrl::log_probs`; verl computes the rest.
        """
        logits = getattr(output, "logits", None)  # none with verl's fused kernels
        if logits is not None and logits.device.type == "cpu":
            output.logits = logits.float()
        prepare: Any = super().prepare_model_outputs
        rest = output_args, micro_batch, logits_processor_func
        if not self.settings.exact or tu.get_non_tensor_data(
            micro_batch, "distillation_only", False
        ):
            return prepare(output, *rest)
        assert logits is not None
        others = micro_batch.copy()
        tu.assign_non_tensor(others, distillation_only=True)  # leaves log-probs out
        made = prepare(output, output_args, others, logits_processor_func)
        made["log_probs"] = nested_log_probs(
            logits,
            output_args["input_ids_rmpad_rolled"],
            micro_batch,
            vocabulary=len(self.model_config.tokenizer),
            kernel=log_probs_kernel(),
        )
        return made

    def get_per_tensor_param(self, **kwargs: Any) -> tuple[Iterator[Any], Any]:
        """Return the weights for a rollout in BF16, rounded once from the masters."""
        parameters, adapter = super().get_per_tensor_param(**kwargs)
        assert self.sync is not None
        return self.sync.stream(parameters), adapter


class RefusedEngine(BaseEngine):
    """Stands for verl's engines whose layers this package does not compile."""

    backend = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ModelError(
            f"actor_rollout_ref.actor.strategy is {self.backend!r}, whose layers jetrl "
            "cannot compile; set actor_rollout_ref.actor.strategy=fsdp2 (and the same "
            "for ref), or remove model.external_lib to train in BF16"
        )

    is_param_offload_enabled = is_optimizer_offload_enabled = False


def bf16_shell(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device, as FSDP2 computes: in BF16."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        is_parameter = isinstance(tensor, nn.Parameter)
        dtype = torch.bfloat16 if is_parameter else tensor.dtype
        meta: Tensor = torch.empty_like(tensor, device="meta", dtype=dtype)
        if is_parameter:
            meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = meta
    return copy.deepcopy(model, memo)


def _check_config(model_config: Any, engine_config: Any) -> None:
    strategy = engine_config.strategy
    if strategy != "fsdp2":
        raise ModelError(
            f"strategy is {strategy!r}: FSDP1 flattens the parameters that the passes "
            "must know; set actor_rollout_ref.actor.strategy=fsdp2, and the same for "
            "ref"
        )
    mixed = engine_config.mixed_precision or {}
    if str(mixed.get("param_dtype", "bf16")) not in ("bf16", "bfloat16"):
        raise ModelError(
            f"mixed_precision.param_dtype is {mixed['param_dtype']!r}; the precision "
            "flow starts from BF16: set it to bf16"
        )
    if model_config.lora_rank > 0:
        raise ModelError(
            f"lora_rank is {model_config.lora_rank}; adapters have no precision flow "
            "yet: set actor_rollout_ref.model.lora_rank=0"
        )
    if model_config.use_liger:
        raise ModelError(
            "use_liger replaces the layers that the passes fuse; set "
            "actor_rollout_ref.model.use_liger=False"
        )


def _has_accelerator() -> bool:
    return bool(torch.accelerator.is_available())


def _device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
