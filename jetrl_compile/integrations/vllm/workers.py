"""Where an engine's workers are: functions sent to them, and what must be idle first.

In this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`, one rank) a function gets the model
and tensors as they are. Otherwise vLLM pickles it, which has to be allowed, and weights
go through the CPU.
"""

import contextlib
import os
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from jetrl_compile.errors import JetRLError, ModelError, RefitError, one_line

ALLOW = "VLLM_ALLOW_INSECURE_SERIALIZATION"
STEPS_AHEAD = 4  # more than vLLM queues


def rank_count(llm: Any) -> int:
    """Return how many ranks share an engine's layers (its tensor parallel size)."""
    config = getattr(llm.llm_engine, "vllm_config", None)
    parallel = getattr(config, "parallel_config", None)
    return int(getattr(parallel, "tensor_parallel_size", 1))


def is_local(llm: Any) -> bool:
    """Whether the engine's only worker is in this process."""
    return rank_count(llm) == 1 and _core_is_local(llm)


def _core_is_local(llm: Any) -> bool:
    client = getattr(llm.llm_engine, "engine_core", None)
    return client is None or hasattr(client, "engine_core")


def check_reachable(llm: Any) -> None:
    """Check that vLLM will send functions to the engine's workers.

    Raises:
        ModelError: It will not.
    """
    if _core_is_local(llm) or os.environ.get(ALLOW, "0") not in ("", "0"):
        return
    raise ModelError(
        "the engine runs in a process of its own, to which vLLM sends functions only "
        f"with {ALLOW}=1; set that, or VLLM_ENABLE_V1_MULTIPROCESSING=0, before LLM is "
        "made"
    )


def ask(llm: Any, act: Callable[[nn.Module], Any]) -> list[Any]:
    """Run a function on each worker's model; return what it returned.

    Of several workers vLLM reads the answers up to the first that raised, and takes
    what is left for those of the next call. So errors are sent as results.

    Args:
        llm: vLLM's LLM.
        act: Takes the model.

    Raises:
        JetRLError: What a worker raised; ModelError for an error of another library.
    """
    if is_local(llm):
        found: list[Any] = llm.apply_model(act)
        return found
    found = llm.apply_model(partial(_told, act))
    for one in found:
        if isinstance(one, JetRLError):
            raise one
    return found


def _told(act: Callable[[nn.Module], Any], model: nn.Module) -> Any:
    try:
        return act(model)
    except JetRLError as error:
        return error.with_traceback(None)
    except Exception as error:
        traceback.print_exc()  # into the worker's log
        return ModelError(
            f"a worker of vLLM failed: {type(error).__name__}: {one_line(error)}; its "
            "log has the traceback"
        )


def check_awake(llm: Any) -> None:
    """Check that an engine's weights are in memory, as far as this process knows.

    Raises:
        RefitError: They are asleep.
    """
    executor = getattr(llm.llm_engine, "model_executor", None)
    if "weights" in getattr(executor, "sleeping_tags", ()):
        raise RefitError(
            "the engine's weights are asleep; call llm.wake_up(tags=['weights']) "
            "before a push"
        )


def drop_prefix_cache(llm: Any) -> None:
    """Drop the keys and values that were computed with the weights of now.

    Raises:
        RefitError: vLLM keeps them, since requests use them.
    """
    config = getattr(llm.llm_engine, "vllm_config", None)
    cache = getattr(config, "cache_config", None)
    if llm.reset_prefix_cache() is False and getattr(
        cache, "enable_prefix_caching", True
    ):
        raise RefitError(
            "vLLM's prefix cache is in use, and would mix keys of two pushes; wait for "
            "all requests before a push: nothing was written"
        )


def drop_requests(llm: Any) -> int:
    """Abort what is left of requests, as after a refusal; return how many.

    vLLM prepares a step ahead: what a refused step left queued would fail once more.
    """
    engine = llm.llm_engine
    left = list(engine.output_processor.request_states)
    if left:
        engine.abort_request(left, internal=True)
    for _ in range(len(left) + STEPS_AHEAD):
        if not engine.has_unfinished_requests() and not _steps_ahead(engine):
            break
        with contextlib.suppress(RefitError):
            engine.step()
    return len(left)


def _steps_ahead(engine: Any) -> int:
    """Return how many steps an engine in this process has queued."""
    core = getattr(getattr(engine, "engine_core", None), "engine_core", None)
    return len(getattr(core, "batch_queue", None) or ())
