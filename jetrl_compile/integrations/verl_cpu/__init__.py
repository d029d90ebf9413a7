"""verl on a CPU: what verl's trainer needs to run where there is no GPU.

    VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=jetrl_compile.integrations.verl_cpu

verl imports the module at its own import, in every process. It adds the platform "cpu"
and the rollout `actor_rollout_ref.rollout.name=jetrl_cpu`. It is for tests, and for
trying a config before a GPU is rented.
"""

from typing import Any

# First: the rest of verl asks for the platform while it is imported.
from jetrl_compile.integrations.verl_cpu import platform  # isort: skip

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

from jetrl_compile.examples import attention

ROLLOUT = "jetrl_cpu"
__all__ = ["ROLLOUT", "attention", "platform"]


def _replica() -> Any:
    from jetrl_compile.integrations.verl_cpu.rollout import CPUReplica

    return CPUReplica


_ROLLOUT_REGISTRY[(ROLLOUT, "async")] = f"{__name__}.rollout.ServerAdapter"
RolloutReplicaRegistry.register(ROLLOUT, _replica)
