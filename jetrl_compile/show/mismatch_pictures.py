"""Pictures of a mismatch between trainer and rollout: where, from where on, how much.

Drawn with matplotlib (the extra `show`) into PNG bytes; no window is opened.
"""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from jetrl_compile.audit import Audit
from jetrl_compile.errors import OutputError
from jetrl_compile.grouping import pattern
from jetrl_compile.mismatch import TensorGap
from jetrl_compile.show.page import Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 40
MOST_CELLS = 16  # columns of the heat map whose cells have their numbers written
_BLUE, _ORANGE, _STRONG = "#0072b2", "#b35900", "#d6006c"
_LAYER = re.compile(r"(?<![^.])(\d+)(?![^.:])")  # the first number in a path


def mismatch_pictures(found: Audit) -> dict[str, Picture]:
    """Return the pictures of an audit by file name.

    Args:
        found: What the audit of a live pair found.

    Returns:
        "log_prob_gap.png", "first_divergence.png" and "codes_differ.png".

    Raises:
        OutputError: matplotlib is not installed.
    """
    return {
        "log_prob_gap.png": gap_picture(found.log_prob_gap),
        "first_divergence.png": divergence_picture(found.operators),
        "codes_differ.png": codes_picture(found.stored),
    }


def gap_picture(gap: Tensor) -> Picture:
    """Draw the log-prob gap by position, and its histogram.

    Args:
        gap: |rollout - train|, (B, L - 1), nats; 0 where masked out.
    """
    values = gap.detach().float().cpu().numpy()
    zeros = int((values == 0).sum())
    largest = float(values.max()) if values.size else 0.0
    caption = (
        f"Log-prob gap of {values.size:,} tokens: largest {largest:.3g} nats; "
        f"{zeros:,} are equal bit for bit (or masked out)"
    )
    with _figure(caption, columns=2, size=(11, 3.8)) as (axes, done):
        positions = np.arange(1, values.shape[1] + 1)
        if values.size:
            axes[0].plot(positions, values.max(0), color=_ORANGE, ls="--", label="max")
            axes[0].plot(positions, values.mean(0), color=_BLUE, label="mean")
            axes[0].legend()
        axes[0].set(xlabel="position", ylabel="gap, nats", title="by position")
        axes[0].set_ylim(bottom=0)
        different = values[(values > 0) & np.isfinite(values)]
        if different.size:
            low, high = float(different.min()), float(different.max())
            edges = np.geomspace(low, high * (1 + 1e-6), BINS + 1)
            axes[1].hist(different, bins=edges.tolist(), color=_BLUE)
            axes[1].set_xscale("log")
        else:
            _say(axes[1], "no token differs")
        axes[1].set(xlabel="gap, nats", ylabel="tokens", title="of those that differ")
    return Picture(caption, done())


def divergence_picture(gaps: Sequence[TensorGap]) -> Picture:
    """Draw how much of each operator's value differs, in execution order.

    Args:
        gaps: As `Audit.operators`.
    """
    first = next((n for n, gap in enumerate(gaps) if gap.differ), None)
    caption = f"{len(gaps)} operators in execution order: no value differs"
    if first is not None:
        caption = (
            f"Values part first at {gaps[first].name} ({gaps[first].differ} of "
            f"{gaps[first].total} elements), operator {first + 1} of {len(gaps)}"
        )
    with _figure(caption, columns=1, size=(11, 3.8)) as (axes, done):
        (left,) = axes
        order = np.arange(len(gaps))
        left.plot(
            order, [100 * gap.share for gap in gaps], color=_BLUE, marker=".",
            label="elements that differ, %",
        )  # fmt: skip
        left.set(xlabel="operators in execution order", ylabel="elements, %")
        left.set_ylim(-2, 102)
        right = left.twinx()
        known = [(n, gap.deviation) for n, gap in enumerate(gaps) if gap.deviation]
        if known:
            right.plot(*zip(*known, strict=True), color=_ORANGE, ls="--", marker="x",
                       ms=4, label="largest difference / largest value")  # fmt: skip
            right.set_yscale("log")
        right.set_ylabel("relative difference")
        if first is not None:
            left.axvline(
                first, color=_STRONG, lw=2, label=f"first: {_plain(gaps[first].name)}"
            )
        _mark_layers(left, [gap.name for gap in gaps])
        handles = [*left.get_legend_handles_labels()[0]]
        handles += right.get_legend_handles_labels()[0]
        left.legend(handles=handles, loc="upper left", fontsize=8)
    return Picture(caption, done())


