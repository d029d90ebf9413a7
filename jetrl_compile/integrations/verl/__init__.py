"""verl 0.9: GRPO with one precision flow, by configuration alone.

    actor_rollout_ref.model.external_lib=jetrl_compile.integrations.verl

verl imports that module in every process that reads the model's config: in workers
before an engine is made, in the trainer before rollouts are. Importing it puts the
engine of this package (`engine`) into verl's registry for this machine's device, in
front of verl's own; strategies that it cannot serve are refused. Rollouts called "vllm"
become those of `integrations.verl_vllm`. Settings come from verl's config (`settings`);
what is checked while the run goes on is in `phases` and `sync`.
"""

from typing import Any

from jetrl_compile.errors import ModelError

_REFUSED = (
    "fsdp",
    "fsdp_turbo",
    "megatron",
    "veomni",
    "torchtitan",
    "automodel",
    "mindspeed",
)
_ROLLOUTS = "jetrl_compile.integrations.verl_vllm"


def register() -> None:
    """Put the engine into verl's registry; may be called several times.

    Raises:
        ModelError: verl is not installed, or has another registry.
    """
    try:
        from verl.utils.device import get_device_name, get_vendor
        from verl.workers.engine.base import EngineRegistry
        from verl.workers.rollout.base import _ROLLOUT_REGISTRY
        from verl.workers.rollout.replica import RolloutReplicaRegistry

        from jetrl_compile.integrations.verl.engine import JetRLEngine, RefusedEngine
    except ImportError as error:
        raise ModelError(
            f"verl cannot be used here: {error}; install it with "
            "pip install 'jetrl-compile[verl]'"
        ) from error
    engines = EngineRegistry._engines.get("language_model", {})
    device, vendor = get_device_name(), get_vendor()
    if (device, vendor) in engines.get("fsdp2", {}):
        return
    add = EngineRegistry.register
    add("language_model", "fsdp2", device=device, vendor=vendor)(JetRLEngine)
    for backend in _REFUSED:
        refused = type("RefusedEngine", (RefusedEngine,), {"backend": backend})
        add("language_model", backend, device=device, vendor=vendor)(refused)
    _ROLLOUT_REGISTRY[("vllm", "async")] = f"{_ROLLOUTS}.adapter.ServerAdapter"
    RolloutReplicaRegistry.register("vllm", _replica)


def _replica() -> Any:
    from jetrl_compile.integrations.verl_vllm.server import Replica

    return Replica


register()
