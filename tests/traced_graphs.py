"""Joint and inference graphs as the passes get them."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from jetrl_compile.backend import JetRLPass, jetrl
from jetrl_compile.graph_inputs import match_placeholders
from jetrl_compile.passes.context import Context
from jetrl_compile.passes.graph_nodes import copy_graph
from jetrl_compile.recipe import get_recipe


def capture_context(
    run: Callable[[Any], Any], model: Any, recipe: Any = "jetrl", phase: str = "train"
) -> Context:
    """The context on which the first pass would run.

    Args:
        run: Calls the compiled model once, with gradients enabled or not.
        model: What is compiled.
        recipe: A recipe or its name.
        phase: "train" or "rollout".
    """
    found: list[Context] = []
    chosen = get_recipe(recipe)

    def backend(gm: GraphModule, inputs: list[Any]) -> Any:
        original = JetRLPass.__call__

        def keep(self: JetRLPass, graph: torch.fx.Graph) -> None:
            placeholders = match_placeholders(graph, self.infos, self.shapes)
            found.append(
                Context(
                    copy_graph(graph),
                    placeholders,
                    chosen,
                    phase,
                    meta={"vocabulary": ""},
                )
            )
            original(self, graph)

        JetRLPass.__call__ = keep  # type: ignore[method-assign]
        try:
            return jetrl(gm, inputs, options={"lowering": "aot", "recipe": "bf16"})
        finally:
            JetRLPass.__call__ = original  # type: ignore[method-assign]

    torch._dynamo.reset()
    run(torch.compile(model, backend=backend, fullgraph=True))
    return found[0]


def fresh(context: Context) -> Context:
    """The same graph, untouched."""
    return Context(
        copy_graph(context.graph),
        context.placeholders,
        context.recipe,
        context.phase,
        meta=context.meta,
    )
