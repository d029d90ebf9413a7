"""Precision graphs of whole models, without weights and without a GPU.

The model is made on the meta device and traced with fake tensors, so a 671B model is
traced on a laptop. Nothing is computed.
"""

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from jetrl_compile.backend import jetrl
from jetrl_compile.errors import ModelError, PrecisionFlowError, one_line
from jetrl_compile.exact_attention import use_exact_attention
from jetrl_compile.kernels.dispatch import GemmShape, select
from jetrl_compile.layer_folding import find_folding, fold, unfold
from jetrl_compile.passes.annotate_precision import annotate_precision, linear_roles
from jetrl_compile.pipeline import CompileReport
from jetrl_compile.precision_graph import Operator, PrecisionGraph
from jetrl_compile.recipe import BF16, Recipe, get_recipe

_TOKENS = (2, 64)
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Progress = Callable[[str], None]


def trace_config(
    config_dir: Path | str | Any,
    *,
    phase: str = "train",
    recipe: str | Recipe = "jetrl",
    providers: tuple[str, ...] = ("reference",),
    fold_layers: bool = True,
    progress: Progress | None = None,
    exact: bool = False,
) -> PrecisionGraph:
    """Return the precision graph of the model that a Hugging Face config describes.

    Args:
        config_dir: A folder with a `config.json`, or a config object.
        phase: "train" (the joint graph, backward included) or "rollout".
        recipe: A recipe or its name.
        providers: GEMM providers, the preferred one first.
        fold_layers: Trace repeated decoder layers once a kind.
        progress: Called with a line before each step.
        exact: As it runs in exact mode.

    Raises:
        LoweringError: With `exact`, an operator has no kernel for it.
        ModelError: The folder holds no config, is of a quantized checkpoint, names a
            dtype other than BF16 and FP32, or no causal model can be made of it.
        RecipeError: The recipe is unknown, or one of its patterns matches nothing.
    """
    say = progress or (lambda _: None)
    chosen = get_recipe(recipe)
    chosen.quantizes(phase)  # an unknown phase fails before any work
    is_path = isinstance(config_dir, (str, Path))
    config = copy.deepcopy(_load_config(config_dir) if is_path else config_dir)
    say(f"making {type(config).__name__.removesuffix('Config')} on the meta device")
    model = _make(config)
    if exact:
        use_exact_attention(cast(Any, model))
    name = str(config_dir) if is_path else ""
    graph = _trace(model, phase, chosen, providers, fold_layers, say, exact)
    label = getattr(config, "model_type", "") or name
    return replace(graph, meta={**graph.meta, "model": label})


def trace_model(
    model: nn.Module,
    *,
    phase: str = "train",
    recipe: str | Recipe = "jetrl",
    providers: tuple[str, ...] = ("reference",),
    fold_layers: bool = True,
    progress: Progress | None = None,
    exact: bool = False,
) -> PrecisionGraph:
    """Return the precision graph of a causal model in memory; it is not changed.

    Args:
        model: A Hugging Face causal model (called with `input_ids`), or a rollout
            model that stores FP8 weights.
        phase: "train" or "rollout".
        recipe: A recipe or its name.
        providers: GEMM providers, the preferred one first.
        fold_layers: Trace repeated decoder layers once a kind.
        progress: Called with a line before each step.
        exact: As it runs in exact mode; its attention is that already.

    Raises:
        LoweringError: With `exact`, an operator has no kernel for it.
        ModelError: The model cannot be traced.
        RecipeError: The recipe is unknown, or one of its patterns matches nothing.
    """
    chosen = get_recipe(recipe)
    chosen.quantizes(phase)
    tensors = (*model.parameters(), *model.buffers())
    memo: dict[int, Any] = {}
    for tensor in tensors:
        meta = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = (
            nn.Parameter(meta, requires_grad=tensor.requires_grad)
            if isinstance(tensor, nn.Parameter)
            else meta
        )
    shell = copy.deepcopy(model, memo)
    _drop_input_grads(shell)
    say = progress or (lambda _: None)
    graph = _trace(shell, phase, chosen, providers, fold_layers, say, exact)
    label = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    return replace(graph, meta={**graph.meta, "model": str(label)})


def _drop_input_grads(model: nn.Module) -> None:
    """Take off the hooks by which gradient checkpointing asks for input gradients.

    They change nothing where parameters have gradients, and Dynamo of torch 2.11 has no
    `requires_grad_` without them.
    """
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__name__", "") == "make_inputs_require_grads":
                del module._forward_hooks[key]


def _load_config(folder: Path | str) -> Any:
    path = Path(folder)
    file = path if path.suffix == ".json" else path / "config.json"
    if not file.is_file():
        raise ModelError(
            f"{path} holds no config.json; give the folder of a Hugging Face model or "
            "config (its weights are not needed)"
        )
    try:
        kind = json.loads(file.read_text()).get("model_type")
    except (ValueError, AttributeError, UnicodeDecodeError) as error:
        raise ModelError(
            f"{file} is no JSON object ({str(error)[:80]}); give a Hugging Face config"
        ) from None
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            str(file), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many types here
        raise ModelError(
            f"{file} (model_type {kind!r}) is no config that this transformers can "
            f"read: {one_line(error)}; mend the config, or upgrade transformers"
        ) from None


