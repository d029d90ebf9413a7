import json
from dataclasses import replace

import pytest
from sample_graphs import (
    decoder_graph,
    one_edge,
    with_edges,
    with_operators,
    without_fp8,
)

from jetrl_compile.errors import PrecisionFlowError
from jetrl_compile.formats import Flow, blocks, groups
from jetrl_compile.precision_graph import Edge, Operator, PrecisionGraph, make_graph
from jetrl_compile.show.paired import narrow, pair_graphs
from jetrl_compile.show.sizes import flow_bytes
from jetrl_compile.show.styles import DIFFERENCE, STYLES, style_of
from jetrl_compile.show.view import LARGEST, View, make_view
from jetrl_compile.show.visible import Switches, has_findings, visible
from jetrl_compile.show.words import arrow_text, box_lines


def view_of(*graphs: PrecisionGraph, tokens: int = 4096) -> View:
    return make_view(pair_graphs(graphs, ["a", "b"][: len(graphs)]), tokens=tokens)


def shown(view: View, **switches: bool) -> dict[str, list[str]]:
    chosen = Switches(("forward",), **switches)
    boxes, _ = visible(view, chosen)
    return {box.id: box_lines(view, box) for box in boxes.values()}


def test_a_folded_graph_is_a_dozen_boxes() -> None:
    view = view_of(decoder_graph("train", 36))
    lines = shown(view)
    assert ["model.layers.0-35   \u00d736", "forward: 252 of 252 GEMMs in FP8"] in (
        lines.values()
    )
    assert len(lines) < 12
    assert ["lm_head", "fprop: x bf16, w bf16"] in lines.values()


def test_an_open_block_shows_one_layer() -> None:
    view = view_of(decoder_graph("train", 36))
    lines = shown(view, opened=True)
    assert [
        "mlp.up_proj",
        "fprop: x e4m3 1x128, w e4m3 128x128",
    ] in lines.values()
    assert ["residual_add", "residual_add in bf16"] in lines.values()
    assert not any("weight" in text[0] for text in lines.values())
    with_weights = shown(view, opened=True, weights=True)
    assert ["mlp.up_proj.weight", "parameter"] in with_weights.values()


def test_phases_are_told_apart() -> None:
    view = view_of(decoder_graph("train", 4))
    assert view.phases() == ("forward", "dgrad", "wgrad")
    assert view_of(decoder_graph("rollout", 4)).phases() == ("forward",)
    every, _ = visible(view, Switches(opened=True))
    assert sum(":wgrad" in view.nodes[box.number].name for box in every.values()) == 7
    without, _ = visible(view, Switches(("forward", "dgrad"), opened=True))
    names = [
        view.nodes[box.number].name for box in without.values() if not box.is_block
    ]
    assert any(":dgrad" in name for name in names)
    assert not any(":wgrad" in name for name in names)


def test_edges_from_forward_to_backward_are_shown_on_request() -> None:
    view = view_of(decoder_graph("train", 4))
    _, few = visible(view, Switches())
    _, more = visible(view, Switches(saved=True))
    phases = [
        {view.nodes[view.edges[n].source].phase for n in arrow.members} for arrow in few
    ]
    assert len(more) > len(few)
    assert all(len(found) == 1 for found in phases)


@pytest.mark.parametrize(
    ("flow", "key"),
    [
        (groups("K"), "fp8-group"),
        (blocks("N"), "fp8-block"),
        (Flow("e5m2"), "fp8-other"),
        (Flow("bf16"), "half"),
        (Flow("fp32"), "wide"),
        (Flow("int64"), "whole"),
        (Flow("bool"), "whole"),
    ],
)
def test_styles(flow: Flow, key: str) -> None:
    assert STYLES[style_of(flow)].key == key


def test_styles_can_be_told_apart_without_colour() -> None:
    looks = [(style.line, style.arrow) for style in STYLES]
    # FP32 and integers share dots and an arrow: their labels tell.
    assert len(set(looks)) == len(STYLES) - 1
    assert len({style.color for style in STYLES}) == len(STYLES)


def contrast_with_white(colour: str) -> float:
    """WCAG's contrast ratio."""

    def linear(value: int) -> float:
        part = value / 255
        return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4

    red, green, blue = map(linear, bytes.fromhex(colour.removeprefix("#")))
    return 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05)


