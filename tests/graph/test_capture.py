"""What is kept of an FX graph: names, writes, functional forms, module paths."""

import operator
from collections.abc import Iterator

import pytest
import torch
from graph_coverage import uncovered
from graph_levels import Levels
from torch import Tensor, nn

from jetrl_compile.capture import canonical_path, op_name
from jetrl_compile.captured_graph import CapturedNode
from jetrl_compile.graph_builder import build_precision_graph

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (aten.mm.default, "mm"),
        (aten.add_.Tensor, "add"),
        (torch.nn.functional.linear, "linear"),
        (torch.nn.functional.pad, "constant_pad_nd"),
        (torch.rsqrt, "rsqrt"),
        (operator.getitem, "getitem"),
        (operator.truediv, "div"),
        (operator.iadd, "add"),
        (operator.mul, "mul"),
        (operator.neg, "neg"),
        ("view", "view"),
        ("masked_fill_", "masked_fill"),
    ],
)
def test_op_name(target: object, name: str) -> None:
    assert op_name(target) == name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['self'].model.layers.0", "model.layers.0"),
        ("L['self']._modules['a']._parameters['weight']", "a.weight"),
        ("L['self']._orig_mod.layers.slice(0, 2, None).1.mlp", "layers.1.mlp"),
        ("L['fn'].__closure__[0].cell_contents[0].layers[3]", "layers.3"),
    ],
)
def test_canonical_path(path: str, name: str) -> None:
    assert canonical_path(path) == name
    assert canonical_path(path, "model") == f"model.{name}"


@pytest.fixture(name="library", scope="module")
def _library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("jetrl_test", "FRAGMENT") as library:
        library.define("rotate(Tensor p, Tensor(a!) q, Tensor(b!) k) -> ()")
        library.define("fill(Tensor x, Tensor(a!) out) -> ()")

        def rotate(p: Tensor, q: Tensor, k: Tensor) -> None:
            q.mul_(2)
            k.mul_(2)

        def fill(x: Tensor, out: Tensor) -> None:
            out.copy_(x)

        library.impl("rotate", rotate, "CompositeExplicitAutograd")
        library.impl("fill", fill, "CompositeExplicitAutograd")
        yield library


class Engine(nn.Module):
    """Writes in place with operators of its own, as vLLM does."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 16, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.proj(x).split(8, dim=-1)
        q, k = q.clone(), k.clone()
        torch.ops.jetrl_test.rotate(x, q, k)
        out = torch.empty_like(x)
        torch.ops.jetrl_test.fill(q * k, out)
        return out + 1


def _named(nodes: tuple[CapturedNode, ...], target: str) -> CapturedNode:
    (found,) = (node for node in nodes if node.target == target)
    return found


def test_writes_in_place_and_their_functional_form(
    library: torch.library.Library,
) -> None:
    torch._dynamo.reset()
    levels = Levels(prefix="model.layers.3")
    model = torch.compile(Engine(), backend=levels, fullgraph=True)
    with torch.no_grad():
        model(torch.ones(4, 8, dtype=torch.bfloat16))
    (dynamo,), (inference,) = levels.dynamo, levels.inference

    assert _named(dynamo.nodes, "jetrl_test.rotate").mutates == (1, 2)
    assert _named(dynamo.nodes, "jetrl_test.fill").mutates == (1,)
    functional = _named(inference.nodes, "jetrl_test.rotate")
    assert functional.mutates == ()
    assert functional.outputs == ("bf16", "bf16")

    for captured in (dynamo, inference):
        assert not uncovered(captured)
        graph = build_precision_graph(captured).graph
        product = graph.operands["model.layers.3:mul"]
        assert {edge.source for edge in product.values()} == {
            "model.layers.3:jetrl_test.rotate"
        }
        filled = graph.operands["model.layers.3:jetrl_test.fill"]
        assert "model.layers.3:mul" in {edge.source for edge in filled.values()}
        total = graph.operands["model.layers.3:add"]
        assert [edge.source for edge in total.values()] == [
            "model.layers.3:jetrl_test.fill"
        ]
        rotate = graph.by_name["model.layers.3:jetrl_test.rotate"]
        assert rotate.kind == "unknown"
        assert rotate.provider == "jetrl_test"
