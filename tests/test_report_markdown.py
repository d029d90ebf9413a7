"""Markdown as GitHub shows it, and annotations: names stay names, sizes in limits."""

import re
from dataclasses import replace

import pytest
from hostile import NAMES
from hypothesis import given, settings
from markdown_it import MarkdownIt
from test_report import REPORTS, any_reports, many_causes

from jetrl_compile.containment import ContainmentReport, Difference, Listed
from jetrl_compile.report import render
from jetrl_compile.report_markdown import MAX_CHARACTERS, code, escape
from jetrl_compile.report_origin import Origin
from jetrl_compile.report_text import shown

MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])
NASTY = (
    *NAMES,
    "</details><h1>owned</h1>",
    "[link](http://x) ![image](http://x) <http://x>",
    "a | b\n\n# title\n| c |",
    "`` ` ``` code",
    "@everyone #1 &lt; $x$",
    "\x1b[31mred\x07 \u202eback",
)
ALLOWED = (
    r"</?(?:p|h3|strong|em|code|table|thead|tbody|tr|th|td|ul|li|details|summary)>"
)


def html(report: ContainmentReport) -> str:
    text: str = MARKDOWN.render(render(report, "md"))
    return text


def with_name(name: str) -> ContainmentReport:
    """A report that has a name in every place that is a string."""
    item = Difference(2, name, name, name, name + "x", f"{name}: {name}", name)
    other = replace(item, attribute="edge", train=None)
    return replace(
        many_causes(1),
        differences=(item, other),
        notes=(item,),
        remarks=(name,),
        high_precision=(Listed(name, ("rollout",), name),),
        unknown=(Listed(name, (name,), name),),
        counts={name: 1},
        rollout_meta={name: name},
        undecided=name,
    )


def check_tags(text: str) -> None:
    assert text.count("<details>") == text.count("</details>")
    for tag in re.findall(r"<[^>]*>", text):
        assert re.fullmatch(ALLOWED, tag), tag


@pytest.mark.parametrize("name", NASTY)
def test_names_stay_names(name: str) -> None:
    report = with_name(name)
    text = html(report)
    check_tags(text)
    table = text[text.index("<tbody>") : text.index("</tbody>")]
    assert table.count("<tr>") == 2
    assert table.count("<td>") == 10
    assert "\x1b" not in render(report, "md") + render(report, "text")
    assert "\u202e" not in render(report, "md") + render(report, "github")


@given(any_reports)
@settings(max_examples=60, deadline=None)
def test_any_report_is_plain_markdown(report: ContainmentReport) -> None:
    check_tags(html(report))
    assert len(render(report, "md")) <= MAX_CHARACTERS


def test_code_and_escape_are_read_back() -> None:
    for name in NASTY:
        wanted = shown(" ".join(name.split()))
        plain = re.sub(r"<[^>]*>", "", MARKDOWN.render(code(name))).strip()
        assert unescaped(plain) == wanted
        plain = re.sub(r"<[^>]*>", "", MARKDOWN.render(escape(name))).strip()
        assert unescaped(plain) == wanted


def unescaped(text: str) -> str:
    for entity, char in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&")):
        text = text.replace(entity, char)
    return text


@pytest.mark.parametrize("length", [10, 200, 2_000])
def test_a_comment_fits_and_says_what_was_cut(length: int) -> None:
    """20 causes at 250 places whose names are long, with characters to escape."""
    base = many_causes(5000)
    found = tuple(
        replace(item, operator=f"m{n}{'&|' * (length // 2)}:x", attribute=f"p{n % 20}")
        for n, item in enumerate(base.differences)
    )
    kept = tuple(Listed(f"m{i}{'_' * length}:fprop", ("train",)) for i in range(400))
    report = replace(base, differences=found, high_precision=kept)
    text = render(report, "md")
    assert len(text) <= 65_536
    check_tags(MARKDOWN.render(text))
    assert "and 8 more" in text
    assert "and 211 more" in text
    assert ("Cut to fit GitHub's 65,536 characters. Left out:" in text) == (length > 10)


def test_a_small_report_is_not_cut() -> None:
    assert "Cut to fit" not in render(REPORTS["mixed"], "md")
    assert len(render(REPORTS["mixed"], "md").split("\n")) < 95


# GitHub annotations ----------------------------------------------------------------


def test_annotations_point_at_a_file_and_line() -> None:
    report = REPORTS["mixed"]
    origin = Origin("a,b:c.json", {"model.layers.0.mlp.gate_proj:fprop": 7})
    first, second, *_ = render(report, "github", origin).split("\n")
    assert first.startswith("::error file=a%2Cb%3Ac.json,line=7,title=jetrl check%3A ")
    assert ",line=1," in second
    assert "file=" not in render(report, "github")


@pytest.mark.parametrize("name", NASTY)
def test_annotations_are_one_line_each(name: str) -> None:
    text = render(with_name(name), "github", Origin(name))
    lines = text.split("\n")[:-1]
    assert len(lines) == 4
    for line in lines:
        assert re.match(r"::(error|notice) (file=[^:,]*,line=1,)?title=[^:,]*::", line)


def test_annotations_are_short() -> None:
    report = many_causes(1)
    long = replace(report.differences[0], operator="a" * 99_999, attribute="b" * 9_999)
    text = render(replace(report, differences=(long,)), "github")
    assert len(text) < 5_000
