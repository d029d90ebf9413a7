"""Which kernel runs a block-scaled GEMM: providers, and the choice among them.

Providers are data. A user orders their names (`options={"providers": (...)}`); the
first one that accepts a GEMM runs it, and the choice records why each earlier one was
passed over, for the precision graph and for `jetrl doctor`.
"""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from jetrl_compile.errors import ProviderError
from jetrl_compile.formats import Flow
from jetrl_compile.kernels import reference

GemmKernel = Callable[..., Tensor]
ROLES = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True, slots=True)
class GemmShape:
    """What a provider is asked to run: out = a b^T, both operands block-scaled.

    Attributes:
        role: "fprop" (a = x, b = w), "dgrad" (a = dy, b = w^T) or "wgrad" (a = dy^T,
            b = x^T).
        n: Out features of the layer.
        k: In features of the layer.
        a: The flow of `a`.
        b: The flow of `b`.
        m: Tokens, or None where they are dynamic.
        out_dtype: Short name of the result's dtype.
        device_type: "cpu", "cuda", "meta".
    """

    role: str
    n: int
    k: int
    a: Flow
    b: Flow
    m: int | None = None
    out_dtype: str = "bf16"
    device_type: str = "cpu"

    def __post_init__(self) -> None:
        """Check the role."""
        if self.role not in ROLES:
            raise ProviderError(
                f"GEMM role {self.role!r} is unknown; use one of {', '.join(ROLES)}"
            )

    @property
    def sizes(self) -> tuple[int | None, int | None, int | None]:
        """Rows of a, rows of b, and the contraction, None where they are tokens."""
        return {
            "fprop": (self.m, self.n, self.k),
            "dgrad": (self.m, self.k, self.n),
            "wgrad": (self.n, self.k, self.m),
        }[self.role]

    def __str__(self) -> str:
        tokens = "any" if self.m is None else self.m
        return (
            f"{self.role} M={tokens} N={self.n} K={self.k} on {self.device_type}, "
            f"a {self.a}, b {self.b}"
        )


@dataclass(frozen=True, slots=True)
class Provider:
    """A kernel for block-scaled GEMMs.

    Attributes:
        name: What users and the op's `provider` argument call it.
        gemm: The kernel; it takes the arguments of `reference.gemm`.
        batch_invariant: Whether a row's result is the same bits in every batch.
        numerics: The class of its rounding. Two providers of one class give the same
            bits; `reference` is "fp64_groups": exact partial products a group, added
            in FP64.
        usable: Returns None where it can run in this process, or why it cannot:
            a missing package, GPU or version.
        rejects: Returns None for a GEMM that it can run, or why it cannot.
        description: One line for people.
    """

    name: str
    gemm: GemmKernel
    batch_invariant: bool
    numerics: str
    usable: Callable[[], str | None]
    rejects: Callable[[GemmShape], str | None]
    description: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """The provider of a GEMM, and why it is the one.

    Attributes:
        provider: The first of the ordered names that accepts the GEMM.
        passed_over: For each name before it, the name and why it was not taken.
    """

    provider: Provider
    passed_over: tuple[tuple[str, str], ...] = ()

    @property
    def reason(self) -> str:
        """One line: "first choice", or why each earlier provider was passed over."""
        if not self.passed_over:
            return "first choice"
        return "; ".join(f"{name}: {why}" for name, why in self.passed_over)


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
    provider = _REGISTRY.get(name)
    if provider is None:
        near = difflib.get_close_matches(name, _REGISTRY, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ProviderError(
            f"provider {name!r} is unknown; {hint}known: {', '.join(_REGISTRY)}"
        )
    return provider


def select(shape: GemmShape, providers: Iterable[str] = ("reference",)) -> Choice:
    """Choose the first provider of an ordered list that accepts a GEMM.

    Args:
        shape: The GEMM.
        providers: Names, the preferred one first.

    Returns:
        The provider, with why each earlier one was passed over.

    Raises:
        ProviderError: A name is unknown (even one behind the chosen provider), the
            list is empty, or every provider rejects the GEMM.
    """
    if isinstance(providers, str):
        providers = (providers,)
    candidates = [get_provider(name) for name in providers]
    passed_over: list[tuple[str, str]] = []
    for provider in candidates:
        why = provider.usable() or provider.rejects(shape)
        if why is None:
            return Choice(provider, tuple(passed_over))
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


def _reference_rejects(shape: GemmShape) -> str | None:
    if not (shape.a.is_quantized and shape.b.is_quantized):
        return "an operand is not quantized"
    if {shape.a.dtype, shape.b.dtype} != {"e4m3"}:
        return f"operands are {shape.a.dtype} and {shape.b.dtype}, not e4m3"
    return None


REFERENCE = register_provider(
    Provider(
        name="reference",
        gemm=reference.gemm,
        batch_invariant=True,
        numerics="fp64_groups",
        usable=lambda: None,
        rejects=_reference_rejects,
        description="plain PyTorch, any device; exact partial products in FP64",
    )
)
