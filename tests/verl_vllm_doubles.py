"""What stands for vLLM's engine, its processes and Ray, around verl's own code.

verl's adapter, its extension of vLLM's workers and its bucketed transfer are verl's;
the model is `vllm_engine_model`'s, and a thread stands for vLLM's worker.
"""

import asyncio
import contextlib
import importlib
import importlib.metadata
import sys
import threading
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

VERSION = "0.24.0"
MADE = (  # modules that are imported from the stand-ins
    "vllm",
    "verl.third_party.vllm",
    "verl.utils.vllm",
    "verl.workers.rollout.vllm_rollout",
    "jetrl_compile.integrations.verl_vllm",
)


class SamplingParams:
    prompt_logprobs = None

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)


CONTENTS: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": VERSION, "SamplingParams": SamplingParams},
    "vllm.ir": {"enable_torch_wrap": contextlib.nullcontext},
    "vllm.distributed": {"get_tensor_model_parallel_world_size": lambda: 1},
    "vllm.model_executor.model_loader.utils": {
        "process_weights_after_loading": lambda *_: None
    },
}
_KNOWN = importlib.metadata.version


def version(distribution_name: str) -> str:
    """As importlib.metadata's, of an environment with vLLM."""
    return VERSION if distribution_name == "vllm" else _KNOWN(distribution_name)


class AnyModules(MetaPathFinder, Loader):
    """Every module of vLLM: packages whose names are classes without content."""

    def __init__(self, contents: dict[str, dict[str, Any]]) -> None:
        self.contents = contents

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "vllm":
            return None
        return ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        def missing(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        vars(module).update(self.contents.get(module.__name__, {}))
        vars(module)["__getattr__"] = missing


@contextlib.contextmanager
def vllm_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let verl and this package find a vLLM without content."""
    with monkeypatch.context() as patched:
        patched.setattr(importlib.metadata, "version", version)
        patched.setattr(sys, "meta_path", [AnyModules(CONTENTS), *sys.meta_path])
        context = SimpleNamespace(get_job_id=lambda: "t", gcs_address="host:1")
        patched.setattr("ray.get_runtime_context", lambda: context)
        patched.setenv("VERL_REPLICA_RANK", "0")
        patched.setenv("RANK", "0")
        patched.setenv("RAY_LOCAL_WORLD_SIZE", "1")
        _forget()
        channel: Any = importlib.import_module(
            "jetrl_compile.integrations.verl_vllm.channel"
        )
        patched.setenv(channel.VARIABLE, channel.name_of_run())  # as the server does
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    for name in list(sys.modules):
        if any(name == made or name.startswith(f"{made}.") for made in MADE):
            del sys.modules[name]


def make_worker(model: Any) -> Any:
    """vLLM's worker of a model, with the extension mixed in as vLLM does it."""
    from jetrl_compile.integrations.verl_vllm.worker import WorkerExtension

    class WorkerBase:
        device = torch.device("cpu")
        local_rank = 0

    class Worker(WorkerBase):
        get_model = update_weights = sleep = wake_up = load_model = None

    own = {name for name in dir(WorkerExtension) if not name.startswith("__")}
    assert not own & set(dir(Worker)), "vLLM refuses names that its worker has"
    Worker.__bases__ = (*Worker.__bases__, WorkerExtension)
    worker: Any = object.__new__(Worker)
    worker._is_qat_model = worker._is_modelopt_qat = False
    worker.model_runner = SimpleNamespace(
        model=model,
        vllm_config=SimpleNamespace(
            parallel_config=None, speculative_config=None, model_config=None
        ),
    )
    return worker


class Handle:
    """Ray's handle of a server: a call runs elsewhere at once, and can be awaited."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.server, name)

        def remote(*args: Any, **kwargs: Any) -> Any:
            call = method(*args, **kwargs)
            return asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(call, self.loop)
            )

        return SimpleNamespace(remote=remote)


class Engine:
    """vLLM's engine: RPCs go to all workers, each in a thread of its own."""

    def __init__(self, *workers: Any) -> None:
        self.workers = workers
        self.calls: list[str] = []

    async def collective_rpc(
        self, method: str, timeout: Any, args: Any, kwargs: Any
    ) -> list[Any]:
        self.calls.append(method)
        found = [
            asyncio.to_thread(getattr(worker, method), *args, **(kwargs or {}))
            for worker in self.workers
        ]
        return await asyncio.gather(*found)

    async def reset_prefix_cache(self, **_: Any) -> None:
        self.calls.append("reset_prefix_cache")

    async def reset_mm_cache(self) -> None:
        pass

    async def reset_encoder_cache(self) -> None:
        pass


def make_server(engine: Engine, *, runs_jetrl: bool = True) -> Any:
    """A server of this package around an engine, without vLLM's command line."""
    from jetrl_compile.integrations.verl_vllm.server import Server

    server: Any = object.__new__(Server)
    server.engine, server.node_rank, server.global_steps = engine, 0, None
    server._submission_paused, server._rejecting, server._admitting = False, False, 0
    server._runs_jetrl = runs_jetrl
    server.refusal = "no weights came from the trainer yet"
    return server


def make_adapter(model_config: Any, server: Any, **config: Any) -> Any:
    """The adapter of a worker, connected with a server."""
    from verl.workers.config import RolloutConfig

    from jetrl_compile.integrations.verl_vllm.adapter import ServerAdapter

    rollout = RolloutConfig(name="vllm", tensor_model_parallel_size=1, **config)
    adapter: Any = ServerAdapter(rollout, model_config, None)
    adapter.server_handle = Handle(server)
    return adapter
