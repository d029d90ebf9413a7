"""verl's two ends of a rollout: the adapter in a trainer's worker, and the replica."""

import os
from collections.abc import Iterable
from typing import Any

import ray
from torch import Tensor
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica

from jetrl_compile.errors import ModelError
from jetrl_compile.graph_json import graph_from_json
from jetrl_compile.integrations.verl.settings import read_settings, take_off
from jetrl_compile.integrations.verl.sync import current_sync
from jetrl_compile.integrations.verl_cpu.server import CPUServer


def _server_name(replica: int) -> str:
    return f"jetrl_cpu_server_{replica}"


class ServerAdapter(BaseRollout):
    """Sends a worker's weights to its replica, and checks what arrived.

    Each rank feeds a replica of its own.
    """

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ["RANK"])
        self.replica_rank = rank if replica_rank < 0 else replica_rank
        self.server: Any = None

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: the server keeps its memory."""

    async def release(self) -> None:
        """Do nothing: the server keeps its memory."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        """Send all weights, compare what the replica stores, then let it generate.

        Raises:
            ContainmentError: The replica is not contained in the trainer.
        """
        if wire_format != "named_tensors":
            raise ModelError(
                f"the CPU rollout takes whole weights, not {wire_format!r}; set "
                "actor_rollout_ref.rollout.checkpoint_engine.backend=naive"
            )
        sync = current_sync()
        if self.server is None:
            self.server = ray.get_actor(_server_name(self.replica_rank))
        await self.server.begin_sync.remote(global_steps)
        if sync.report is None and sync.settings.level >= 1:
            graph = graph_from_json(await self.server.precision_graph.remote())
            sync.check_graph(graph, f"replica {self.replica_rank}")
        sent = {name: tensor.cpu() for name, tensor in weights}
        stored = await self.server.load_weights.remote(sent)
        if sync.settings.level >= 3:
            sync.check_bytes([stored], global_steps)
        await self.server.end_sync.remote(global_steps)


class CPUReplica(RolloutReplica):
    """One server, in a process of its own."""

    async def launch_servers(self) -> None:
        """Start the server."""
        model: Any = omega_conf_to_dataclass(self.model_config)
        take_off(model.hf_config)
        server: Any = ray.remote(CPUServer)
        handle = server.options(
            name=_server_name(self.replica_rank), max_concurrency=64, num_cpus=0
        ).remote(
            model.local_path,
            model.hf_config,
            read_settings(model.override_config),
            self.config.response_length,
            self.config.seed + self.replica_rank,
            len(model.tokenizer),
        )
        await handle.wake_up.remote()
        self.servers = [handle]
        self._server_handle = handle
        self._server_address = f"jetrl-cpu:{self.replica_rank}"
