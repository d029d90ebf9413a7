"""verl's vLLM server and replica, whose RPCs answer and whose weights are whole."""

import os
from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import (
    vLLMHttpServer,
    vLLMReplica,
)

from jetrl_compile.errors import RefitError
from jetrl_compile.integrations.verl.settings import Settings, read_settings, take_off
from jetrl_compile.integrations.verl_vllm.channel import VARIABLE, name_of_run
from jetrl_compile.integrations.verl_vllm.config import runs_jetrl, set_defaults

EXTENSION = "jetrl_compile.integrations.verl_vllm.worker.WorkerExtension"


class Server(vLLMHttpServer):
    """verl's server; it refuses to generate from weights of no finished sync.

    Attributes:
        refusal: Why it must not generate, or "".
    """

    config: Any
    engine: Any
    refusal = ""
    _admitting: int
    _settings: Settings
    _runs_jetrl = False

    def _init_model_config(self, model_config: Any) -> Any:
        """Read the settings, and take them off the Hugging Face config."""
        os.environ[VARIABLE] = name_of_run()  # vLLM's workers inherit it
        made = super()._init_model_config(model_config)
        self._settings = read_settings(made.override_config)
        take_off(made.hf_config)
        self._runs_jetrl = runs_jetrl(self.config, self._settings)
        if self._runs_jetrl:
            self.refusal = "no weights came from the trainer yet"
        return made

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        """Set vLLM up for the recipe of the trainer."""
        super()._preprocess_engine_kwargs(engine_kwargs)
        if self._runs_jetrl:
            set_defaults(engine_kwargs, self._settings)

    def _get_worker_extension_cls(self) -> str:
        """Return the extension of vLLM's workers, by its path."""
        if self._runs_jetrl:
            return EXTENSION
        own: str = super()._get_worker_extension_cls()
        return own

    async def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a method of all workers; return their results, which verl drops."""
        return await self.engine.collective_rpc(
            method=method, timeout=timeout, args=args, kwargs=kwargs
        )

    async def jetrl_begin(self, step: int | None) -> None:
        """Refuse to generate from now on: the weights of a step will come."""
        self.refusal = f"the weight sync of step {step} was not finished"

    async def jetrl_end(self) -> None:
        """Generate again: the sync was finished, and checked if it had to be."""
        self.refusal = ""

    async def _park_until_admitted(self, request_id: str) -> Any:
        """Admit a request as verl's server does: after a sync that it is waiting for.

        Raises:
            RefitError: The weights are not those of one finished sync.
        """
        rejected = await super()._park_until_admitted(request_id)
        if rejected is None and self.refusal:
            self._admitting -= 1  # which verl's server has counted
            raise RefitError(f"the rollout refuses to generate: {self.refusal}")
        return rejected

    async def _sleep_hybrid(self) -> None:
        """Sleep as verl's server does; at level 2 no weights are left."""
        self._forget_weights()
        await super()._sleep_hybrid()

    async def release_kv_cache(self) -> None:
        """Release memory as verl's server does: the weights, too."""
        if self.config.free_cache_engine:
            self._forget_weights()
        await super().release_kv_cache()

    def _forget_weights(self) -> None:
        if self._runs_jetrl and self._resolve_sleep_level() == 2:
            self.refusal = "it slept, and no weights came from the trainer since"


class Replica(vLLMReplica):
    """verl's replica with this server; reward models and teachers have verl's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not (self.is_reward_model or self.is_teacher_model):
            self.server_class = ray.remote(Server)
