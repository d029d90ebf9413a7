"""A model's graphs at every level, captured while it is compiled on a CPU."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import (  # type: ignore[import-untyped]
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule

from jetrl_compile.capture import capture
from jetrl_compile.captured_graph import CapturedGraph
from jetrl_compile.graph_inputs import match_placeholders, placeholder_infos

Run = Callable[[Callable[..., Any]], Any]


class Levels:
    """A torch.compile backend that keeps what it sees.

    Attributes:
        dynamo: Dynamo's graphs.
        inference: AOTAutograd's graphs of forwards without gradient.
        joint: AOTAutograd's graphs of forward and backward.
    """

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.dynamo: list[CapturedGraph] = []
        self.inference: list[CapturedGraph] = []
        self.joint: list[CapturedGraph] = []

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        infos = placeholder_infos(gm, inputs, self.prefix)
        shapes = [getattr(value, "shape", None) for value in inputs]
        names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
        known = dict(zip(names, infos, strict=True))
        self.dynamo.append(capture(gm.graph, known, prefix=self.prefix))

        def captured(lowered: GraphModule) -> CapturedGraph:
            found = match_placeholders(lowered.graph, infos, shapes)
            return capture(lowered.graph, found, prefix=self.prefix)

        def run(lowered: GraphModule, _: Any) -> Callable[..., Any]:
            boxed: Callable[..., Any] = make_boxed_func(lowered.forward)
            return boxed

        def inference(lowered: GraphModule, args: Any) -> Callable[..., Any]:
            self.inference.append(captured(lowered))
            return run(lowered, args)

        def partition(joint: GraphModule, args: Any, **more: Any) -> Any:
            self.joint.append(captured(joint))
            return min_cut_rematerialization_partition(joint, args, **more)

        compiled: Callable[..., Any] = aot_autograd(
            fw_compiler=run,
            bw_compiler=run,
            inference_compiler=inference,
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )(gm, inputs)
        return compiled


def levels_of(
    model: torch.nn.Module,
    ids: torch.Tensor,
    *,
    train: bool = True,
    infer: bool = True,
    fullgraph: bool = True,
    **inputs: Any,
) -> Levels:
    """Compile a causal model for inference and training; return its graphs."""
    torch._dynamo.reset()
    levels = Levels()
    compiled = torch.compile(model, backend=levels, fullgraph=fullgraph)
    inputs.setdefault("use_cache", False)
    with warnings.catch_warnings():
        # Dynamo's remarks about the model's code.
        warnings.simplefilter("ignore", UserWarning)
        if infer:
            with torch.no_grad():
                compiled(input_ids=ids, **inputs)
        if train:
            compiled(input_ids=ids, **inputs).logits.float().sum().backward()
    return levels
