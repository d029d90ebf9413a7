"""What people do with a live engine: its graph, a refit, the check against a trainer.

All functions take vLLM's `LLM`. They run inside its workers: in this process with
`VLLM_ENABLE_V1_MULTIPROCESSING=0`; with workers of their own vLLM asks for
`VLLM_ALLOW_INSECURE_SERIALIZATION=1` before it sends them functions.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from jetrl_compile.captured_graph import CapturedGraph
from jetrl_compile.containment import ContainmentReport, check_containment
from jetrl_compile.errors import ModelError
from jetrl_compile.exact_attention import is_exact
from jetrl_compile.graph_json import graph_from_json, graph_to_json
from jetrl_compile.integrations.vllm.live_model import (
    attention_facts,
    config_of,
    guard_heads,
    head_shapes,
    whole_shapes,
)
from jetrl_compile.integrations.vllm.ranks import check_ranks, push_to_ranks
from jetrl_compile.integrations.vllm.workers import (
    ask,
    check_awake,
    check_reachable,
    drop_prefix_cache,
    drop_requests,
    is_local,
)
from jetrl_compile.precision_graph import PrecisionGraph

Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


def engine_graph(llm: Any) -> PrecisionGraph:
    """Return the precision graph that a live engine runs, its output head included.

    With tensor parallelism it is the first rank's.

    Args:
        llm: vLLM's LLM, loaded with `quantization="jetrl"`.

    Raises:
        ModelError: The model was loaded otherwise, or cannot be traced.
        LoweringError: What vLLM compiled is not what the model says.
    """
    check_reachable(llm)
    document = ask(llm, graph_document)[0]
    return graph_from_json(document)


def captured_graph(llm: Any) -> CapturedGraph:
    """Return a live engine's graph before the passes, as data for a fixture."""
    captured: CapturedGraph = ask(llm, _captured)[0]
    return captured


def refit(llm: Any, weights: Weights) -> int:
    """Push all weights of a trainer into a live engine, all or nothing.

    Prefix caches hold keys and values of the old weights, and are dropped; so is what
    is left of requests.

    Args:
        llm: vLLM's LLM, loaded with `quantization="jetrl"`.
        weights: The trainer's parameters by Hugging Face's names, such as
            `trainer.named_parameters()`.

    Returns:
        The number of tensors that were pushed.

    Raises:
        RefitError: As `jetrl_compile.integrations.vllm.refit.refit_model`; or the
            weights are asleep, or the prefix cache cannot be dropped.
        ModelError: vLLM sends no functions to the engine's process.
    """
    given = {name: tensor.detach() for name, tensor in dict(weights).items()}
    check_reachable(llm)
    check_awake(llm)
    drop_requests(llm)
    drop_prefix_cache(llm)
    if not is_local(llm):
        return push_to_ranks(llm, given)
    count: int = ask(llm, partial(_refit, given))[0]
    return count


def check_engine(
    llm: Any,
    trainer: nn.Module,
    *,
    recipe: str = "jetrl",
    providers: tuple[str, ...] | None = None,
    exact: bool = False,
) -> ContainmentReport:
    """Check levels 1 to 3 of a live engine against a trainer's model.

    Args:
        llm: vLLM's LLM, loaded with `quantization="jetrl"`.
        trainer: The trainer's model, BF16 or FP32 masters.
        recipe: The trainer's recipe.
        providers: The trainer's GEMM providers; None: as the engine's device orders
            them.
        exact: Check exact mode, of both (`check_containment`).

    Raises:
        ModelError: The model cannot be traced, its process cannot be asked, or with
            `exact` it has another attention.
    """
    check_reachable(llm)
    if exact and not is_exact(trainer):
        raise ModelError(
            "the trainer has another attention than exact mode's; call "
            "jetrl_compile.exact_attention.use_exact_attention(trainer) first"
        )
    from jetrl_compile.kernels.dispatch import default_providers
    from jetrl_compile.tracing import trace_model

    train = trace_model(trainer, phase="train", recipe=recipe, exact=exact)
    reports = []
    # The ranks of a sound engine run one graph.
    for document in dict.fromkeys(ask(llm, graph_document)):
        live = graph_from_json(document)
        device = live.meta.get("device", "")
        own = on_device(train, device, providers or default_providers(device))
        if exact:
            own = exact_on_device(own, trainer, device)
        reports.append(check_containment(live, own, exact=exact))
    report = next((each for each in reports if each.differences), reports[0])
    weights = {name: p.detach() for name, p in trainer.named_parameters()}
    if not is_local(llm):
        return report.with_level(*check_ranks(llm, live, weights))
    for result, differences in ask(llm, partial(_bytes, weights)):
        report = report.with_level(result, differences)
        if differences:
            break
    return report