def test_words_in_colours_can_be_read() -> None:
    for colour in (DIFFERENCE, *(style.color for style in STYLES)):
        assert contrast_with_white(colour) >= 4.5, colour
    assert DIFFERENCE not in {style.color for style in STYLES}


def test_bytes_follow_from_the_gemms() -> None:
    view = view_of(decoder_graph("train", 3), tokens=1000)
    names = [node.name for node in view.nodes]
    sizes = {(names[edge.target], edge.operand): edge.size for edge in view.edges}
    layer = "model.layers.0"
    # x: 1000 x 2048 codes and a scale for each 128 of them.
    assert sizes[(f"{layer}.self_attn.q_proj:fprop", "x")] == 1000 * (2048 + 16 * 4)
    assert sizes[(f"{layer}.self_attn.q_proj:fprop", "w")] == 4096 * 2048 + 32 * 16 * 4
    # BF16 values of 6144 features, from the GEMM before.
    assert sizes[(f"{layer}.mlp:activation", "gate")] == 1000 * 6144 * 2
    assert sizes[(f"{layer}:residual_add", "residual")] == 1000 * 2048 * 2
    assert sizes[("output.0", "x")] == 1000 * 151936 * 2
    assert sizes[("model.rotary_emb:rope_table", "positions")] is None


def test_scale_bytes() -> None:
    assert flow_bytes(groups("K"), (3, 129)) == 3 * 129 + 3 * 2 * 4
    assert flow_bytes(groups("K", "ue8m0"), (3, 129)) == 3 * 129 + 3 * 2
    assert flow_bytes(Flow("bf16"), (3, 129)) == 3 * 129 * 2


def test_equal_graphs_have_no_findings() -> None:
    graph = decoder_graph("train", 3)
    view = view_of(graph, graph)
    assert (view.verdict, view.findings) == ("no differences", ())


def test_a_pair_of_train_and_rollout_is_checked_in_any_order() -> None:
    train, rollout = decoder_graph("train", 3), decoder_graph("rollout", 3)
    for graphs in ((train, rollout), (rollout, train)):
        paired = pair_graphs(graphs, [graph.meta["engine"] for graph in graphs])
        assert paired.titles == ("vllm", "verl")
        assert paired.verdict.startswith("contained")


def test_findings_call_graphs_by_their_files() -> None:
    def titles(phase: str) -> set[str]:
        graphs = [decoder_graph(phase), decoder_graph("train")]
        edge = next(e for e in graphs[0].edges if e.flow.dtype == "e4m3")
        flow = replace(edge.flow, scale_format="ue8m0")
        graphs[0] = one_edge(graphs[0], edge, flow=flow)
        view = make_view(pair_graphs(graphs, ["a.json", "b.json"]))
        return {found.title for found in view.findings}

    assert titles("train") == {"scale format is ue8m0 in a.json, fp32 in b.json"}
    assert titles("rollout") == {"scale format is ue8m0 in rollout, fp32 in train"}


def test_findings_point_at_what_differs() -> None:
    train, rollout = decoder_graph("train", 6), decoder_graph("rollout", 6)
    edge = rollout.by_key[("model.layers.2.mlp.up_proj:fprop", "x")]
    changed = replace(edge.flow, scale_format="ue8m0")
    view = view_of(one_edge(rollout, edge, flow=changed), train)
    (found,) = view.findings
    assert (found.level, found.count, found.nodes) == (2, 1, ())
    (number,) = found.edges
    at = view.edges[number]
    assert view.nodes[at.target].name == "model.layers.2.mlp.up_proj:fprop"
    flows = [view.flows[flow].text for flow in at.flows if flow is not None]
    assert flows == ["e4m3 1x128 ue8m0", "e4m3 1x128"]
    switches = Switches(("forward",))
    boxes, _ = visible(view, switches)
    marked = [
        box_lines(view, box)[0]
        for box in boxes.values()
        if has_findings(view, box, switches)
    ]
    assert marked == ["model.layers.2"]


def test_a_difference_at_a_hidden_weight_marks_its_reader() -> None:
    train, rollout = decoder_graph("train", 4), decoder_graph("rollout", 4)

    def change(edge: Edge) -> Edge:
        if edge.operand == "w" and edge.flow.is_quantized and "o_proj" in edge.target:
            return replace(edge, flow=replace(edge.flow, source_dtype="fp32"))
        return edge

    view = view_of(with_edges(rollout, change), train)
    assert [found.count for found in view.findings] == [4]
    for weights, wanted in ((False, ["self_attn.o_proj"]), (True, [])):
        switches = Switches(("forward",), opened=True, weights=weights)
        boxes, _ = visible(view, switches)
        marked = [
            box_lines(view, box)[0]
            for box in boxes.values()
            if has_findings(view, box, switches)
        ]
        assert marked == wanted


