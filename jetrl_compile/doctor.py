"""What this machine has: versions, GPUs, providers, recipes."""

import platform
from dataclasses import dataclass
from importlib import metadata, util

PACKAGES: dict[str, tuple[str, ...]] = {  # by import name: names of distributions
    "jetrl_compile": ("jetrl-compile",),
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton"),
    "transformers": ("transformers",),
    "vllm": ("vllm",),
    "verl": ("verl",),
    "deep_gemm": ("deep-gemm", "tokenspeed-deepgemm"),
}


@dataclass(frozen=True)
class GpuInfo:
    """One GPU.

    Attributes:
        name: As the driver calls it.
        capability: Compute capability, such as "9.0".
        memory_gib: Its memory in GiB.
        overlap: Whether kernels are launched before the one before them is over
            (`JETRL_OVERLAP=0` turns that off).
    """

    name: str
    capability: str
    memory_gib: float
    overlap: bool


@dataclass(frozen=True)
class ProviderInfo:
    """A provider of block-scaled GEMMs.

    Attributes:
        name: What `options={"providers": ...}` calls it.
        usable: Whether it can run in this process.
        reason: Why not; "" if it can.
        batch_invariant: Whether a row's result is the same bits in every batch.
        numerics: The class of its rounding; providers of one class give equal bits.
        description: One line for people.
    """

    name: str
    usable: bool
    reason: str
    batch_invariant: bool
    numerics: str
    description: str


@dataclass(frozen=True)
class OrderInfo:
    """The order in which providers are tried unless the user names one.

    Attributes:
        device_type: "cuda", or "" for any other device.
        gemms: Which GEMMs it holds for: "all", or a measured class.
        order: Names, the preferred one first.
        measured: Device, date and numbers of a measured class; "" for the default.
    """

    device_type: str
    gemms: str
    order: tuple[str, ...]
    measured: str = ""


@dataclass(frozen=True)
class RecipeInfo:
    """A registered recipe.

    Attributes:
        name: Its name.
        train: Whether the trainer's GEMMs are FP8.
        rollout: Whether the rollout model's GEMMs are FP8.
        description: One line for people.
    """

    name: str
    train: bool
    rollout: bool
    description: str


@dataclass(frozen=True)
class Diagnosis:
    """What `jetrl doctor` prints.

    Attributes:
        python: Version of Python.
        system: Operating system and architecture.
        versions: By package; "" where it is not installed.
        cuda: The CUDA version of this torch, "" for one without CUDA.
        gpus: The GPUs that torch sees.
        gpu_problem: Why there are none; "" if there is one.
        backend: Why torch.compile does not know backend="jetrl"; "" if it does.
        providers: Every registered provider.
        recipes: Every registered recipe.
        orders: Which provider is tried first, by device and class of GEMMs.
    """

    python: str
    system: str
    versions: dict[str, str]
    cuda: str
    gpus: tuple[GpuInfo, ...]
    gpu_problem: str
    backend: str
    providers: tuple[ProviderInfo, ...]
    recipes: tuple[RecipeInfo, ...]
    orders: tuple[OrderInfo, ...]


def diagnose() -> Diagnosis:
    """Look at this process's packages, GPUs, providers and recipes."""
    from jetrl_compile.kernels.dispatch import provider_statuses
    from jetrl_compile.recipe import get_recipe, recipe_names

    cuda, gpus, problem = _gpus()
    recipes = [get_recipe(name) for name in recipe_names()]
    return Diagnosis(
        platform.python_version(),
        f"{platform.system()} {platform.machine()}",
        {name: package_version(name) for name in PACKAGES},
        cuda,
        gpus,
        problem,
        _backend_problem(),
        tuple(
            ProviderInfo(
                status.provider.name,
                status.reason is None,
                status.reason or "",
                status.provider.batch_invariant,
                status.provider.numerics,
                status.provider.description,
            )
            for status in provider_statuses()
        ),
        tuple(RecipeInfo(r.name, r.train, r.rollout, r.description) for r in recipes),
        _orders(),
    )


def _orders() -> tuple[OrderInfo, ...]:
    from jetrl_compile.kernels.dispatch import MEASURED, ORDERS

    by_class = [
        OrderInfo(
            known.device_type,
            f"{known.name}: {', '.join(known.roles)} of {known.tokens[0]} to "
            f"{known.tokens[1]} tokens",
            known.order,
            known.measured,
        )
        for known in MEASURED
    ]
    return (*by_class, *(OrderInfo(kind, "all", o) for kind, o in ORDERS.items()))


def package_version(name: str) -> str:
    """Return the version of a package of `PACKAGES`, "" where it is not installed."""
    for distribution in PACKAGES[name]:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    try:
        found = util.find_spec(name) is not None
    except (ImportError, ValueError):
        found = False
    return "of unknown version" if found else ""


def _gpus() -> tuple[str, tuple[GpuInfo, ...], str]:
    import torch

    from jetrl_compile.kernels.triton_device import overlaps

    cuda = torch.version.cuda or ""
    if not torch.cuda.is_available():
        why = "no GPU or driver was found" if cuda else "this torch has no CUDA"
        return cuda, (), why
    gpus = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        memory = round(found.total_memory / 2**30, 1)
        overlap = overlaps(torch.device("cuda", index))
        capability = f"{found.major}.{found.minor}"
        gpus.append(GpuInfo(found.name, capability, memory, overlap))
    return cuda, tuple(gpus), ""


def _backend_problem() -> str:
    entry_points = metadata.entry_points(group="torch_dynamo_backends")
    if "jetrl" in entry_points.names:
        return ""
    return "its entry point is not installed: run `pip install jetrl-compile`"
