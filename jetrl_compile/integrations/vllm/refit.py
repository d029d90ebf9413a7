"""Bring a trainer's weights into a live vLLM model, all or nothing.

The same storage is written, so captured CUDA graphs stay valid. Everything that can be
known before is checked before anything is written; if writing fails all the same, the
model refuses to generate until a complete push.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_compile.errors import RefitError
from jetrl_compile.integrations.vllm.live_model import config_of, guard_heads
from jetrl_compile.integrations.vllm.push_plan import (
    PushPlan,
    largest,
    make_plan,
    write_plain,
)

_DTYPES = (torch.bfloat16, torch.float32)


def refit_model(
    model: nn.Module, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
) -> int:
    """Push all weights of a trainer into a loaded model of vLLM's.

    Args:
        model: A model that was loaded with `quantization="jetrl"`.
        weights: The trainer's parameters by Hugging Face's names, all of them, BF16 or
            FP32 (which is rounded to BF16 first); a tied weight may come once.

    Returns:
        The number of tensors that were pushed.

    Raises:
        RefitError: A name, shape or dtype does not fit, or a parameter is missing: the
            model is unchanged. Or a weight holds NaN or infinity, or a write failed:
            the model refuses to generate.
    """
    given = {name: tensor.detach() for name, tensor in dict(weights).items()}
    check_push(plan_of(model), given)
    begin_push(model)
    push_some(model, given)
    settle_push(model)
    release_push(model)
    return len(given)


def begin_push(model: nn.Module) -> None:
    """Let the model refuse to generate: all its weights will be written.

    Args:
        model: A model that was loaded with `quantization="jetrl"`.
    """
    why = "a push of weights was interrupted; push all weights"
    config_of(model).state.begin(why, held=False)


def push_some(model: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Write some of the weights, fused layers with all their parts."""
    plan = plan_of(model)
    with torch.no_grad():
        for target in plan.layers:
            if target.names[0] in given:
                target.write(given)
        if plan.whole:
            write_plain(plan, given)
        else:  # vLLM knows how it shards them
            loader: Any = model
            loader.load_weights((n, t) for n, t in given.items() if n in plan.plain)


def settle_push(model: nn.Module) -> None:
    """Check what was pushed; the model still refuses to generate.

    Raises:
        RefitError: A weight holds NaN or infinity.
    """
    plan = plan_of(model)
    found: dict[Any, Tensor] = {target.names: target.scales for target in plan.layers}
    config_of(model).state.wrote_all(found | largest(plan))


def release_push(model: nn.Module) -> None:
    """Let the model generate from what was pushed, checked on every rank."""
    config_of(model).state.pushing = ""


def plan_of(model: nn.Module) -> PushPlan:
    """Return where a model's weights go; made anew where its parameters are others."""
    config = config_of(model)
    plan: PushPlan | None = getattr(config, "push_plan", None)
    if plan is None or not plan.is_current:
        guard_heads(model)
        plan = config.push_plan = make_plan(model)
    return plan


def check_push(plan: PushPlan, given: Mapping[str, Tensor]) -> None:
    """Check names, shapes and dtypes of a push before anything is written.

    Raises:
        RefitError: One does not fit, or a parameter is missing.
    """
    if plan.experts:
        raise RefitError(
            f"{plan.experts[0]} holds fused experts, which a push cannot write yet; "
            "push expert by expert over vLLM's reload_weights or weight-transfer API"
        )
    shapes = plan.shapes
    tied = {"lm_head.weight", *plan.tied} - set(shapes)
    for name, tensor in given.items():
        if name in tied:
            continue
        if name not in shapes:
            raise RefitError(
                f"the engine's model has no parameter {name}; push the parameters of "
                "the same architecture, by their names in named_parameters()"
            )
        if tensor.dtype not in _DTYPES:
            raise RefitError(
                f"weight {name} is {str(tensor.dtype).removeprefix('torch.')}; needed "
                "is BF16 or FP32: convert it before it is pushed"
            )
        known = plan.whole or name not in plan.plain
        if known and tuple(tensor.shape) != shapes[name]:
            raise RefitError(
                f"weight {name} has shape {tuple(tensor.shape)}, the engine stores "
                f"{shapes[name]}; push the weights of the same architecture"
            )
    for name, other in plan.tied.items():
        if name in given and other in given and not _equal(given[name], given[other]):
            raise RefitError(
                f"{name} and {other} are one weight in the engine, and differ here; "
                "push a model whose config has the same tie_word_embeddings"
            )
    missing = sorted(set(shapes) - set(given))
    if missing:
        raise RefitError(
            f"{len(missing)} of {len(shapes)} parameters are missing, first "
            f"{missing[0]}; push all of them at once: nothing was written"
        )


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values, as far as they can be read here."""
    if one.is_meta or other.is_meta or one.data_ptr() == other.data_ptr():
        return True
    return torch.equal(one, other.to(one.device))
