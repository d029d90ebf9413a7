"""verl 0.9: GRPO with one precision flow, by configuration alone.

    actor_rollout_ref.model.external_lib=jetrl_compile.integrations.verl

verl imports that module in every worker before it makes an engine. Importing it puts
the engine of this package (`engine`) into verl's registry for this machine's device, in
front of verl's own; strategies that it cannot serve are refused. Settings come from
verl's config (`settings`); what is checked while the run goes on is in `phases` and
`sync`.
"""

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


def register() -> None:
    """Put the engine into verl's registry; may be called several times.

    Raises:
        ModelError: verl is not installed, or has another registry.
    """
    try:
        from verl.utils.device import get_device_name, get_vendor
        from verl.workers.engine.base import EngineRegistry

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


register()
