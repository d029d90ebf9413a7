"""Captured graphs as JSON: both ways, and every defect is one kind of error."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_levels import levels_of
from tiny_models import make_model, tokens

from jetrl_compile.capture_json import (
    captured_from_json,
    captured_to_json,
    read_captured,
    write_captured,
)
from jetrl_compile.captured_graph import CapturedGraph, CapturedNode, Ref
from jetrl_compile.errors import GraphFormatError
from jetrl_compile.graph_builder import build_precision_graph


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_round_trip(name: str, tmp_path: Path) -> None:
    levels = levels_of(make_model(name), tokens(2, 8))
    for captured in (*levels.dynamo, *levels.inference, *levels.joint):
        write_captured(captured, tmp_path / "graph.json", {"engine": "torch"})

        read = read_captured(tmp_path / "graph.json")

        assert read.graph == captured
        assert read.meta == {"engine": "torch"}
        assert (
            captured_to_json(read.graph, read.meta)
            == (tmp_path / "graph.json").read_text()
        )
        first, second = map(build_precision_graph, (captured, read.graph))
        assert first == second


def _graph() -> CapturedGraph:
    x = CapturedNode("x", "placeholder", "input", dtype="bf16", shape=(None, 4))
    y = CapturedNode(
        "y",
        "call",
        "clamp",
        (Ref(0), -math.inf, {"slice": (None, 2, None)}, (1, (Ref(0),))),
        {"max": math.inf, "nothing": None},
        dtype="bf16",
        shape=(None, 4),
        outputs=("bf16", ""),
        module="a.b",
        module_class="B",
        backward=True,
        mutates=(0, "max"),
        attributes={"scale": 0.5},
    )
    return CapturedGraph((x, y))


def test_every_field_is_kept() -> None:
    assert captured_from_json(captured_to_json(_graph())).graph == _graph()


def _edited(change: Any) -> str:
    document = json.loads(captured_to_json(_graph()))
    change(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda d: d.update(version=2), "version 2"),
        (lambda d: d.update(format="jetrl.precision_graph"), "precision_graph"),
        (lambda d: d.pop("nodes"), "no field 'nodes'"),
        (lambda d: d.update(nodes={}), "'nodes'"),
        (lambda d: d["nodes"].append(3), "node 2"),
        (lambda d: d["nodes"][1].update(name=""), "no 'name' in node 1"),
        (lambda d: d["nodes"][1].update(op="cal"), "the op 'cal'"),
        (lambda d: d["nodes"][0].update(target="params"), "the placeholder 'params'"),
        (lambda d: d["nodes"][1].update(modul="a"), "'module'"),
        (lambda d: d["nodes"][1]["args"].append({"node": 1}), "1 as a node"),
        (lambda d: d["nodes"][1]["args"].append({"node": True}), "True as a node"),
        (lambda d: d["nodes"][1]["args"].append({"float": "big"}), "'big' as a float"),
        (lambda d: d["nodes"][1].update(shape=[-1]), "the shape"),
        (lambda d: d["nodes"][1].update(outputs=[1]), "the outputs"),
        (lambda d: d["nodes"][1].update(mutates=[7]), "'mutates'"),
        (lambda d: d["nodes"][1].update(mutates=[[]]), "'mutates'"),
        (lambda d: d["nodes"][1].update(attributes={"a": [1]}), "attribute 'a'"),
        (lambda d: d["nodes"][1].update(backward=1), "'backward'"),
        (lambda d: d["meta"].update(engine=1), "meta.engine"),
    ],
)
def test_defects(change: Any, found: str) -> None:
    with pytest.raises(GraphFormatError, match="the text") as error:
        captured_from_json(_edited(change))
    assert found in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_cut_off_file(tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text(captured_to_json(_graph())[:80])
    with pytest.raises(GraphFormatError, match="ends in the middle"):
        read_captured(tmp_path / "graph.json")


def test_arguments_that_are_no_data() -> None:
    node = CapturedNode("x", "call", "f", (torch.float32,))
    with pytest.raises(GraphFormatError, match="x has an argument of type dtype"):
        captured_to_json(CapturedGraph((node,)))
