from dataclasses import replace

import pytest
from sample_graphs import decoder_graph, names, with_edges, with_operators, without_fp8

from jetrl_compile.containment import (
    ContainmentReport,
    Difference,
    LevelResult,
    check_containment,
    diff_graphs,
)
from jetrl_compile.formats import Flow
from jetrl_compile.precision_graph import Edge, Operator, PrecisionGraph

TRAIN = decoder_graph("train")
ROLLOUT = decoder_graph("rollout")


@pytest.mark.parametrize("strict", [False, True])
def test_contained(strict: bool) -> None:
    report = check_containment(ROLLOUT, TRAIN, strict=strict)
    assert report.contained is True
    assert report.exit_status == 0
    assert report.verdict() == "contained (levels 1, 2 passed)"
    assert [item.status for item in report.levels] == [
        "passed",
        "passed",
        "not run",
        "not run",
    ]
    assert all("jetrl audit" in item.reason for item in report.levels[2:])
    assert report.differences == report.notes == ()
    assert report.unknown == ()
    assert [item.name for item in report.high_precision] == ["lm_head:fprop"]
    assert report.high_precision[0].sides == ("rollout", "train")
    assert "lm_head" in report.high_precision[0].reason
    assert report.rollout_meta["engine"] == "vllm"
    assert report.counts["FP8 GEMMs in rollout"] == 14
    assert report.counts["operators without precision, not compared"] == 3


def test_a_graph_is_contained_in_itself() -> None:
    for graph in (TRAIN, ROLLOUT):
        assert check_containment(graph, graph).contained is True
        assert diff_graphs(graph, graph) == []
    assert "backward operators" in check_containment(TRAIN, TRAIN).remarks[-1]


# What is not compared, and what cannot be told -----------------------------------


def test_saved_dtype_and_reasons_are_not_compared() -> None:
    rollout = with_edges(ROLLOUT, lambda e: replace(e, flow=e.flow.saved_as("bf16")))
    rollout = with_operators(rollout, lambda op: replace(op, reason="another"))
    assert check_containment(rollout, TRAIN).contained
    found = diff_graphs(rollout, ROLLOUT)
    assert {item.attribute for item in found} == {"saved_dtype"}
    assert len(found) == len(ROLLOUT.edges)


def test_integers_carry_no_precision() -> None:
    rollout = with_edges(
        ROLLOUT,
        lambda e: (
            replace(e, flow=Flow("int32"))
            if e.source in ("input.0", "input.1", "model:slots")
            else e
        ),
    )
    extra = Operator("input.2", "input")  # its dtype is known by its edge
    slots = Operator("model:block_table", "index")
    attention = next(op.name for op in rollout.operators if op.kind == "attention")
    rollout = replace(
        rollout,
        operators=(extra, slots, *rollout.operators),
        edges=(
            *rollout.edges,
            Edge("input.2", "model:block_table", "x", Flow("int32")),
            Edge("model:block_table", attention, "block_table", Flow("int32")),
            Edge("input.2", attention, "lengths", Flow("int32")),
        ),
    )
    report = check_containment(rollout, TRAIN)
    assert report.contained is True
    assert report.counts["operators without precision, not compared"] == 5
    assert report.counts["edges without precision, not compared"] == 6
    floating = with_edges(
        rollout,
        lambda e: replace(e, flow=Flow("bf16")) if e.source == "input.2" else e,
    )
    assert check_containment(floating, TRAIN).differences[0].name == "input.2"


def test_integer_widths_of_other_operators_do_not_matter() -> None:
    def routed(graph: PrecisionGraph, dtype: str) -> PrecisionGraph:
        top = Operator("model.layers.0.mlp:routing", "routing")
        source = "model.layers.0.post_attention_layernorm:norm"
        target = "model.layers.0.mlp.down_proj:fprop"
        edges = (
            Edge(source, top.name, "x", Flow("bf16")),
            Edge(top.name, target, "bias", Flow(dtype)),
        )
        return replace(
            graph, operators=(*graph.operators, top), edges=(*graph.edges, *edges)
        )

    assert check_containment(routed(ROLLOUT, "int32"), routed(TRAIN, "int64")).contained
    report = check_containment(routed(ROLLOUT, "fp32"), routed(TRAIN, "int64"))
    assert names(report.differences) == [
        (2, "model.layers.0.mlp.down_proj:fprop.bias", "dtype")
    ]


def test_kernels_are_notes_unless_strict() -> None:
    attention = [op for op in ROLLOUT.operators if op.kind == "attention"]
    rollout = with_operators(
        ROLLOUT,
        lambda op: (
            replace(op, provider="fa3", batch_invariant=True) if op in attention else op
        ),
    )
    report = check_containment(rollout, TRAIN)
    assert report.contained is True
    assert {(d.level, d.attribute) for d in report.notes} == {
        (2, "provider"),
        (2, "batch_invariant"),
    }
    strict = check_containment(rollout, TRAIN, strict=True)
    assert strict.contained is False
    assert strict.differences == report.notes
    assert strict.notes == ()
    assert strict.strict


def test_strict_warns_of_results_that_depend_on_the_batch() -> None:
    report = check_containment(ROLLOUT, TRAIN, strict=True)
    assert report.contained is True
    assert "the results of 2 operators depend on the batch" in report.remarks[0]


