import contextlib
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_graphs import decoder_graph, with_edges, with_operators, without_fp8

from jetrl_compile.containment import (
    ContainmentReport,
    Difference,
    LevelResult,
    Listed,
    check_containment,
)
from jetrl_compile.containment_report import STATUSES
from jetrl_compile.errors import GraphFormatError, OutputError
from jetrl_compile.precision_graph import Edge, Operator
from jetrl_compile.report import FORMATS, render
from jetrl_compile.report_json import report_from_json
from jetrl_compile.report_markdown import code, escape

Golden = Callable[[str, str], None]


def mixed_report() -> ContainmentReport:
    """Six layers: a skip list, another scale format, FP32 residuals, an unknown op."""
    rollout = without_fp8(decoder_graph("rollout", 6), lambda name: "gate_proj" in name)
    rollout = with_operators(
        rollout,
        lambda op: (
            replace(op, reason="recipe r excludes 'model.layers.*.mlp.gate*'")
            if op.name.endswith("gate_proj:fprop")
            else replace(op, provider="fa3")
            if op.kind == "attention"
            else op
        ),
    )

    def change(edge: Edge) -> Edge:
        if edge.flow.is_quantized and edge.operand == "x":
            return replace(edge, flow=replace(edge.flow, scale_format="ue8m0"))
        if edge.operand == "residual" and ".3:" in edge.target:
            return replace(edge, flow=replace(edge.flow, dtype="fp32"))
        return edge

    rollout = with_edges(rollout, change)
    magic = Operator("model.layers.0:aten.magic", "unknown", "model.layers.0")
    rollout = replace(rollout, operators=(*rollout.operators, magic))
    return check_containment(rollout, decoder_graph("train", 6))


def reports() -> dict[str, ContainmentReport]:
    train, rollout = decoder_graph("train"), decoder_graph("rollout")
    meta = {**rollout.meta, "incomplete": "layer 3 ran eagerly"}
    audited = check_containment(rollout, train).with_level(
        LevelResult(3, "failed", counts={"tensors": 14}),
        [
            Difference(
                3,
                "model.layers.1.mlp.up_proj.weight",
                "codes",
                None,
                None,
                "model.layers.1.mlp.up_proj.weight: 7 of 12582912 codes differ, the "
                "first at row 3, column 5; sync the weights again",
            )
        ],
    )
    return {
        "contained": check_containment(rollout, train, strict=True),
        "mixed": mixed_report(),
        "undecided": check_containment(replace(rollout, meta=meta), train),
        "audited": audited,
    }


REPORTS = reports()
VERSION = metadata.version("jetrl-compile")


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("name", REPORTS)
def test_golden(name: str, format_name: str, golden: Golden) -> None:
    text = render(REPORTS[name], format_name)
    golden(f"report/{name}.{format_name}", text.replace(f'"{VERSION}"', '"VERSION"'))


@pytest.mark.parametrize("format_name", FORMATS)
def test_same_data_same_text(format_name: str) -> None:
    assert render(mixed_report(), format_name) == render(mixed_report(), format_name)


def test_unknown_format() -> None:
    with pytest.raises(OutputError, match="'jsn' is unknown; did you mean 'json'"):
        render(REPORTS["mixed"], "jsn")


# Any characters at all ----------------------------------------------------------

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
nasty = st.sampled_from(
    [
        "a|b",
        "a`b``",
        "<x>&",
        "%0A::error::",
        "a\r\nb",
        "a:b,c",
        "\x00\x1b[1m\ufffe",
        "]]>",
    ]
)
texts = any_text | nasty
counts = st.dictionaries(texts, st.integers(0, 9), max_size=2)
differences = st.builds(
    Difference,
    st.integers(1, 4),
    texts,
    texts | st.sampled_from(["source", "edge", "operator", "fp8", "scale_format"]),
    st.none() | texts,
    st.none() | texts,
    texts,
    texts,
)
listed = st.builds(Listed, texts, st.lists(texts, max_size=2).map(tuple), texts)
any_reports = st.builds(
    ContainmentReport,
    st.lists(
        st.builds(
            LevelResult, st.integers(1, 4), st.sampled_from(STATUSES), texts, counts
        ),
        max_size=4,
    ).map(tuple),
    st.lists(differences, max_size=4).map(tuple),
    st.lists(differences, max_size=2).map(tuple),
    st.lists(texts, max_size=2).map(tuple),
    counts,
    st.lists(listed, max_size=2).map(tuple),
    st.lists(listed, max_size=2).map(tuple),
    st.dictionaries(texts, texts, max_size=2),
    st.dictionaries(texts, texts, max_size=2),
    st.booleans(),
    texts,
)


