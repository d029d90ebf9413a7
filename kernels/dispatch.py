"""Which kernel runs a block-scaled GEMM: the choice among providers.

Providers are data. The first one of an ordered list that accepts a GEMM runs it, and
the choice records why each earlier one was passed over, for the precision graph and for
`jetrl doctor`. A user orders their names (`options={"providers": (...)}`); without that
the order is the device's, or that of a class of shapes for which another was faster.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType

from jetrl_compile.errors import ProviderError
from jetrl_compile.kernels import reference
from jetrl_compile.kernels.provider import (
    ROLES,
    GemmKernel,
    GemmShape,
    Provider,
    not_quantized,
)
from jetrl_compile.kernels.provider_deep_gemm import DEEP_GEMM
from jetrl_compile.kernels.provider_scaled_mm import SCALED_MM
from jetrl_compile.kernels.provider_triton import TRITON

__all__ = [
    "MEASURED",
    "ORDERS",
    "PROVIDERS",
    "REFERENCE",
    "ROLES",
    "Choice",
    "GemmKernel",
    "GemmShape",
    "MeasuredClass",
    "Provider",
    "ProviderStatus",
    "default_providers",
    "get_provider",
    "provider_statuses",
    "register_provider",
    "select",
]

ORDERS = MappingProxyType(
    {"cuda": ("deep_gemm", "scaled_mm", "triton", "reference"), "": ("reference",)}
)
"""Names of providers by device type, the preferred one first; "": any other device."""


@dataclass(frozen=True, slots=True)
class MeasuredClass:
    """A class of GEMM shapes for which another order was measured to be faster.

    Only providers of one numerics class may change places, so that bits stay the same.

    Attributes:
        name: What people call it, such as "decode".
        roles: The roles it holds for.
        tokens: The fewest and the most tokens.
        order: Names of providers, the preferred one first.
        measured: Device, date and numbers.
        device_type: Of the GEMM.
    """

    name: str
    roles: tuple[str, ...]
    tokens: tuple[int, int]
    order: tuple[str, ...]
    measured: str
    device_type: str = "cuda"

    def holds(self, shape: GemmShape) -> bool:
        """Whether a GEMM is of this class; one with dynamic tokens is of none."""
        return (
            shape.device_type == self.device_type
            and shape.role in self.roles
            and shape.m is not None
            and self.tokens[0] <= shape.m <= self.tokens[1]
        )


MEASURED: tuple[MeasuredClass, ...] = ()
"""The measured classes; the first that holds is taken.

None so far: for M of 1, 8, 64, 256 and 8192 and the GEMMs of Qwen3-8B the first of
`ORDERS` was the fastest in every case (H200, DeepGEMM 2.5; docs/log.md, 2026-11-30).
"""


@dataclass(frozen=True, slots=True)
class Choice:
    """The provider of a GEMM, and why it is the one.

    Attributes:
        provider: The first of the ordered names that accepts the GEMM.
        passed_over: For each name before it, the name and why it was not taken.
        measured: The measured class that gave the order, or None.
    """

    provider: Provider
    passed_over: tuple[tuple[str, str], ...] = ()
    measured: MeasuredClass | None = None

    @property
    def reason(self) -> str:
        """One line: "first choice", or why each earlier provider was passed over."""
        parts = [f"{name}: {why}" for name, why in self.passed_over]
        if self.measured is not None:
            parts.append(f"{self.measured.name}: {self.measured.measured}")
        return "; ".join(parts) or "first choice"


@dataclass(frozen=True, slots=True)
class ProviderStatus:
    """Whether a registered provider can run in this process.

    Attributes:
        provider: The provider.
        reason: Why it cannot run, or None if it can.
    """

    provider: Provider
    reason: str | None

    def __str__(self) -> str:
        state = "usable" if self.reason is None else f"not usable: {self.reason}"
        return f"{self.provider.name}: {state}"


_REGISTRY: dict[str, Provider] = {}
PROVIDERS = MappingProxyType(_REGISTRY)


def register_provider(provider: Provider) -> Provider:
    """Make a provider known by its name and return it.

    Raises:
        ProviderError: Another provider has that name.
    """
    if _REGISTRY.setdefault(provider.name, provider) != provider:
        raise ProviderError(
            f"a different provider named {provider.name!r} is registered; choose "
            "another name"
        )
    return provider


def get_provider(name: str) -> Provider:
    """Return a provider by its name.

    Raises:
        ProviderError: No provider has that name.
    """
    provider = _REGISTRY.get(name) if isinstance(name, str) else None
    if provider is None:
        near = difflib.get_close_matches(str(name), _REGISTRY, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ProviderError(
            f"provider {name!r} is unknown; {hint}known: {', '.join(_REGISTRY)}"
        )
    return provider


def default_providers(device_type: str) -> tuple[str, ...]:
    """Return the names that are tried on a device, the preferred one first."""
    return ORDERS.get(device_type, ORDERS[""])


def select(shape: GemmShape, providers: Iterable[str] | None = None) -> Choice:
    """Choose the first provider of an ordered list that accepts a GEMM.

    Args:
        shape: The GEMM.
        providers: Names, the preferred one first; None for the order of the device, or
            of the measured class that the GEMM is of.

    Returns:
        The provider, with why each earlier one was passed over.

    Raises:
        ProviderError: A name is unknown (even one behind the chosen provider), the
            list is empty, or every provider rejects the GEMM.
    """
    measured = None
    if providers is None:
        measured = next((known for known in MEASURED if known.holds(shape)), None)
        by_device = default_providers(shape.device_type)
        providers = by_device if measured is None else measured.order
    elif isinstance(providers, str):
        providers = (providers,)
    candidates = [get_provider(name) for name in providers]
    passed_over: list[tuple[str, str]] = []
    for provider in candidates:
        why = provider.usable() or provider.rejects(shape)
        if why is None:
            return Choice(provider, tuple(passed_over), measured)
        passed_over.append((provider.name, why))
    if not candidates:
        raise ProviderError(
            f"no provider is listed for {shape}; list at least one of "
            f"{', '.join(_REGISTRY)}"
        )
    reasons = "; ".join(f"{name}: {why}" for name, why in passed_over)
    raise ProviderError(
        f"no provider accepts {shape} ({reasons}); add 'reference', which runs anything"
    )


def provider_statuses() -> tuple[ProviderStatus, ...]:
    """Return every registered provider and whether it can run here."""
    return tuple(ProviderStatus(p, p.usable()) for p in _REGISTRY.values())


REFERENCE = register_provider(
    Provider(
        name="reference",
        gemm=reference.gemm,
        batch_invariant=True,
        numerics="fp64_groups",
        usable=lambda: None,
        rejects=not_quantized,
        description="plain PyTorch, any device; exact partial products in FP64",
    )
)
for _provider in (DEEP_GEMM, SCALED_MM, TRITON):
    register_provider(_provider)
