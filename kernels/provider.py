"""What a provider of block-scaled GEMMs is, and what it is asked for.

The providers are in `provider_*.py`; `dispatch.py` registers them and chooses.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl_compile.errors import ProviderError
from jetrl_compile.formats import Flow
from jetrl_compile.granularity import BLOCK_128X128, GROUP_1X128

GemmKernel = Callable[..., Tensor]
ROLES = ("fprop", "dgrad", "wgrad")
WGMMA_GROUPS = "fp32_groups_wgmma"
"""Numerics of `deep_gemm` and `scaled_mm`: Hopper's tensor cores add the products of
one group of 128 (four steps of 32, about 14 bits kept of each); their sum times
`a_scale * b_scale`, rounded to FP32, is added in FP32, in ascending order."""


@dataclass(frozen=True, slots=True)
class GemmShape:
    """What a provider is asked to run: out = a b^T, both operands block-scaled.

    Attributes:
        role: "fprop" (a = x, b = w), "dgrad" (a = dy, b = w^T) or "wgrad" (a = dy^T,
            b = x^T).
        n: Out features of the layer; below 0 where they are dynamic.
        k: In features of the layer; below 0 where they are dynamic.
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


def not_quantized(shape: GemmShape) -> str | None:
    """Return why a GEMM's operands are no E4M3 codes with scales, or None."""
    if not (shape.a.is_quantized and shape.b.is_quantized):
        return "an operand is not quantized"
    if {shape.a.dtype, shape.b.dtype} != {"e4m3"}:
        return f"operands are {shape.a.dtype} and {shape.b.dtype}, not e4m3"
    return None


def other_regions(shape: GemmShape, b_groups: bool) -> str | None:
    """Return why the regions are not those of Hopper's kernels, or None.

    Args:
        shape: The GEMM.
        b_groups: Whether `b` may have 1x128 groups as well as 128x128 blocks.
    """
    wanted = (BLOCK_128X128, GROUP_1X128) if b_groups else (BLOCK_128X128,)
    if shape.a.granularity == GROUP_1X128 and shape.b.granularity in wanted:
        return None
    names = " or ".join(map(str, wanted))
    return (
        f"regions are {shape.a.granularity} by {shape.b.granularity}, not "
        f"{GROUP_1X128} by {names}"
    )


def not_on_cuda(shape: GemmShape) -> str | None:
    """Return why a GEMM's device is no GPU, or None."""
    if shape.device_type == "cuda":
        return None
    return f"it runs on cuda, not on {shape.device_type}"


def no_hopper() -> str | None:
    """Return why the current device is no Hopper GPU, or None."""
    if not torch.cuda.is_available():
        return "no GPU or driver was found"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        return f"the GPU has compute capability {major}.{minor}, not 9.0 (Hopper)"
    return None
