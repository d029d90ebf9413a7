"""What is known of a graph's inputs: which are parameters, and what they are called.

Dynamo knows the module path of each input of its graph. AOTAutograd keeps their order
and gives them names of its own, so that what is known is carried over by position, and
checked by shape.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from jetrl_compile.capture import PlaceholderInfo, canonical_path
from jetrl_compile.errors import LoweringError, ModelError
from jetrl_compile.formats import short_name


def placeholder_infos(
    gm: GraphModule, inputs: Sequence[Any], prefix: str
) -> list[PlaceholderInfo]:
    """Return what Dynamo says of each input of its graph.

    Args:
        gm: Dynamo's graph.
        inputs: Its inputs, in order.
        prefix: Path of the compiled module in the whole model.
    """
    infos = []
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node, value in zip(nodes, inputs, strict=True):
        argument = node.meta.get("grapharg")
        name = getattr(getattr(argument, "source", None), "name", "")
        path = name() if callable(name) else name
        if "_parameters[" in path or isinstance(value, torch.nn.Parameter):
            infos.append(PlaceholderInfo("parameter", canonical_path(path, prefix)))
        elif "_buffers[" in path:
            infos.append(PlaceholderInfo("buffer", canonical_path(path, prefix)))
        else:
            infos.append(PlaceholderInfo("input"))
    return infos


def check_weights(infos: Sequence[PlaceholderInfo], inputs: Sequence[Any]) -> None:
    """Check that no parameter holds integers, as models quantized elsewhere do.

    Raises:
        ModelError: One does; its GEMM could not be seen, let alone be quantized.
    """
    for info, value in zip(infos, inputs, strict=True):
        if info.kind != "parameter" or not isinstance(value, torch.Tensor):
            continue
        if value.dim() == 2 and not (value.is_floating_point() or value.is_complex()):
            raise ModelError(
                f"parameter {info.path} is {short_name(value.dtype)}; the precision "
                "flow needs BF16 or FP32 weights: load the model without quantization"
            )


def match_placeholders(
    graph: Graph, infos: Sequence[PlaceholderInfo], shapes: Sequence[Any]
) -> dict[str, PlaceholderInfo]:
    """Return what is known of AOTAutograd's placeholders, by name.

    Args:
        graph: A joint or inference graph.
        infos: What is known of the inputs of Dynamo's graph, in order.
        shapes: Their shapes; None for one that is no tensor.

    Raises:
        LoweringError: The graph's inputs are not those of Dynamo's graph.
    """
    nodes = [
        node
        for node in graph.nodes
        if node.op == "placeholder" and not node.name.startswith("tangents")
    ]
    fits = len(nodes) == len(infos)
    for node, info, shape in zip(nodes, infos, shapes, strict=False):
        value = node.meta.get("val")
        known = info.kind == "parameter" and isinstance(value, torch.Tensor)
        fits &= not known or shape is None or tuple(value.shape) == tuple(shape)
    if not fits:
        raise LoweringError(
            f"the graph has {len(nodes)} inputs that are not the {len(infos)} of "
            "Dynamo's graph, so that its weights have no names; compile modules whose "
            "parameters are plain tensors (with FSDP2: each layer, before fully_shard)"
        )
    return {node.name: info for node, info in zip(nodes, infos, strict=True)}
