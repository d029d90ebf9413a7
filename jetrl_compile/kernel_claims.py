"""Kernels that give a row the same bits in every batch, each with its proof.

A kernel may claim so only with a test of this suite that shows it over batch sizes,
positions and chunks; `tests/test_kernel_claims.py` fails for a claim without one. Exact
containment asks for claimed kernels, of one numerics class on both sides.
"""

from dataclasses import dataclass
from types import MappingProxyType

from jetrl_compile.precision_graph import Operator

_OPS = "tests/kernels/test_exact_ops.py"
_ATTENTION = "tests/kernels/test_exact_attention.py"
_GEMMS = "tests/kernels/test_provider_gpu.py"


@dataclass(frozen=True, slots=True)
class KernelClaim:
    """That a row's result is the same bits whatever else is in the batch.

    Attributes:
        kernel: What operators call it: their provider, or one of `BY_DEFINITION`.
        numerics: The class of its rounding: two kernels of one class give equal bits.
        tests: Tests that prove it, as "file::function".
    """

    kernel: str
    numerics: str
    tests: tuple[str, ...]


def _claim(kernel: str, *tests: str, numerics: str = "") -> KernelClaim:
    return KernelClaim(kernel, numerics or kernel, tests)


def _rows(name: str) -> KernelClaim:
    return _claim(
        f"jetrl.{name}", f"{_OPS}::test_{name}_of_a_row_is_the_same_in_every_batch"
    )


def _attention(kernel: str) -> KernelClaim:
    return _claim(
        f"jetrl.attention.{kernel}",
        f"{_ATTENTION}::test_decode_and_chunks_equal_prefill",
        f"{_ATTENTION}::test_batches_padding_and_packing_change_nothing",
    )


_SAME_ROWS = f"{_GEMMS}::test_rows_do_not_depend_on_the_batch"
_BF16_GEMM = f"{_OPS}::test_bf16_gemm_of_a_row_is_the_same_in_every_batch"
_BY_DEFINITION = "tests/test_kernel_claims.py::test_what_needs_no_kernel_of_its_own"
_ALL = (
    _rows("rms_norm"),
    _rows("silu_mul"),
    _rows("rope"),
    _attention("reference"),
    _attention("triton"),
    _attention("fa3"),
    _claim(
        "reference",
        "tests/kernels/test_gemm.py::test_row_does_not_depend_on_the_batch",
        _BF16_GEMM,
    ),
    _claim("deep_gemm", _SAME_ROWS, _BF16_GEMM, numerics="fp32_groups_wgmma"),
    _claim("scaled_mm", _SAME_ROWS, numerics="fp32_groups_wgmma"),
    _claim("triton", _SAME_ROWS),
    _claim("gather", _BY_DEFINITION),
    _claim("one rounding", _BY_DEFINITION),
    _claim("rope table", _BY_DEFINITION),
)
CLAIMS = MappingProxyType({claim.kernel: claim for claim in _ALL})
"""The claims, by kernel."""

BY_DEFINITION = MappingProxyType(
    {
        "embedding": "gather",
        "residual_add": "one rounding",
        "bias_add": "one rounding",
        "cast": "one rounding",
        "rope_table": "rope table",
    }
)
"""By kind of operator, what any kernel computes alike: rows that are copied, and sums
of two numbers that are rounded once."""
_NOTHING = ("input", "parameter", "constant", "index", "output")
_ROUNDED = ("bf16", "fp16")


def has_bits(operator: Operator) -> bool:
    """Return whether an operator computes what logits depend on."""
    return operator.phase == "forward" and operator.kind not in _NOTHING


def claim_of(operator: Operator) -> KernelClaim | None:
    """Return the claim of the kernel that runs an operator, or None without one.

    Args:
        operator: Of a precision graph.
    """
    name = BY_DEFINITION.get(operator.kind)
    if name == "one rounding" and operator.compute_dtype not in _ROUNDED:
        return None  # a sum that a kernel keeps in FP32
    return CLAIMS.get(name or operator.provider)


def kernel_name(operator: Operator) -> str:
    """Return what messages call the kernel of an operator."""
    return operator.provider or "an unknown kernel"


def not_exact(operator: Operator) -> str:
    """Return why an operator may give a row other bits in another batch, "" if not.

    Args:
        operator: Of a precision graph.
    """
    if not has_bits(operator) or claim_of(operator) is not None:
        return ""
    what = operator.kind.replace("_", " ")
    return (
        f"{operator.name} ({what}) is run by {kernel_name(operator)}, which no test "
        "shows to be independent of the batch"
    )