def codes_picture(gaps: Sequence[TensorGap]) -> Picture:
    """Draw which stored codes and scales differ: a row a tensor, a column a layer.

    Args:
        gaps: As `Audit.stored`.
    """
    cells: dict[str, dict[int, float]] = {}
    for gap in gaps:
        found = _LAYER.search(gap.name)
        row = cells.setdefault(pattern(gap.name), {})
        row[int(found[1]) if found else -1] = 100 * gap.share
    columns = sorted({column for row in cells.values() for column in row})
    rows = list(cells)
    table = np.full((len(rows), len(columns)), np.nan)
    for y, row_name in enumerate(rows):
        for column, value in cells[row_name].items():
            table[y, columns.index(column)] = value
    differ = sum(gap.differ > 0 for gap in gaps)
    caption = f"{differ} of {len(gaps)} stored tensors are not the trainer's"
    if differ:
        worst = max(gaps, key=lambda gap: gap.share)
        caption += f"; most differs in {worst.name} ({worst.share:.2%})"
    height = 1.6 + 0.26 * max(len(rows), 4)
    with _figure(caption, columns=1, size=(11, height)) as (axes, done):
        (left,) = axes
        if table.size:
            high = max(float(np.nanmax(table)), 1e-9)
            image = left.imshow(table, aspect="auto", cmap="Blues", vmin=0, vmax=high)
            left.figure.colorbar(image, ax=left, label="elements that differ, %")
            left.patch.set(
                hatch="///", edgecolor="#bbbbbb"
            )  # what a layer does not have
            _write_cells(left, table, high)
        step = max(1, len(columns) // 24)
        labels = ["none" if column < 0 else str(column) for column in columns]
        left.set_xticks(range(0, len(columns), step), labels[::step])
        left.set_yticks(range(len(rows)), [_shortened(row) for row in rows], fontsize=8)
        left.set(xlabel="layer")
    return Picture(caption, done())


def _write_cells(axes: Any, table: "np.ndarray[Any, Any]", high: float) -> None:
    if table.shape[1] > MOST_CELLS:
        return
    for (y, x), value in np.ndenumerate(table):
        if np.isnan(value):
            continue
        text = "0" if value == 0 else f"{value:.3g}"
        color = "white" if value > 0.55 * high else "black"
        axes.text(x, y, text, ha="center", va="center", fontsize=7, color=color)


def _mark_layers(axes: Any, names: Sequence[str]) -> None:
    """Write the number of each layer below its first operator."""
    places: list[tuple[int, str]] = []
    for place, name in enumerate(names):
        found = _LAYER.search(name)
        label = found[1] if found else ""
        if label and (not places or places[-1][1] != label):
            places.append((place, label))
    if places:
        step = max(1, len(places) // 24)
        places = places[::step]
        axes.set_xticks([place for place, _ in places], [text for _, text in places])
        axes.set_xlabel("operators in execution order, by layer")


def _shortened(name: str, most: int = 48) -> str:
    name = name.replace("model.layers.*.", "")
    return _plain(name if len(name) <= most else f"...{name[3 - most :]}")


def _plain(text: str) -> str:
    """Return a text that matplotlib takes for no formula."""
    return text.replace("$", r"\$")


def _say(axes: Any, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)


@contextmanager
def _figure(
    caption: str, columns: int, size: tuple[float, float]
) -> Iterator[tuple[Sequence[Any], Callable[[], bytes]]]:
    """Make a figure; its second value gives the PNG after the body."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OutputError(
            "pictures of mismatches need matplotlib, which is not installed: pip "
            "install 'jetrl-compile[show]'"
        ) from error
    figure: Figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    figure.suptitle(caption, fontsize=9, parse_math=False)
    yield axes, lambda: _png(figure)


def _png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()
