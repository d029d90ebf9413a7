"""A platform of verl's that is the CPU: gloo, no device memory, Ray's logical GPUs."""

import contextlib
import os
import types
from collections.abc import Iterator
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _device_module() -> types.ModuleType:
    """torch.cpu, with the functions of torch.cuda that verl calls."""
    module = types.ModuleType("jetrl_cpu_device")
    vars(module).update(
        {name: value for name, value in vars(torch.cpu).items() if name[0] != "_"}
    )

    def none(*_: Any, **__: Any) -> None:
        return None

    def zero(*_: Any, **__: Any) -> int:
        return 0

    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats"):
        setattr(module, name, none)
    for name in (
        "max_memory_allocated",
        "max_memory_reserved",
        "memory_allocated",
        "memory_reserved",
    ):
        setattr(module, name, zero)
    vars(module).update(
        is_available=lambda: True,
        mem_get_info=lambda *_: (0, 0),
        get_device_name=lambda *_: "CPU",
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
    )
    return module


_DEVICE = _device_module()


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    """Chosen by `VERL_PLATFORM=cpu`; each rank holds one of Ray's logical GPUs."""

    @property
    def device_name(self) -> str:
        """The device type of tensors."""
        return "cpu"

    @property
    def vendor_name(self) -> str:
        """The vendor under which engines are registered."""
        return "cpu"

    @property
    def device_module(self) -> types.ModuleType:
        """What stands for torch.cuda."""
        return _DEVICE

    def is_available(self) -> bool:
        """Return True: there is always a CPU."""
        return True

    def current_device(self) -> Any:
        """Return what tensors are moved to."""
        return "cpu"

    def device_count(self) -> int:
        """Return 1: a process has one CPU device."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Do nothing."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: what runs on a CPU has run."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing: the settings are of CUDA's allocator."""

    def empty_cache(self) -> None:
        """Do nothing."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        """Return that there is none."""
        return None, None

    def communication_backend_name(self) -> str:
        """Return "gloo", after making the default process group of a worker.

        verl asks right before it makes the group itself, of "cpu:gloo,<device>:<this>";
        for the device "cpu" torch refuses that, as it names a device twice. verl makes
        none where one is there.
        """
        distributed = torch.distributed
        if not distributed.is_initialized() and all(map(os.environ.get, _RENDEZVOUS)):
            distributed.init_process_group(
                "gloo",
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                init_method=os.environ.get("DIST_INIT_METHOD"),
            )
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Return the variable that Ray sets for a logical GPU."""
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Name nothing."""
        yield

    def profiler_start(self) -> None:
        """Do nothing."""

    def profiler_stop(self) -> None:
        """Do nothing."""

    def ray_resource_name(self) -> str:
        """Return Ray's name of the resource that a rank takes one of."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Return no variables."""
        return []

    def is_ipc_supported(self) -> bool:
        """Return False: tensors are sent."""
        return False

    def cudart(self) -> None:
        """Return that there is none."""
        return
