"""The words on boxes and edges, as the page's scripts write them."""

from collections import Counter

from jetrl_compile.show.view import View
from jetrl_compile.show.visible import Arrow, Box

DIFFERS = "\u2260"


def box_lines(view: View, box: Box) -> list[str]:
    """Return the lines on a node or on a closed block."""
    return _block_lines(view, box) if box.is_block else _node_lines(view, box)


def arrow_text(view: View, arrow: Arrow) -> str:
    """Return what an edge carries: "x: e4m3 1x128", or what several carry."""
    words: Counter[str] = Counter()
    for number in arrow.members:
        flows = [flow for flow in view.edges[number].flows if flow is not None]
        texts = dict.fromkeys(view.flows[flow].text for flow in flows)
        words[f" {DIFFERS} ".join(texts)] += 1
    if len(arrow.members) == 1:
        return f"{view.edges[arrow.members[0]].operand}: {next(iter(words))}"
    parts = [f"{text} \u00d7{n}" if n > 1 else text for text, n in words.items()]
    return ", ".join([*parts[:2], "\u2026"] if len(parts) > 2 else parts)


def _node_lines(view: View, box: Box) -> list[str]:
    node = view.nodes[box.number]
    texts = list(dict.fromkeys(text for text in node.text if text))
    lines = [node.label]
    if len(texts) > 1:
        named = zip(view.titles, node.text, strict=True)
        lines += [f"{title}: {text}" for title, text in named if text]
    else:
        lines += texts
    if len(view.titles) == 2 and node.sides != 3:
        lines.append(f"only in {view.titles[node.sides - 1]}")
    return lines


def _block_lines(view: View, box: Box) -> list[str]:
    block = view.blocks[box.number]
    times = f"   \u00d7{block.repeats}" if block.repeats > 1 else ""
    counts = [_gemms(view, box, side) for side in range(len(view.titles))]
    if len(set(counts)) == 1:
        same = f"{block.phase}: {counts[0]}" if counts[0] else block.phase
        return [block.title + times, same]
    named = zip(view.titles, counts, strict=True)
    lines = [f"{title}: {count or 'no GEMM'}" for title, count in named]
    return [block.title + times, block.phase, *lines]


def _gemms(view: View, box: Box, side: int) -> str:
    every = fp8 = 0
    for number in box.members:
        node = view.nodes[number]
        if node.fp8[side] is not None:
            every += node.count
            fp8 += node.count * bool(node.fp8[side])
    return f"{fp8} of {every} GEMMs in FP8" if every else ""
