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
from jetrl_compile.integrations.vllm.live_model import checkpoint_shapes, config_of

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
    given = dict(weights)
    check_push(model, given)
    state = config_of(model).state
    state.pushing = "a push of weights was interrupted; push all weights"
    loader: Any = model
    with torch.no_grad():
        loader.load_weights(iter(given.items()))
    if state.missing:
        missing = state.missing
        state.pushing = f"a push of weights did not write {missing[0]}"
        raise RefitError(
            f"the engine wrote {len(given)} tensors, and not {len(missing)} FP8 layers,"
            f" first {missing[0]}; the model refuses to generate until a complete push"
        )
    state.pushing = ""
    return len(given)


def check_push(model: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Check names, shapes and dtypes of a push before anything is written.

    Raises:
        RefitError: One does not fit, or a parameter is missing.
    """
    shapes = checkpoint_shapes(model)
    tied = {"lm_head.weight"} - set(shapes)
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
        if tuple(tensor.shape) != shapes[name]:
            raise RefitError(
                f"weight {name} has shape {tuple(tensor.shape)}, the engine stores "
                f"{shapes[name]}; push the weights of the same architecture"
            )
    missing = sorted(set(shapes) - set(given))
    if missing:
        raise RefitError(
            f"{len(missing)} of {len(shapes)} parameters are missing, first "
            f"{missing[0]}; push all of them at once: nothing was written"
        )