def _dtype(config: Any) -> torch.dtype:
    """Return the dtype that a config names, BF16 where it names none."""
    named = getattr(config, "dtype", None) or vars(config).get("torch_dtype")
    name = str(named or torch.bfloat16).removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelError(
            f"{type(config).__name__} has dtype {name}, whose precision flow is not "
            'known; set "dtype": "bfloat16" in config.json'
        )
    return _DTYPES[name]


def _make(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    if getattr(config, "quantization_config", None):
        raise ModelError(
            f"{type(config).__name__} has a quantization_config, so it is of a "
            "quantized checkpoint; give the config of the unquantized one"
        )
    dtype = _dtype(config)
    try:
        with torch.device("meta"), _quiet():
            make: Any = AutoModelForCausalLM.from_config  # untyped
            model: nn.Module = make(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # transformers raises many types here
        raise ModelError(
            f"no causal language model can be made of {type(config).__name__}: "
            f"{one_line(error)}; give the config of a causal model"
        ) from None
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep third-party warnings about tracing away from the user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _trace(
    model: nn.Module,
    phase: str,
    recipe: Recipe,
    providers: tuple[str, ...],
    fold_layers: bool,
    say: Progress,
    exact: bool,
) -> PrecisionGraph:
    config = getattr(model, "config", None)
    folding = find_folding(model, config) if fold_layers else None
    if folding is not None:
        whole = copy.deepcopy(model) if phase == "train" else model
        config = getattr(whole, "config", None)
        fold(whole, folding, config)
        say(
            f"tracing {len(folding.chosen)} of {len(folding.stands_for)} layers "
            f"({folding.path}) in {phase}"
        )
        plain = _capture(whole, phase, exact)
        try:
            plain = unfold(plain, folding)
        except PrecisionFlowError as error:
            raise PrecisionFlowError(f"{error}; trace with fold_layers=False") from None
    else:
        say(f"tracing every layer in {phase}")
        plain = _capture(model, phase, exact)
    gemms = {op.module for op in plain.gemms("fprop")}
    if not gemms:
        raise ModelError(
            f"{type(model).__name__} has no linear layer, so there is no precision "
            "flow; give a language model"
        )
    recipe.check_patterns(sorted(gemms))
    say("annotating the precision of every edge")
    graph = annotate_precision(plain, recipe, phase)
    meta = {**graph.meta, "phase": phase, "recipe": recipe.name}
    roles = linear_roles(graph)
    meta["roles"] = ", ".join(f"{k}: {v}" for k, v in roles.items() if v == "lm_head")
    return PrecisionGraph(
        tuple(_with_provider(graph, op, providers) for op in graph.operators),
        graph.edges,
        {key: value for key, value in meta.items() if value},
    )


def _with_provider(
    graph: PrecisionGraph, operator: Operator, providers: tuple[str, ...]
) -> Operator:
    """Choose the provider of an FP8 GEMM, as the lowering pass would."""
    if operator.kind != "gemm" or not graph.is_fp8(operator):
        return operator
    role = operator.role.partition(".")[0]
    flows = {key: edge.flow for key, edge in graph.operands[operator.name].items()}
    params = dict(operator.params)
    shape = GemmShape(
        role=role,
        n=int(params["N"]),
        k=int(params["K"]),
        a=flows["x" if role == "fprop" else "dy"],
        b=flows["x" if role == "wgrad" else "w"],
    )
    provider = select(shape, providers).provider
    return replace(
        operator, provider=provider.name, batch_invariant=provider.batch_invariant
    )


def _capture(model: nn.Module, phase: str, exact: bool) -> PrecisionGraph:
    """Trace a model on the meta device and return its graph without FP8."""
    reports: list[CompileReport] = []
    options = {
        "recipe": BF16,
        "phase": phase,
        "lowering": "aot",
        "exact": exact,
        "report": reports.append,
    }

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return jetrl(gm, inputs, options=options)

    training = phase == "train"
    model.train(training)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    _fake_tensors(model, mode)
    with mode:
        tokens = torch.zeros(_TOKENS, dtype=torch.int64)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    try:
        with _quiet(), torch.set_grad_enabled(training), mode:
            compiled(input_ids=tokens, use_cache=False)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        raise error.inner_exception from None
    except torch._dynamo.exc.TorchRuntimeError as error:  # sizes that do not fit
        raise ModelError(
            f"{type(model).__name__} cannot run: {one_line(error, 240)}; mend its "
            "config (numbers of heads and sizes)"
        ) from None
    except torch._dynamo.exc.Unsupported as error:
        raise ModelError(
            f"{type(model).__name__} cannot be traced as one graph: "
            f"{str(error).splitlines()[0][:160]}"
        ) from None
    finally:
        torch._dynamo.reset()
    return reports[0].graph


def _fake_tensors(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace every parameter and buffer by a fake CPU tensor, ties kept."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    with mode:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                    made[id(tensor)] = (
                        nn.Parameter(fake, requires_grad=tensor.requires_grad)
                        if isinstance(tensor, nn.Parameter)
                        else fake
                    )
                table[name] = made[id(tensor)]  # type: ignore[assignment]
