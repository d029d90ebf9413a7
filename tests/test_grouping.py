from dataclasses import replace
from typing import Any

import pytest
from sample_graphs import decoder_graph, with_edges, with_operators, without_fp8

from jetrl_compile.containment import (
    Difference,
    check_containment,
    group_differences,
)
from jetrl_compile.grouping import group_causes, ranges


def test_groups_put_the_cause_first() -> None:
    rollout = decoder_graph("rollout", 12)
    rollout = with_edges(
        rollout,
        lambda e: (
            replace(e, flow=replace(e.flow, scale_format="ue8m0"))
            if e.flow.is_quantized and e.operand == "w"
            else e
        ),
    )
    rollout = without_fp8(rollout, lambda name: "layers.3.self_attn.q_proj" in name)
    rollout = with_operators(
        rollout,
        lambda op: (
            replace(op, params=(("eps", 1e-5),))
            if op.kind == "norm" and ".layers." in op.name
            else op
        ),
    )
    report = check_containment(rollout, decoder_graph("train", 12))
    groups_ = group_differences(report)
    causes = group_causes(report)
    assert [cause.attribute for cause in causes] == [
        "fp8",
        "scale_format",
        "params.eps",
    ]
    assert groups_[0].where == "model.layers.3.self_attn.q_proj:fprop"
    q_proj = next(g for g in causes[1].groups if "q_proj" in g.place)
    assert q_proj.where == (
        "11 layers (model.layers.0-2,4-11), self_attn.q_proj:fprop.w"
    )
    assert causes[2].groups[0].message == (
        "12 layers (model.layers.0-11), input_layernorm:norm: param eps is 1e-05 in "
        "rollout, 1e-06 in train"
    )
    assert group_differences(report.differences) == groups_


def difference(name: str, **changes: Any) -> Difference:
    base = Difference(2, name, "dtype", "fp32", "bf16", f"{name}: dtype is ...")
    return replace(base, **changes)


@pytest.mark.parametrize(
    ("names_", "where"),
    [
        (
            [f"m.layers.{a}.experts.{b}.up:fprop" for a in (0, 1) for b in range(8)],
            "16 places in 2 layers (m.layers.0-1), experts.0-7.up:fprop",
        ),
        (["input.0", "input.1", "input.7"], "3 places (input.0-1,7)"),
        (["m.layers.4:residual_add.1"], "m.layers.4:residual_add.1"),
        (
            ["m.layers.4:residual_add.1", "m.layers.5:residual_add.1"],
            "2 layers (m.layers.4-5), :residual_add.1",
        ),
        (["a:x", "a:x"], "2 times a:x"),
        (["h.0.w", "h.1.w"], "2 layers (h.0-1), w"),
    ],
)
def test_where(names_: list[str], where: str) -> None:
    (group,) = group_differences([difference(name) for name in names_])
    assert group.where == where
    assert len(group.differences) == len(names_)


def test_roles_with_numbers_are_not_merged() -> None:
    found = [difference("m.layers.0:add"), difference("m.layers.0:add.1")]
    assert len(group_differences(found)) == 2


def test_sources_are_grouped_by_their_pattern() -> None:
    found = [
        difference(
            f"m.layers.{i}.a:norm",
            attribute="source",
            rollout=f"m.layers.{i}:cast",
            train=f"m.layers.{i}:add",
            message=f"m.layers.{i}.a:norm: source is m.layers.{i}:cast",
        )
        for i in range(3)
    ]
    (group,) = group_differences(found)
    assert (group.rollout, group.train) == ("m.layers.*:cast", "m.layers.*:add")
    assert str(group) == ("3 layers (m.layers.0-2), a:norm: source is m.layers.*:cast")


def test_ranges() -> None:
    assert ranges([3, 1, 2, 2, 7]) == "1-3,7"
    assert ranges([]) == ""
    assert ranges(range(0, 40, 2)) == "0,2,4,6,8,10,12,...,38"
