"""How many elements of a GEMM operand share one quantization scale."""

import re
from dataclasses import dataclass

from jetrl_compile.errors import PrecisionFlowError


@dataclass(frozen=True, slots=True)
class Granularity:
    """The shape of the region of a 2-D operand that shares one scale.

    An operand is seen with its contraction dimension last (the order in which an NT
    GEMM reads it), so a group of 128 along the contraction is always `1x128`.

    Attributes:
        rows: Rows in a region; 0 means all of them.
        cols: Columns in a region, along the contraction; 0 means all of them.
    """

    rows: int
    cols: int

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of the scales of an operand, tails included.

        Args:
            shape: Rows and columns of the operand, in elements. A dimension that is
                not a multiple of the region has a last, partial region.

        Returns:
            Rows and columns of its scales.
        """
        rows, cols = self.rows or max(shape[0], 1), self.cols or max(shape[1], 1)
        return (-(-shape[0] // rows), -(-shape[1] // cols))

    @staticmethod
    def parse(text: str) -> "Granularity":
        """Read what `str` writes, such as "1x128" or "allxall".

        Raises:
            PrecisionFlowError: The text is no granularity.
        """
        match = re.fullmatch(r"(all|[1-9]\d*)x(all|[1-9]\d*)", text)
        if match is None:
            raise PrecisionFlowError(
                f"granularity {text!r} is not ROWSxCOLS; write for example 1x128"
            )
        rows, cols = (0 if part == "all" else int(part) for part in match.groups())
        return Granularity(rows, cols)

    def __str__(self) -> str:
        return f"{self.rows or 'all'}x{self.cols or 'all'}"


GROUP_1X128 = Granularity(1, 128)
BLOCK_128X128 = Granularity(128, 128)
