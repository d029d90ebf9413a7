from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_graphs import decoder_graph, one_operator, with_edges, without_fp8

from jetrl_compile.formats import Flow
from jetrl_compile.precision_graph import Edge, Operator, PrecisionGraph, make_graph
from jetrl_compile.show.folding import Folded, find_runs, fold, split
from jetrl_compile.show.paired import pair_graphs


def folded(*graphs: PrecisionGraph) -> Folded:
    paired = pair_graphs(graphs, ["a", "b"][: len(graphs)])
    return fold(paired.items, paired.uses, paired.differences)


@pytest.mark.parametrize(
    ("name", "depth", "wanted"),
    [
        ("model.layers.3.mlp:act", 0, ("model.layers", 3, ".mlp:act")),
        ("model.layers.3:add.1", 0, ("model.layers", 3, ":add.1")),
        ("model.layers.3.w", 0, ("model.layers", 3, ".w")),
        ("m.layers.3.experts.7.up:fprop", 1, ("m.layers.3.experts", 7, ".up:fprop")),
        ("m.layers.3.up:fprop", 1, None),
        ("input.0", 0, None),
        ("3.w", 0, None),
        ("model.norm:norm", 0, None),
    ],
)
def test_split(name: str, depth: int, wanted: tuple[str, int, str] | None) -> None:
    assert split(name, depth) == wanted


@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [
        ("aaaa", [(0, 4, 1)]),
        ("abababab", [(0, 8, 2)]),
        ("aab", [(0, 2, 1), (2, 3, 1)]),
        ("aaabaaaa", [(0, 3, 1), (3, 4, 1), (4, 8, 1)]),
        ("lllllgllllllgl"[:12], [(0, 5, 1), (5, 6, 1), (6, 12, 1)]),
        ("lllglllglllg", [(0, 12, 4)]),
        ("", []),
    ],
)
def test_runs(kinds: str, wanted: list[tuple[int, int, int]]) -> None:
    assert find_runs(kinds) == wanted


@given(st.lists(st.sampled_from("abc"), max_size=40))
def test_runs_cover_everything_and_repeat(kinds: Sequence[str]) -> None:
    runs = find_runs(kinds)
    assert [n for low, high, _ in runs for n in range(low, high)] == list(
        range(len(kinds))
    )
    for low, high, period in runs:
        assert (high - low) % period == 0
        again = [kinds[low + (n - low) % period] for n in range(low, high)]
        assert again == list(kinds[low:high])


@pytest.mark.parametrize("layers", [2, 5, 64])
def test_equal_layers_become_one(layers: int) -> None:
    graph = decoder_graph("train", layers)
    result = folded(graph)
    (run,) = result.runs
    assert (run.path, run.repeats, run.period) == ("model.layers", layers, 1)
    assert len(result.items) == len(folded(decoder_graph("train", 2)).items)
    assert sum(result.stands_for.values()) == len(graph.operators)
    assert result.stands_for["model.layers.0.mlp.up_proj:fprop"] == layers


def test_what_is_handed_on_is_told_and_makes_no_loop() -> None:
    result = folded(decoder_graph("rollout", 6))
    (carried,) = result.carried.values()
    assert {(use.target, use.operand) for use in carried} == {
        ("model.layers.0.input_layernorm:norm", "x"),
        ("model.layers.0:residual_add", "residual"),
    }
    keys = [(use.source, use.target, use.operand) for use in result.uses]
    assert len(keys) == len(set(keys))
    # What enters the first layer and leaves the last one is still there.
    assert (
        "model.embed_tokens:embedding",
        "model.layers.0.input_layernorm:norm",
        "x",
    ) in keys
    assert ("model.layers.0:residual_add.1", "model.norm:norm", "x") in keys


def test_a_layer_that_differs_stays_apart() -> None:
    train = decoder_graph("train", 8)
    rollout = without_fp8(
        decoder_graph("rollout", 8), lambda name: "layers.3.mlp.up" in name
    )
    result = folded(rollout, train)
    assert [run.title for run in result.runs] == [
        "model.layers.0-2",
        "model.layers.3",
        "model.layers.4-7",
    ]


@pytest.mark.parametrize("changes", [{"reason": "why"}, {"formula": "1:abc"}])
def test_reasons_and_formulas_count(changes: dict[str, Any]) -> None:
    graph = decoder_graph("rollout", 6)
    operator = graph.by_name["model.layers.2.mlp:activation"]
    edited = one_operator(graph, operator, **changes)
    assert [run.repeats for run in folded(edited).runs] == [2, 1, 3]


def test_alternating_layers_fold_by_their_period() -> None:
    def change(edge: Edge) -> Edge:
        odd = edge.target.startswith(tuple(f"model.layers.{n}." for n in (1, 3, 5, 7)))
        keep = not (odd and edge.flow.is_quantized)
        return edge if keep else replace(edge, flow=Flow("bf16"))

    result = folded(with_edges(decoder_graph("rollout", 8), change))
    (run,) = result.runs
    assert (run.period, run.repeats) == (2, 4)
    assert result.stands_for["model.layers.1.mlp.up_proj:fprop"] == 4
    names = {item.name for item in result.items}
    assert not any(name.startswith("model.layers.2.") for name in names)


def experts(layers: int, each: int) -> PrecisionGraph:
    operators = [Operator("input.0", "input")]
    edges = []
    last = "input.0"
    for layer in range(layers):
        base = f"model.layers.{layer}.mlp"
        made = []
        for expert in range(each):
            part = f"{base}.experts.{expert}"
            for role in ("gate_proj", "up_proj", "act_fn", "down_proj"):
                kind = "activation" if role == "act_fn" else "gemm"
                operators.append(
                    Operator(f"{part}.{role}:fprop", kind, f"{part}.{role}")
                )
            edges += [
                Edge(last, f"{part}.gate_proj:fprop", "x", Flow("bf16")),
                Edge(last, f"{part}.up_proj:fprop", "x", Flow("bf16")),
                Edge(
                    f"{part}.gate_proj:fprop",
                    f"{part}.act_fn:fprop",
                    "gate",
                    Flow("bf16"),
                ),
                Edge(
                    f"{part}.up_proj:fprop", f"{part}.act_fn:fprop", "up", Flow("bf16")
                ),
                Edge(
                    f"{part}.act_fn:fprop", f"{part}.down_proj:fprop", "x", Flow("bf16")
                ),
            ]
            made.append(f"{part}.down_proj:fprop")
        last = f"{base}:combine"
        operators.append(Operator(last, "elementwise", base))
        edges += [
            Edge(source, last, f"in.{n}", Flow("bf16")) for n, source in enumerate(made)
        ]
    return make_graph(operators, edges)


def test_experts_fold_within_layers() -> None:
    result = folded(experts(12, 16))
    assert [(run.path, run.repeats) for run in result.runs] == [
        ("model.layers", 12),
        ("model.layers.0.mlp.experts", 16),
    ]
    assert len(result.items) == 1 + 4 + 1
    assert result.stands_for["model.layers.0.mlp.experts.0.up_proj:fprop"] == 12 * 16


def test_small_unequal_parts_are_no_blocks() -> None:
    operators = [
        Operator("mlp.0:fprop", "gemm", "mlp.0", (("K", 8), ("N", 4))),
        Operator("mlp.2:fprop", "gemm", "mlp.2", (("K", 4), ("N", 8))),
    ]
    graph = make_graph(
        operators, [Edge("mlp.0:fprop", "mlp.2:fprop", "x", Flow("bf16"))]
    )
    result = folded(graph)
    assert not result.runs
    assert len(result.items) == 2