@given(any_reports)
@settings(max_examples=100, deadline=None)
def test_every_format_takes_any_report(report: ContainmentReport) -> None:
    for format_name in FORMATS:
        text = render(report, format_name)
        assert text.endswith("\n")
        text.encode()
    assert report_from_json(render(report, "json")) == report
    root = ET.fromstring(render(report, "junit"))
    assert len(root.findall("testsuite/testcase")) == len(report.levels)
    for line in render(report, "github").split("\n")[:-1]:
        assert re.fullmatch(r"::(error|notice) title=[^:,\r\n]*::[^\r\n]*", line)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_corrupted_json_raises_one_error(data: st.DataObject) -> None:
    raw = bytearray(render(REPORTS["audited"], "json").encode())
    start = data.draw(st.integers(0, len(raw)))
    piece = st.sampled_from([b'"', b"{", b"]", b"null", b"1", b"[]", b"{}", b"x"])
    raw[start : start + data.draw(st.integers(0, 9))] = data.draw(piece)
    with contextlib.suppress(GraphFormatError):
        report_from_json(bytes(raw))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"version": 1', '"version": 2', "upgrade it"),
        ("containment_report", "precision_graph", "needed is a containment report"),
        ('"status": "failed"', '"status": "maybe"', "status 'maybe' in level 3"),
        ('"level": 3', '"level": 7', "levels are 1 to 4"),
        ('"strict"', '"strcit"', "unknown field 'strcit' .* use 'strict'"),
        ('"remarks": []', '"remarks": [1]', "entry of 'remarks' that is no string"),
        ('"notes": []', '"notes": [1]', "entry of 'notes' that is no object"),
        ('"tensors": 14', '"tensors": true', "a count in level 3 that is no integer"),
        ('"train": null', '"train": 3', "3 as 'train' in differences"),
        (', "train": null', "", "no field 'train' in differences"),
    ],
)
def test_bad_json(old: str, new: str, message: str) -> None:
    text = render(REPORTS["audited"], "json")
    assert old in text
    with pytest.raises(GraphFormatError, match=message):
        report_from_json(text.replace(old, new, 1), name="r.json")


# What each format promises --------------------------------------------------------


def test_junit_counts() -> None:
    expected = {  # failures, errors, skipped
        "contained": (0, 0, 2),
        "mixed": (2, 0, 2),
        "undecided": (0, 2, 2),
        "audited": (1, 0, 1),
    }
    for name, numbers in expected.items():
        suite = ET.fromstring(render(REPORTS[name], "junit"))[0]
        found = [suite.get(key) for key in ("failures", "errors", "skipped")]
        assert found == [str(number) for number in numbers], name
        assert suite.get("tests") == "4"


def test_junit_drops_illegal_characters() -> None:
    report = replace(REPORTS["undecided"], undecided="a\x00b\x1b\ufffec\td")
    root = ET.fromstring(render(report, "junit"))
    assert root.findtext("testsuite/system-out") == "could not tell: abc\td"


def many_causes(number: int) -> ContainmentReport:
    found = tuple(
        Difference(2, f"a:x{i}", f"params.p{i}", "1", "2", "m") for i in range(number)
    )
    return replace(
        REPORTS["contained"],
        levels=(LevelResult(1, "passed"), LevelResult(2, "failed")),
        differences=found,
    )


@pytest.mark.parametrize(("causes", "lines"), [(9, 10), (10, 10), (500, 10)])
def test_github_shows_at_most_ten(causes: int, lines: int) -> None:
    text = render(many_causes(causes), "github")
    assert text.count("::error ") == min(causes, 9)
    assert text.count("\n") == lines
    assert ("more are in the full report" in text) == (causes > 9)


def test_markdown_fits_a_comment() -> None:
    kept = tuple(Listed(f"m.l{i}.{'x' * 60}:fprop", ("train",)) for i in range(5000))
    text = render(replace(many_causes(5000), high_precision=kept), "md")
    assert len(text) < 65536
    assert "and 4988 more" in text
    assert text.count("<details>") == text.count("</details>")


def test_text_is_shortened() -> None:
    rollout = without_fp8(decoder_graph("rollout", 2), lambda name: True)
    report = check_containment(rollout, decoder_graph("train", 2))
    assert "(14 places)" in render(report)
    found = tuple(replace(report.differences[0], operator=f"a{i}:x") for i in range(99))
    text = render(replace(report, differences=found))
    assert "  and 80 more\n" in text


def test_markdown_escapes() -> None:
    assert escape("a|b <c> _d_ @e #1\nf") == r"a\|b &lt;c&gt; \_d\_ \@e \#1 f"
    assert escape("x^2$ !y") == r"x^2\$ \!y"
    assert code("a|b") == "`a|b`"
    assert code("a`b") == "`` a`b ``"
