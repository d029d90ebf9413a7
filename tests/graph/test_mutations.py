"""Reads after a write in place come from the operator that wrote."""

from jetrl_compile.captured_graph import CapturedGraph, CapturedNode, Ref
from jetrl_compile.graph_builder import build_precision_graph
from jetrl_compile.mutations import without_mutations

SLICE = {"slice": (0, 2, None)}


def call(name: str, target: str, *args: object, mutates: int = -1) -> CapturedNode:
    node = CapturedNode(name, "call", target, args, dtype="bf16", shape=(2, 4))
    node.mutates = (mutates,) if mutates >= 0 else ()
    node.module = "m"
    return node


def placeholder(name: str) -> CapturedNode:
    return CapturedNode(name, "placeholder", "input", dtype="bf16", shape=(2, 4))


def output(*read: int) -> CapturedNode:
    refs = tuple(map(Ref, read))
    return CapturedNode("output", "output", "output", (refs,))


def functional(*nodes: CapturedNode) -> list[tuple[str, tuple[object, ...]]]:
    graph, _ = without_mutations(CapturedGraph(nodes))
    return [(node.name, node.args) for node in graph.nodes if node.op != "placeholder"]


def test_graph_without_writes_is_the_same_object() -> None:
    graph = CapturedGraph((placeholder("x"), call("y", "relu", Ref(0)), output(1)))
    assert without_mutations(graph) == (graph, None)
    assert without_mutations(graph)[0] is graph


def test_reads_before_and_after() -> None:
    found = functional(
        placeholder("x"),
        call("view", "view", Ref(0), -1),
        call("before", "relu", Ref(1)),
        call("write", "add", Ref(0), Ref(2), mutates=0),
        call("after", "relu", Ref(1)),
        output(0, 4),
    )
    assert found == [
        ("view", (Ref(0), -1)),
        ("before", (Ref(1),)),
        ("write", (Ref(0), Ref(2))),
        ("after", (Ref(3),)),
        ("output", ((Ref(3), Ref(4)),)),
    ]


def test_two_writes() -> None:
    found = functional(
        placeholder("x"),
        call("one", "add", Ref(0), 1.0, mutates=0),
        call("two", "mul", Ref(0), 2.0, mutates=0),
        output(0, 1),
    )
    assert found == [
        ("one", (Ref(0), 1.0)),
        ("two", (Ref(1), 2.0)),
        ("output", ((Ref(2), Ref(2)),)),
    ]


def test_memory_that_was_only_made_is_not_read() -> None:
    found = functional(
        placeholder("x"),
        call("out", "empty", (2, 4)),
        call("view", "view", Ref(1), -1, 4),
        call("kernel", "a.kernel", Ref(2), Ref(0), mutates=0),
        call("after", "view", Ref(2), -1),
        output(4),
    )
    assert found[2:] == [
        ("kernel", (None, Ref(0))),
        ("after", (Ref(3), -1)),
        ("output", ((Ref(4),),)),
    ]


def test_parts_are_joined_where_the_whole_is_read() -> None:
    found = functional(
        placeholder("x"),
        call("made", "new_empty", Ref(0), (2, 4)),
        call("left", "getitem", Ref(1), ("...", SLICE)),
        call("one", "copy", Ref(2), Ref(0), mutates=0),
        call("right", "getitem", Ref(1), ("...", {"slice": (2, None, None)})),
        call("two", "copy", Ref(4), Ref(0), mutates=0),
        call("reader", "relu", Ref(1)),
        output(6),
    )
    assert [name for name, _ in found] == [
        *("made", "left", "one", "one_into_made", "right", "two"),
        *("two_into_one_into_made", "reader", "output"),
    ]
    assert found[3][1] == (None, Ref(3))
    assert found[4][1][0] == Ref(4)
    assert found[6][1] == (Ref(4), Ref(6))
    assert found[7][1] == (Ref(7),)


def test_whole_that_nobody_reads_is_not_joined() -> None:
    found = functional(
        placeholder("x"),
        call("part", "getitem", Ref(0), ("...", SLICE)),
        call("write", "relu", Ref(1), mutates=0),
        call("after", "mul", Ref(1), 2.0),
        output(3),
    )
    assert [name for name, _ in found] == ["part", "write", "after", "output"]
    assert found[2][1] == (Ref(2), 2.0)


def test_operator_that_writes_to_several_tensors() -> None:
    nodes = (
        placeholder("q"),
        placeholder("k"),
        call("kernel", "a.rotate", Ref(0), Ref(1)),
        call("reader", "mul", Ref(0), Ref(1)),
        output(3),
    )
    nodes[2].dtype, nodes[2].shape, nodes[2].mutates = "", (), (0, 1)
    nodes[2].module = "m.rotary"

    graph, origin = without_mutations(CapturedGraph(nodes))

    assert origin == [0, 1, 2, 2, 2, 3, 4]
    assert graph.nodes[2].outputs == ("bf16", "bf16")
    assert [node.args for node in graph.nodes[3:6]] == [
        (Ref(2), 0),
        (Ref(2), 1),
        (Ref(3), Ref(4)),
    ]
    built = build_precision_graph(CapturedGraph(nodes)).graph
    assert {edge.source for edge in built.operands["m:mul"].values()} == {
        "m.rotary:a.rotate"
    }
