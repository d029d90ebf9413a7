"""Number formats, and the annotation that one tensor use carries: its flow."""

from dataclasses import dataclass, replace

import torch

from jetrl_compile.granularity import BLOCK_128X128, GROUP_1X128, Granularity

E4M3_MAX: float = 448.0
AMAX_FLOOR: float = 1e-10
SCALE_FORMATS = ("fp32", "ue8m0")

_SHORT_NAMES = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bool: "bool",
}
FLOATING = ("e4m3", "e5m2", "fp16", "bf16", "fp32", "fp64")


def short_name(dtype: torch.dtype) -> str:
    """Return a dtype's short name: "bf16", "e4m3", "int64"."""
    return _SHORT_NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class Flow:
    """The precision at which one operator reads one tensor.

    A flow without scales (BF16, FP32, integers) has only `dtype`; a quantized one has
    every attribute down to `scale_layout`.

    Attributes:
        dtype: Of the values as the operator reads them: "bf16", "fp32", "e4m3", ...
        granularity: The region that shares a scale, the contraction dimension last.
        direction: The GEMM dimension along which `granularity.cols` runs: "K" in
            fprop, "N" in dgrad, "M" (tokens) in wgrad.
        scale_format: "fp32", or "ue8m0" for scales that are powers of two.
        amax_floor: The smallest amax that a scale is made from.
        scale_apply: "divide" (code = x / scale) or "reciprocal" (x * (1 / scale)),
            which is a different quantizer.
        source_dtype: Of the tensor that is quantized. An FP32 master that is rounded
            to BF16 first has "bf16".
        scale_layout: Memory order of the scales: "row_major", or "mn_major_tma"
            (column-major, padded to 16 bytes).
        saved_dtype: Of what is kept of this tensor for backward, or None. It says
            nothing about forward values and takes no part in containment.
    """

    dtype: str
    granularity: Granularity | None = None
    direction: str | None = None
    scale_format: str | None = None
    amax_floor: float | None = None
    scale_apply: str | None = None
    source_dtype: str | None = None
    scale_layout: str | None = None
    saved_dtype: str | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether the tensor has scales."""
        return self.granularity is not None

    def saved_as(self, dtype: str | None) -> "Flow":
        """Return this flow with another `saved_dtype`."""
        return replace(self, saved_dtype=dtype)

    def __str__(self) -> str:
        text = self.dtype
        if self.granularity is not None:
            parts = [f"{self.granularity} along {self.direction}"]
            parts += [f"scale {self.scale_format} {self.scale_layout}"]
            parts += [f"{self.scale_apply}, floor {self.amax_floor:g}"]
            parts += [f"from {self.source_dtype}"]
            text += f"[{'; '.join(parts)}]"
        return (
            text if self.saved_dtype is None else f"{text} (saved {self.saved_dtype})"
        )


def quantized(
    granularity: Granularity, direction: str, scale_format: str = "fp32"
) -> Flow:
    """Return the contract's E4M3 flow: division, floor 1e-10, BF16 source."""
    return Flow(
        dtype="e4m3",
        granularity=granularity,
        direction=direction,
        scale_format=scale_format,
        amax_floor=AMAX_FLOOR,
        scale_apply="divide",
        source_dtype="bf16",
        scale_layout=scale_layout(granularity),
    )


def scale_layout(granularity: Granularity) -> str:
    """Return the memory order of scales that the project's kernels make."""
    return "mn_major_tma" if granularity.rows == 1 else "row_major"


def groups(direction: str, scale_format: str = "fp32") -> Flow:
    """Return the flow of 1x128 groups along a GEMM dimension."""
    return quantized(GROUP_1X128, direction, scale_format)


def blocks(direction: str, scale_format: str = "fp32") -> Flow:
    """Return the flow of 128x128 blocks."""
    return quantized(BLOCK_128X128, direction, scale_format)
