"""verl's adapter in a trainer's worker: sends weights, and checks what arrived.

verl's server answers no RPC, so `server` does. Per replica one worker, whose GPU is
that of the replica's first rank, asks for graphs, layouts and digests of all ranks.
"""

import json
import time
from typing import Any

from verl.workers.rollout.vllm_rollout import ServerAdapter as VerlAdapter

from jetrl_compile.errors import ModelError
from jetrl_compile.graph_json import graph_from_json
from jetrl_compile.integrations.verl.settings import Settings, read_settings
from jetrl_compile.integrations.verl.sync import (
    WeightSync,
    current_sync,
    expect_nothing,
)
from jetrl_compile.integrations.verl_vllm.channel import of_run
from jetrl_compile.integrations.verl_vllm.config import runs_jetrl
from jetrl_compile.integrations.verl_vllm.documents import config_document
from jetrl_compile.integrations.vllm.engine import exact_on_device, on_device
from jetrl_compile.integrations.vllm.sync_digests import read_layouts
from jetrl_compile.kernels.dispatch import default_providers


class ServerAdapter(VerlAdapter):
    """Feeds one replica from a worker, which may be one of several that do.

    Attributes:
        settings: Of the trainer.
    """

    server_handle: Any
    zmq_handle: str
    config: Any
    model_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not _is_split(self.config):  # those replicas have verl's own servers
            self.zmq_handle = of_run(self.zmq_handle)
        self.settings: Settings = read_settings(self.model_config.override_config)
        self._runs_jetrl = runs_jetrl(self.config, self.settings)
        self._knows_layout = self._is_prepared = False
        if self._runs_jetrl:
            _check(self.config, self.settings)

    async def update_weights(
        self,
        weights: Any,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **kwargs: Any,
    ) -> None:
        """Send all weights, compare what the replica stores, then let it generate.

        Raises:
            ContainmentError: The replica is not contained in the trainer.
            ModelError: verl's config sends weights that cannot be checked.
        """
        if not self._runs_jetrl:
            expect_nothing()
            await super().update_weights(
                weights, global_steps, wire_format=wire_format, **kwargs
            )
            return
        if wire_format != "named_tensors":
            raise ModelError(
                f"vLLM with quantization='jetrl' takes whole weights, not "
                f"{wire_format!r}; set actor_rollout_ref.rollout.checkpoint_engine."
                "backend=naive"
            )
        sync = current_sync() if self.settings.level else None
        asks = self._ensure_server_handle()
        if asks:
            await self.server_handle.jetrl_begin.remote(global_steps)
            await self._ask("jetrl_begin", global_steps)
        if sync is not None:
            await self._before(sync, asks)
        await super().update_weights(
            weights, global_steps, wire_format=wire_format, **kwargs
        )
        if not asks:
            return
        if sync is not None and self.settings.level >= 3:
            start = time.perf_counter()
            ranks = [json.loads(each) for each in await self._ask("jetrl_digests")]
            sync.check_bytes(ranks, global_steps)
            sync.check_seconds = time.perf_counter() - start
        await self._ask("jetrl_release")
        await self.server_handle.jetrl_end.remote()

    async def _before(self, sync: WeightSync, asks: bool) -> None:
        """Check levels 1 and 2 once; tell the stream what the replica's ranks store."""
        if not asks:
            sync.expect(None, checked=False)
            return
        exact = self.settings.exact
        if exact and not self._is_prepared:
            config = config_document(self.model_config.hf_config)
            (sync.log_probs,) = set(await self._ask("jetrl_prepare", config))
            self._is_prepared = True
        if sync.report is None:
            where = f"replica {self.replica_rank}"
            # The ranks of a sound replica run one graph.
            for document in dict.fromkeys(await self._ask("jetrl_graph")):
                live = graph_from_json(document)
                device = live.meta.get("device", "")
                providers = self.settings.providers or default_providers(device)
                train = on_device(sync.train, device, providers)
                if exact:
                    train = exact_on_device(train, sync.model, device)
                sync.check_graph(live, where, train)
        if self.settings.level >= 3 and not self._knows_layout:
            shards, unchecked = read_layouts(await self._ask("jetrl_layout"))
            sync.expect(shards, unchecked=unchecked)
            self._knows_layout = True

    async def _ask(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all of the replica's workers."""
        found: list[Any] = await self._execute_method(method, args=args)
        return found


def _check(rollout: Any, settings: Settings) -> None:
    """Check that verl sends weights in a way that can be checked.

    Raises:
        ModelError: It does not.
    """
    if _is_split(rollout):
        raise ModelError(
            "rollout.disaggregation is enabled, whose servers give no answers to the "
            "checks; set actor_rollout_ref.rollout.disaggregation.enabled=False"
        )
    engine = getattr(rollout, "checkpoint_engine", None)
    backend = getattr(engine, "backend", "naive")
    if settings.level and backend != "naive":
        raise ModelError(
            f"checkpoint_engine.backend is {backend!r}: weights reach the rollout from "
            "another process than the trainer's, which does not know what they must "
            "be; set actor_rollout_ref.rollout.checkpoint_engine.backend=naive, or "
            "jetrl_level=0"
        )


def _is_split(rollout: Any) -> bool:
    """Return whether prefill and decode have servers of their own."""
    return bool(getattr(getattr(rollout, "disaggregation", None), "enabled", False))