def test_skipped_layers_are_counted_for_each_side() -> None:
    train = decoder_graph("train", 4)
    rollout = without_fp8(decoder_graph("rollout", 4), lambda name: "mlp." in name)
    view = view_of(rollout, train)
    lines = shown(view)
    assert [
        "model.layers.0-3   \u00d74",
        "forward",
        "a: 16 of 28 GEMMs in FP8",
        "b: 28 of 28 GEMMs in FP8",
    ] in lines.values()
    (box,) = [
        box
        for box in visible(view, Switches(("forward",), opened=True))[0].values()
        if not box.is_block and view.nodes[box.number].label == "mlp.up_proj"
    ]
    assert box_lines(view, box)[1:] == [
        "a: fprop: x bf16, w bf16",
        "b: fprop: x e4m3 1x128, w e4m3 128x128",
    ]


def test_what_one_graph_lacks_says_so() -> None:
    graph = decoder_graph("rollout", 3)
    kept = [op for op in graph.operators if op.name != "output.0"]
    edges = [edge for edge in graph.edges if edge.target != "output.0"]
    smaller = make_graph(kept, edges)
    view = view_of(graph, smaller)
    assert ["output.0", "output", "only in a"] in shown(view).values()


def test_arrows_at_closed_blocks_are_summed_up() -> None:
    view = view_of(decoder_graph("rollout", 4))
    _, arrows = visible(view, Switches(("forward",)))
    texts = [arrow_text(view, arrow) for arrow in arrows]
    assert "bf16 \u00d72" in texts  # into the first norm, and around it
    assert "fp32 \u00d72" in texts  # the table of the rotary embedding
    assert "index: int64" not in texts


def test_narrowing_keeps_what_feeds_the_module() -> None:
    paired = pair_graphs([decoder_graph("rollout", 4)], ["a"])
    part = narrow(paired, "model.layers.2.mlp")
    names = {item.name for item in part.items}
    assert "model.layers.2.mlp.up_proj:fprop" in names
    assert "model.layers.2.post_attention_layernorm:norm" in names
    assert "model.layers.2.self_attn.q_proj:fprop" not in names
    for same in ("model.layers.[2].mlp", "**.2.mlp"):
        assert narrow(paired, same).items == part.items
    glob = narrow(paired, "*.up_proj:fprop")
    assert sum(":fprop" in item.name for item in glob.items) == 4
    with pytest.raises(PrecisionFlowError, match=r"no operator.*'nothing'.*such as"):
        narrow(paired, "nothing")


def test_narrowing_keeps_its_own_differences() -> None:
    train = decoder_graph("train", 6)
    rollout = without_fp8(decoder_graph("rollout", 6), lambda name: "up_proj" in name)
    part = narrow(pair_graphs([rollout, train], ["a", "b"]), "model.layers.4")
    assert part.verdict.endswith("; 1 in model.layers.4")
    (found,) = make_view(part).findings
    (number,) = found.nodes
    assert make_view(part).nodes[number].name == "model.layers.4.mlp.up_proj:fprop"


def test_a_hundred_thousand_operators_fold() -> None:
    graph = decoder_graph("train", 1900)
    assert len(graph.operators) > 70_000
    view = view_of(graph)
    assert len(view.nodes) < 100
    assert len(json.dumps(view.table())) < 200_000


def test_too_many_different_operators_say_how_to_narrow() -> None:
    operators = [
        Operator(f"model.part{n}:op", "elementwise", f"model.part{n}.x.y")
        for n in range(LARGEST + 1)
    ]
    with pytest.raises(PrecisionFlowError, match=r"20,001 operators.*--module model"):
        view_of(make_graph(operators, []))


def test_the_table_is_json() -> None:
    graph = with_operators(
        decoder_graph("train", 3),
        lambda op: replace(op, params=(*op.params, ("limit", float("inf")))),
    )
    text = json.dumps(view_of(graph).table(), allow_nan=False)
    assert '["param limit", "inf"]' in text