def exact_on_device(
    graph: PrecisionGraph, trainer: nn.Module, device: str
) -> PrecisionGraph:
    """Return an exact graph that was traced without a device, on one.

    Args:
        graph: Of `trace_model`.
        trainer: Its model.
        device: Device type, such as "cuda".
    """
    from jetrl_compile.kernels.attention_kernels import attention_kernel
    from jetrl_compile.kernels.exact_kernels import BF16_GEMMS

    attentions = {
        f"{name}:attention": attention_kernel(device, module.head_dim)
        for name, module in trainer.named_modules()
        if isinstance(getattr(module, "head_dim", None), int)
    }
    operators = []
    for op in graph.operators:
        if op.name in attentions:
            op = replace(op, provider=f"jetrl.attention.{attentions[op.name]}")
        elif op.kind == "gemm" and op.provider == "reference" and device == "cuda":
            op = replace(op, provider=BF16_GEMMS[0])
        operators.append(op)
    return replace(graph, operators=tuple(operators))


def on_device(
    graph: PrecisionGraph, device: str, providers: tuple[str, ...]
) -> PrecisionGraph:
    """Return a graph that was traced without a device, its fprop GEMMs run on one.

    Args:
        graph: Of `trace_model`.
        device: Device type, such as "cuda".
        providers: GEMM providers, the preferred one first.
    """
    from jetrl_compile.kernels.dispatch import GemmShape, select

    operators = []
    for op in graph.operators:
        if op.kind == "gemm" and graph.is_fp8(op) and op.role.startswith("fprop"):
            params = dict(op.params)
            flows = {key: edge.flow for key, edge in graph.operands[op.name].items()}
            shape = GemmShape(
                role="fprop",
                n=int(params["N"]),
                k=int(params["K"]),
                a=flows["x"],
                b=flows["w"],
                out_dtype="bf16",
                device_type=device,
            )
            chosen = select(shape, providers).provider
            op = replace(
                op, provider=chosen.name, batch_invariant=chosen.batch_invariant
            )
        operators.append(op)
    return replace(graph, operators=tuple(operators))


def graph_document(model: nn.Module) -> str:
    """Return the precision graph of a loaded model as JSON; runs inside a worker.

    Raises:
        ModelError: The model was loaded otherwise, or cannot be traced.
        LoweringError: What vLLM compiled is not what the model says.
    """
    return graph_to_json(_live(model).graph)


def _captured(model: nn.Module) -> CapturedGraph:
    return _live(model).captured  # type: ignore[no-any-return]


def _live(model: nn.Module) -> Any:
    import vllm.ir
    from vllm.distributed import get_tensor_model_parallel_world_size

    from jetrl_compile.integrations.vllm.live_graph import trace_live

    config = config_of(model)
    guard_heads(model)
    ranks = get_tensor_model_parallel_world_size()
    decodes = getattr(config, "decode_attention", "")
    with vllm.ir.enable_torch_wrap(config.fused):
        return trace_live(
            model,
            config.settings(),
            fused=config.fused,
            reports=config.reports,
            attributes=attention_facts(model),
            head=ranks == 1,
            whole=whole_shapes(model) if ranks > 1 else head_shapes(model) or None,
            meta={
                "engine": "vllm",
                "tensor_parallel": str(ranks),
                **({"decode_attention": decodes} if decodes else {}),
                "device": next(model.parameters()).device.type,
            },
        )


def _refit(weights: Mapping[str, Tensor], model: nn.Module) -> int:
    from jetrl_compile.integrations.vllm.refit import refit_model

    return refit_model(model, weights)


def _bytes(weights: Mapping[str, Tensor], model: nn.Module) -> Any:
    from jetrl_compile.integrations.vllm.live_bytes import check_live_bytes

    return check_live_bytes(model, weights)
