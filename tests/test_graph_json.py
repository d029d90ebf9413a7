import contextlib
import errno
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sample_graphs import decoder_graph

from jetrl_compile import files
from jetrl_compile.errors import GraphFormatError, OutputError
from jetrl_compile.formats import Flow, groups
from jetrl_compile.granularity import Granularity
from jetrl_compile.graph_json import (
    graph_from_json,
    graph_to_json,
    read_graph,
    write_graph,
)
from jetrl_compile.precision_graph import (
    KINDS,
    Edge,
    Operator,
    PrecisionGraph,
    make_graph,
)

SAMPLE = graph_to_json(decoder_graph("train", layers=1))
ONE_GEMM = graph_to_json(
    make_graph(
        [
            Operator("x", "input"),
            Operator("w", "parameter"),
            Operator("a:fprop", "gemm", "a", (("K", 64), ("eps", 1e-6)), "fp32"),
        ],
        [
            Edge("x", "a:fprop", "x", groups("K")),
            Edge("w", "a:fprop", "w", Flow("bf16")),
        ],
        phase="train",
    )
)

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = st.one_of(words, st.integers(), st.floats(allow_nan=False), st.booleans())
granularities = st.builds(Granularity, st.integers(0, 256), st.integers(0, 256))
plain_flows = st.builds(
    Flow, words, saved_dtype=st.none() | words, source_dtype=st.none() | words
)
quantized_flows = st.builds(
    Flow,
    words,
    granularities,
    words,
    words,
    st.floats(0, allow_nan=False, allow_infinity=False),
    words,
    words,
    words,
    st.none() | words,
)


@st.composite
def graphs(draw: st.DrawFn) -> PrecisionGraph:
    operators = [
        Operator(
            name,
            draw(st.sampled_from(KINDS)),
            draw(words),
            tuple(sorted(draw(st.dictionaries(words, scalars, max_size=3)).items())),
            draw(words),
            draw(words),
            draw(st.none() | st.booleans()),
            draw(st.sampled_from(["forward", "backward"])),
            draw(words),
        )
        for name in draw(st.lists(names, unique=True, max_size=6))
    ]
    edges = [
        Edge(
            draw(st.sampled_from(operators)).name,
            operator.name,
            operand,
            draw(plain_flows | quantized_flows),
        )
        for operator in operators
        for operand in draw(st.lists(words, unique=True, max_size=3))
    ]
    meta = draw(st.dictionaries(words, words, max_size=2))
    return PrecisionGraph(tuple(operators), tuple(edges), meta)


