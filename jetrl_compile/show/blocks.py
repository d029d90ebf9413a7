"""The boxes of a picture: repeated layers, and the layers of a period."""

from dataclasses import dataclass

from jetrl_compile.grouping import ranges
from jetrl_compile.show.folding import Folded, Run, split
from jetrl_compile.show.paired import Item


@dataclass(frozen=True, slots=True)
class Block:
    """A box that opens on a click.

    Attributes:
        title: "model.layers.0-35".
        path: What the names of its operators begin with: "model.layers.0"; where it
            holds several layers, their list's path.
        list_path: The list's path: "model.layers".
        numbers: The layers that it stands for.
        drawn: The layers that are drawn in it, the first ones of `numbers`.
        repeats: How often what is drawn occurs; 1: no "x36".
        phase: "forward" or "backward".
        parent: Number of the block around it, -1 for none.
        carried: What one repetition hands to the next, a line each.
    """

    title: str
    path: str
    list_path: str
    numbers: tuple[int, ...]
    drawn: tuple[int, ...]
    repeats: int
    phase: str
    parent: int
    carried: tuple[str, ...] = ()


class BlockTable:
    """Makes the blocks that operators are in.

    Attributes:
        blocks: In order of appearance, outer ones before inner ones.
    """

    def __init__(self, folded: Folded) -> None:
        self.blocks: list[Block] = []
        self._folded = folded
        self._runs = {
            (run.path, number): run
            for run in folded.runs
            for number in run.numbers[: run.period]
        }
        self._known: dict[tuple[object, ...], int] = {}
        self._forward = frozenset(
            item.name for item in folded.items if item.phase == "forward"
        )

    def block_of(self, item: Item) -> int:
        """Return the number of the innermost block around an operator, or -1."""
        phase = "forward" if item.phase == "forward" else "backward"
        block, depth = -1, 0
        while place := split(item.name, depth):
            path, number, _ = place
            run = self._runs.get((path, number))
            if run is not None:
                block = self._run_block(run, phase, block)
                if run.period > 1:
                    block = self._layer_block(run, number, phase, block)
            depth += 1
        return block

    def _run_block(self, run: Run, phase: str, parent: int) -> int:
        drawn = run.numbers[: run.period]
        path = f"{run.path}.{drawn[0]}" if run.period == 1 else run.path
        numbers = run.numbers
        block = Block(
            run.title, path, run.path, numbers, drawn, run.repeats, phase, parent,
            self._carried(run, phase),
        )  # fmt: skip
        return self._number((run.title, phase, parent), block)

    def _layer_block(self, run: Run, number: int, phase: str, parent: int) -> int:
        numbers = run.numbers[run.numbers.index(number) :: run.period]
        title = f"{run.path}.{ranges(numbers)}"
        path = f"{run.path}.{number}"
        block = Block(title, path, run.path, numbers, (number,), 1, phase, parent)
        return self._number((path, phase, parent), block)

    def _number(self, key: tuple[object, ...], block: Block) -> int:
        if key not in self._known:
            self._known[key] = len(self.blocks)
            self.blocks.append(block)
        return self._known[key]

    def _carried(self, run: Run, phase: str) -> tuple[str, ...]:
        lines = []
        for use in self._folded.carried.get(run.title, ()):
            is_forward = use.target in self._forward
            if is_forward == (phase == "forward"):
                lines.append(f"{use.source} -> {use.target}.{use.operand}: {use.flow}")
        return tuple(lines)