@pytest.mark.parametrize(
    ("mine", "theirs", "equal"),
    [
        ("deep_gemm", "scaled_mm", True),
        ("scaled_mm", "deep_gemm", True),
        ("deep_gemm", "reference", False),
        ("reference", "scaled_mm", False),
        ("", "deep_gemm", False),
        ("", "", True),
    ],
)
def test_gemm_providers_by_numerics_class(mine: str, theirs: str, equal: bool) -> None:
    def change(graph: PrecisionGraph, provider: str) -> PrecisionGraph:
        return with_operators(
            graph,
            lambda op: replace(op, provider=provider) if op.kind == "gemm" else op,
        )

    for strict in (False, True):
        report = check_containment(
            change(ROLLOUT, mine), change(TRAIN, theirs), strict=strict
        )
        assert report.contained is equal
        assert {d.attribute for d in report.differences} == (
            set() if equal else {"provider"}
        )


def test_unknown_operators_are_listed() -> None:
    new = Operator("model.layers.0:aten.magic", "unknown")
    edge = Edge("model.embed_tokens:embedding", new.name, "x", Flow("bf16"))

    def add(graph: PrecisionGraph) -> PrecisionGraph:
        return replace(
            graph, operators=(*graph.operators, new), edges=(*graph.edges, edge)
        )

    both = check_containment(add(ROLLOUT), add(TRAIN))
    assert both.contained is True
    assert [(item.name, item.sides) for item in both.unknown] == [
        (new.name, ("rollout", "train"))
    ]
    report = check_containment(add(ROLLOUT), TRAIN)
    assert names(report.differences) == [(1, new.name, "operator")]
    assert "(of unknown kind) is in rollout but not in train" in str(
        report.differences[0]
    )
    trained = check_containment(ROLLOUT, add(TRAIN))
    assert trained.contained is True
    assert trained.unknown[0].sides == ("train",)


def test_operator_that_training_has_in_backward_only() -> None:
    name = "model.layers.0.mlp.up_proj:dgrad"
    rollout = replace(ROLLOUT, operators=(*ROLLOUT.operators, Operator(name, "gemm")))
    report = check_containment(rollout, TRAIN)
    assert names(report.differences) == [(1, name, "operator")]
    assert "training has it in backward only" in report.differences[0].message


EMPTY = PrecisionGraph((), ())
NO_GEMM = PrecisionGraph((Operator("model.norm:norm", "norm"),), ())


@pytest.mark.parametrize(
    ("rollout", "train", "reason"),
    [
        (EMPTY, TRAIN, "the rollout graph has no forward operators"),
        (ROLLOUT, EMPTY, "the training graph has no forward operators"),
        (NO_GEMM, TRAIN, "the rollout graph has no GEMM among its 1 operators"),
        (
            replace(ROLLOUT, meta={"incomplete": "layer 3 ran eagerly"}),
            TRAIN,
            "the rollout graph is incomplete: layer 3 ran eagerly",
        ),
        (
            ROLLOUT,
            replace(TRAIN, meta={"incomplete": "graph break"}),
            "the training graph is incomplete: graph break",
        ),
    ],
)
def test_could_not_tell(
    rollout: PrecisionGraph, train: PrecisionGraph, reason: str
) -> None:
    report = check_containment(rollout, train)
    assert report.contained is None
    assert report.exit_status == 2
    assert report.undecided == reason
    assert report.verdict() == f"could not tell: {reason}"
    assert {level.status for level in report.levels} == {"not run"}


def test_swapped_graphs_are_told() -> None:
    report = check_containment(TRAIN, ROLLOUT)
    assert report.contained is None
    assert report.exit_status == 2
    assert "look swapped" in report.undecided
    assert "check_containment(rollout, train)" in report.undecided
    assert report.differences == ()
    assert {level.status for level in report.levels} == {"not run"}
    assert report.undecided in report.level(1).reason


def test_differences_count_although_a_graph_is_incomplete() -> None:
    meta = {"incomplete": "graph break"}
    rollout = without_fp8(ROLLOUT, lambda name: "up_proj" in name)
    assert check_containment(replace(rollout, meta=meta), TRAIN).contained is False
    assert check_containment(rollout, replace(TRAIN, meta=meta)).contained is False
    # What an incomplete training graph lacks may be what was not captured.
    rollout = replace(ROLLOUT, operators=(*ROLLOUT.operators, Operator("a", "norm")))
    report = check_containment(rollout, replace(TRAIN, meta=meta))
    assert report.contained is None
    assert names(report.differences) == [(1, "a", "operator")]


def test_remarks() -> None:
    twice = check_containment(TRAIN, TRAIN)
    assert "says phase train: are the two swapped?" in twice.remarks[0]
    other = check_containment(replace(ROLLOUT, meta={"model": "x"}), TRAIN)
    assert other.remarks == ("the graphs name two models: x and sample",)
    moved = replace(
        ROLLOUT,
        operators=tuple(
            replace(op, name=f"actor.{op.name}") for op in ROLLOUT.operators
        ),
        edges=tuple(
            replace(e, source=f"actor.{e.source}", target=f"actor.{e.target}")
            for e in ROLLOUT.edges
        ),
    )
    report = check_containment(moved, TRAIN)
    assert "are these graphs of one model?" in report.remarks[0]
    assert {item.attribute for item in report.differences} == {"operator"}


def test_audit_levels() -> None:
    report = check_containment(ROLLOUT, TRAIN)
    passed = report.with_level(LevelResult(3, "passed", counts={"tensors": 14}))
    assert passed.contained is True
    assert passed.verdict() == "contained (levels 1, 2, 3 passed)"
    bad = Difference(3, "model.layers.0.mlp.up_proj", "codes", None, None, "3 differ")
    failed = passed.with_level(LevelResult(3, "failed"), [bad])
    assert failed.contained is False
    assert failed.differences == (bad,)
    assert failed.with_level(LevelResult(3, "passed")).differences == ()
    assert failed.verdict() == "not contained: 1 difference (level 3 bytes)"
    only = ContainmentReport((LevelResult(3, "passed"),))
    assert only.contained is None