def same(a: PrecisionGraph, b: PrecisionGraph) -> bool:
    reasons = [op.reason for op in a.operators] == [op.reason for op in b.operators]
    types = [
        [type(value) for graph in (a, b) for _, value in graph.operators[i].params]
        for i in range(len(a.operators))
    ]
    twice = all(half[: len(half) // 2] == half[len(half) // 2 :] for half in types)
    return a == b and dict(a.meta) == dict(b.meta) and reasons and twice


@given(graphs())
@settings(max_examples=150, deadline=None)
def test_round_trip(graph: PrecisionGraph) -> None:
    text = graph_to_json(graph)
    read = graph_from_json(text)
    assert same(read, graph)
    assert graph_to_json(read) == text
    assert same(graph_from_json(text.encode()), graph)


def test_round_trip_of_a_decoder() -> None:
    for phase in ("train", "rollout"):
        graph = decoder_graph(phase)
        assert same(graph_from_json(graph_to_json(graph)), graph)


def test_text_is_short_and_diffable() -> None:
    graph = decoder_graph("train")
    edited = replace(
        graph, operators=(replace(graph.operators[0], reason="r"), *graph.operators[1:])
    )
    lines, others = graph_to_json(graph).split("\n"), graph_to_json(edited).split("\n")
    assert sum(a != b for a, b in zip(lines, others, strict=True)) == 1
    assert len(lines) < 40 + len(graph.operators) + len(graph.edges)
    assert max(map(len, lines)) < 300


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_corrupted_bytes_raise_one_error(data: st.DataObject) -> None:
    raw = bytearray(SAMPLE.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(raw)))
        end = start + data.draw(st.integers(0, 30))
        piece = st.sampled_from(
            [
                b'"',
                b"{",
                b"]",
                b",",
                b"null",
                b"1e999",
                b"NaN",
                b"\\ud800",
                b'"w"',
                b"[" * 9,
            ]
        )
        raw[start:end] = data.draw(st.binary(max_size=4) | piece)
    with contextlib.suppress(GraphFormatError):
        graph_from_json(bytes(raw), name="g.json")


@given(st.integers(0, len(SAMPLE) - 2))
@example(0)
@settings(max_examples=100, deadline=None)
def test_cut_off(length: int) -> None:
    with pytest.raises(GraphFormatError, match="write the graph again"):
        graph_from_json(SAMPLE[:length], name="g.json")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"version": 1', '"version": 2', "has version 2 .* upgrade it"),
        ('"version": 1', '"version": "1"', "'1' as 'version' .* needed is an integer"),
        ('"version": 1', '"version": true', "True as 'version'"),
        ('"version": 1', '"version": 0', "versions begin at 1"),
        ('"version": 1,', "", "no field 'version' in the file"),
        ("jetrl.precision_graph", "jetrl.report", "needed is a precision graph"),
        ('"format"', '"fromat"', "no field 'format'; needed is a precision graph"),
        (
            '"kind": "gemm"',
            '"kind": "gem"',
            "kind 'gem' in operator 'a:fprop'; use one",
        ),
        ('"kind": "gemm", ', "", "no field 'kind' in operator 'a:fprop'"),
        (
            '"kind": "gemm"',
            '"kind": 3',
            "3 as 'kind' in operator .* needed is a string",
        ),
        ('"name": "w"', '"name": "x"', "'x' occurs twice"),
        ('"name": "w"', '"name": ""', "empty name in operator 1"),
        ('"name": "w"', '"nmae": "w"', "no field 'name' in operator 1"),
        ('"params"', '"parms"', "unknown field 'parms' .* use 'params'"),
        ('"K": 64', '"K": [64]', "as a parameter of operator 'a:fprop'"),
        ('"K": 64', '"K": NaN', "NaN is not a number"),
        ('"K": 64', '"K": 1e999', "inf as a parameter"),
        ('"K": 64', '"K": 6, "K": 4', "the field 'K' occurs twice"),
        ('"x", "x"', '"x", "y"', "an end that is no operator"),
        ('["x", "x", ', '["w", "x", ', "same target and operand"),
        ('["x", "x", ', '["x", ', "needed are 3 strings"),
        ('"w", "bf16"]', '"w", "fp8"]', "no flow 'fp8'"),
        ('"1x128"', '"0x128"', "is not ROWSxCOLS"),
        ("1e-10", "NaN", "NaN is not a number"),
        ("1e-10", "-1", "needed is a finite number"),
        ("1e-10", "1e999", "needed is a finite number"),
        ("1e-10", '"1"', "'1' as 'amax_floor'"),
        ('"scale_format": "fp32", ', "", "no field 'scale_format' in flow"),
        ('"phase": "train"', '"phase": 1', "as 'meta.phase' in the file"),
        ('"flows": {', '"flows": [], "x": {', "unknown field 'x'"),
        ('"operators": [', '"operators": [3,', "no object as operator 0"),
        ("{", "[", "is not JSON"),
        ('"a:fprop"', '"\\ud800"', "lone surrogate"),
        ('"compute_dtype": "fp32"', '"phase": "sideways"', "phase 'sideways'"),
        ('"compute_dtype": "fp32"', '"batch_invariant": 1', "'batch_invariant'"),
        ('"K": 64', f'"K": {"9" * 5000}', "cannot be read"),
        ('"K": 64', f'"K": {"[" * 99999}', "nested too deeply|ends in the middle"),
    ],
)
def test_bad_input(old: str, new: str, message: str) -> None:
    assert old in ONE_GEMM
    with pytest.raises(GraphFormatError, match=message) as caught:
        graph_from_json(ONE_GEMM.replace(old, new, 1), name="g.json")
    text = str(caught.value)
    assert text.startswith("g.json")
    assert text.count("\n") == 0
    assert len(text) < 420


def test_not_an_object() -> None:
    with pytest.raises(GraphFormatError, match="holds a list; needed is an object"):
        graph_from_json("[]")
    with pytest.raises(GraphFormatError, match="not UTF-8 text: byte 0"):
        graph_from_json(b"\xff\xfe{}")


def test_what_cannot_be_written() -> None:
    nan = make_graph([Operator("a", "cast", params=(("v", float("nan")),))], [])
    with pytest.raises(GraphFormatError, match="a has a parameter that is NaN"):
        graph_to_json(nan)
    for flow, message in (
        (replace(groups("K"), amax_floor=float("nan")), "amax floor nan"),
        (replace(groups("K"), scale_format=None), "has no scale_format"),
    ):
        graph = make_graph([Operator("a", "cast")], [Edge("a", "a", "x", flow)])
        with pytest.raises(GraphFormatError, match=message):
            graph_to_json(graph)


def test_files(tmp_path: Path) -> None:
    graph, path = decoder_graph("rollout"), tmp_path / "g.json"
    write_graph(graph, path)
    assert read_graph(path) == graph
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    path.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(path)
    write_graph(decoder_graph("train"), link)
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert read_graph(path) == decoder_graph("train")
    assert sorted(tmp_path.iterdir()) == [path, link]


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(GraphFormatError, match=r"cannot read .*No such file"):
        read_graph(tmp_path / "none.json")
    with pytest.raises(GraphFormatError, match=r"cannot read .*Is a directory"):
        read_graph(tmp_path)
    with pytest.raises(GraphFormatError, match=r"cannot read .*null"):
        read_graph("\0")
    for path in (tmp_path / "none" / "g.json", tmp_path):
        with pytest.raises(OutputError, match=r"cannot write .*; name a file"):
            write_graph(decoder_graph("train"), path)
    with pytest.raises(OutputError, match="UTF-8 cannot hold"):
        files.write_text(tmp_path / "g", "\ud800")
    assert not list(tmp_path.iterdir())


def test_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "g.json"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        write_graph(decoder_graph("train"), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_pipe_is_written_directly(tmp_path: Path) -> None:
    files.write_text("/dev/null", "text")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
