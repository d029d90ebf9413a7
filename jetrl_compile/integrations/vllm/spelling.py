"""Spell vLLM's norms as the trainer's model code does.

vLLM IR's `fused_add_rms_norm` normalizes the sum in FP32 and rounds it for the residual
alone; Hugging Face's models add in BF16 and normalize the rounded sum. Here each norm
of vLLM IR becomes the operators of Hugging Face's code, so that both sides compute the
same and later passes match one form. A norm of another form (a weight in FP32, a part
of the row) is left to vLLM.

Source: vLLM 0.24, vllm/ir/ops/layernorm.py; transformers 5, modeling_llama.py.
"""

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from jetrl_compile.capture import op_name
from jetrl_compile.passes.graph_nodes import emit

aten = torch.ops.aten
cast = torch.ops.prims.convert_element_type.default
NORM = "vllm_ir.rms_norm"
ADD_NORM = "vllm_ir.fused_add_rms_norm"


def functionalize_norms(gm: GraphModule) -> int:
    """Let vLLM's norms return new tensors; return how many wrote into their inputs.

    `maybe_inplace` may reuse its inputs' memory, and promises that they are not read
    again: the functional overload computes the same.
    """
    count = 0
    for node in gm.graph.nodes:
        if getattr(node.target, "_overloadname", "") == "maybe_inplace":
            name = node.target._schema.name.partition("::")[2]
            node.target = getattr(torch.ops.vllm_ir, name).default
            count += 1
    gm.recompile()
    return count


def spell_norms(graph: Graph) -> int:
    """Rewrite the norms of a functional graph; return how many."""
    count = 0
    for node in list(graph.nodes):
        name = op_name(node.target) if node.op == "call_function" else ""
        if name == NORM and _is_plain(node, 1):
            with graph.inserting_before(node):
                y = _norm(graph, node, node.args[0], node.args[1], node.args[2])
            node.replace_all_uses_with(y)
        elif name == ADD_NORM and _is_plain(node, 2):
            _add_norm(graph, node)
        else:
            continue
        graph.erase_node(node)
        count += 1
    return count


def _is_plain(node: Node, weight_at: int) -> bool:
    """Whether a norm is over whole rows, with x and weight in BF16."""
    args = node.args
    if node.kwargs or any(arg is not None for arg in args[weight_at + 2 :]):
        return False
    tensors = args[: weight_at + 1]
    return all(
        isinstance(t, Node) and t.meta["val"].dtype is torch.bfloat16 for t in tensors
    )


def _add_norm(graph: Graph, node: Node) -> None:
    x, residual, weight, eps = node.args[:4]
    with graph.inserting_before(node):
        total = emit(graph, aten.add.Tensor, (residual, x), node)
        y = _norm(graph, node, total, weight, eps)
    for item in list(node.users):
        item.replace_all_uses_with(y if item.args[1] == 0 else total)
        graph.erase_node(item)


def _norm(graph: Graph, node: Node, x: Any, weight: Any, eps: Any) -> Node:
    def call(target: Any, *args: Any) -> Node:
        return emit(graph, target, args, node)

    wide = call(cast, x, torch.float32)
    mean = call(aten.mean.dim, call(aten.pow.Tensor_Scalar, wide, 2), [-1], True)
    rstd = call(aten.rsqrt.default, call(aten.add.Tensor, mean, eps))
    narrow = call(cast, call(aten.mul.Tensor, wide, rstd), torch.bfloat16)
    return call(aten.mul.Tensor, weight, narrow)
