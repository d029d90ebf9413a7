"""Set vLLM's compilation up for an engine with `quantization="jetrl"`."""

from typing import Any

import vllm.ir
from vllm.config import CompilationMode

from jetrl_compile.errors import ModelError
from jetrl_compile.integrations.vllm.compile_pass import HOOK, EnginePass
from jetrl_compile.integrations.vllm.norms import prefer_norms
from jetrl_compile.integrations.vllm.settings import Reports, Settings

BACKEND = "jetrl"
WHOLE_GRAPH = "jetrl_compile.integrations.vllm.whole_graph.backend"


def set_up(engine: Any, settings: Settings, reports: Reports) -> bool:
    """Add the pass to vLLM's compilation; called before the model's layers are made.

    In vLLM's own mode (3) the pass runs inside Inductor on each piece. In mode 2 with
    backend="jetrl" the model is one graph, and the pass is the backend's. A model that
    runs eagerly has the trainer's norms as implementations of vLLM IR.

    Args:
        engine: vLLM's config of the engine.
        settings: Of the engine.
        reports: Where the pass puts what it did.

    Returns:
        Whether the pass will run.

    Raises:
        ModelError: The config has another pass where this one must be.
    """
    config = engine.compilation_config
    if config.mode == CompilationMode.VLLM_COMPILE and config.backend == "inductor":
        known = config.inductor_compile_config.get(HOOK)
        if known is not None and not isinstance(known, EnginePass):
            raise ModelError(
                f"inductor_compile_config[{HOOK!r}] is {known!r}, and quantization "
                "'jetrl' runs its pass there; take it out"
            )
        config.inductor_compile_config[HOOK] = EnginePass(settings, reports)
        return True
    if config.backend in (BACKEND, WHOLE_GRAPH):
        from jetrl_compile.integrations.vllm import whole_graph

        whole_graph.prepare(settings, reports)
        config.backend = WHOLE_GRAPH
        # As with Inductor: norms stay operators of vLLM IR that the pass can read.
        vllm.ir.set_default_torch_wrap(True)
        _write_operators_in_torch(config)
        return True
    if config.mode == CompilationMode.NONE:
        prefer_norms()
        _write_operators_in_torch(config)
    return False


def _write_operators_in_torch(config: Any) -> None:
    """Leave out vLLM's own kernels, which round elsewhere than the trainer."""
    if config.custom_ops == ["all"]:
        config.custom_ops[:] = ["none"]
