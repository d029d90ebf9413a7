"""How dtypes and granularities look: a colour, a dash, an arrow and words for each.

Everything is told at least twice, so that a page can be read without colour: FP8 edges
are solid, others dashed or dotted; the arrow tells the granularity; the label has both.
Hues are those of Okabe and Ito, which people with colour blindness can tell apart,
darkened so that words in them have a contrast of 4.5 to 1 on white.
Source: Okabe and Ito, Color Universal Design, 2008; WCAG 2.2, success criterion 1.4.3.
"""

from dataclasses import dataclass

from jetrl_compile.formats import Flow
from jetrl_compile.granularity import BLOCK_128X128, GROUP_1X128

DIFFERENCE = "#d6006c"  # nothing else has this colour
FP8_FILL = "#d9ebf7"
BLOCK_FILL = "#f4f1ea"
WIDEST = 6.0  # pixels, of the edge with the most bytes
_FP8 = ("e4m3", "e5m2")


@dataclass(frozen=True, slots=True)
class Style:
    """How an edge looks.

    Attributes:
        key: Short and unique, for classes of the page.
        label: What the legend says.
        color: As "#rrggbb".
        line: "solid", "dashed" or "dotted".
        arrow: "triangle", "square", "diamond" or "vee": the granularity.
    """

    key: str
    label: str
    color: str
    line: str
    arrow: str


STYLES = (
    Style("fp8-group", "FP8, groups of 1x128", "#0072b2", "solid", "triangle"),
    Style("fp8-block", "FP8, blocks of 128x128", "#00795a", "solid", "square"),
    Style("fp8-other", "FP8, another granularity", "#6a3d9a", "solid", "diamond"),
    Style("half", "BF16, FP16", "#4f5d6b", "dashed", "vee"),
    Style("wide", "FP32, FP64", "#b35900", "dotted", "vee"),
    Style("whole", "integers, booleans", "#767676", "dotted", "vee"),
    Style("mixed", "several at once (a folded block)", "#222222", "dashed", "triangle"),
)
MIXED = len(STYLES) - 1


def style_of(flow: Flow) -> int:
    """Return the place in `STYLES` of how an edge with a flow looks."""
    if flow.is_quantized or flow.dtype in _FP8:
        table = {GROUP_1X128: 0, BLOCK_128X128: 1}
        return 2 if flow.granularity is None else table.get(flow.granularity, 2)
    if flow.dtype in ("bf16", "fp16"):
        return 3
    return 4 if flow.dtype in ("fp32", "fp64") else 5


def short_flow(flow: Flow) -> str:
    """Return a flow in two or three words: "e4m3 1x128", "bf16"."""
    words = [flow.dtype]
    if flow.granularity is not None:
        words.append(str(flow.granularity))
    if flow.scale_format not in (None, "fp32"):
        words.append(str(flow.scale_format))
    return " ".join(words)
