"""Weights for a live engine over vLLM's weight-transfer API, on one GPU.

A process of its own makes the weights and hands out CUDA IPC handles, as a trainer that
shares the GPU does. Where the driver allows no IPC, the same calls are made with a
transport inside of the process.
"""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor
from vllm_engines import Worker

BACKEND = "ipc_or_local"
_LOCAL: dict[str, Tensor] = {}  # what the transport inside of the process delivers


def ipc_engine() -> ModuleType:
    """Return vLLM's module, which imports Ray and uses it only to reach actors."""
    name = "vllm.distributed.weight_transfer.ipc_engine"
    if importlib.util.find_spec("ray") is not None:
        return importlib.import_module(name)
    sys.modules["ray"] = ModuleType("ray")
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules["ray"]


def register() -> None:
    """Make the backend known to vLLM in this process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    base: Any = ipc_engine().IPCWeightTransferEngine

    class Engine(base):  # type: ignore[misc]
        """CUDA IPC, or what is in this process."""

        def receive_weights(self, update_info: Any, load_weights: Any) -> None:
            if _LOCAL:
                load_weights(list(_LOCAL.items()))
            else:
                super().receive_weights(update_info, load_weights)

    WeightTransferEngineFactory.register_engine(BACKEND, Engine)


def start_sender(make: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Return what gives the update info of a model's first parameters.

    Args:
        make: Returns the model; importable.
        *args: Of `make`.
    """
    module = ipc_engine()
    weights = {name: p.detach() for name, p in make(*args).named_parameters()}

    def send(count: int) -> dict[str, Any]:
        infos: list[Any] = []
        how = module.IPCTrainerSendWeightsArgs(send_mode=infos.append)
        some = list(weights.items())[:count]
        module.IPCWeightTransferEngine.trainer_send_weights(iter(some), how)
        keys = ("names", "dtype_names", "shapes", "ipc_handles", "packed")
        return {key: getattr(infos[0], key) for key in keys}

    return send


def transfer(llm: Any, sender: Worker, weights: Mapping[str, Tensor]) -> str:
    """Bring weights into an engine; return the transport.

    Args:
        llm: vLLM's LLM, made with the backend.
        sender: A process with equal weights, of `start_sender`.
        weights: Those that are sent: the first ones of the sender's.
    """
    llm.init_weight_transfer_engine({"init_info": {}})
    try:
        info = sender.ask(len(weights))
        assert info["names"] == list(weights), "the sender has other parameters"
        llm.start_weight_update()
        llm.update_weights({"update_info": info})
    except Exception as error:
        print(f"CUDA IPC: {type(error).__name__}: {error}", flush=True)
        empty: dict[str, Any] = {"names": [], "dtype_names": [], "shapes": []}
        _LOCAL.update(weights)
        with contextlib.suppress(RuntimeError):  # it may have begun
            llm.start_weight_update()
        llm.update_weights({"update_info": {**empty, "ipc_handles": []}})
        _LOCAL.clear()
        llm.finish_weight_update()
        return "in process"
    llm.finish_weight_update()
    return "CUDA IPC"
