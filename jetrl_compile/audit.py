"""Levels 1 to 4 on a live pair: a trainer's model and its rollout model."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_compile.bytes_check import compare_bytes
from jetrl_compile.containment import (
    ContainmentReport,
    Difference,
    LevelResult,
    check_containment,
)
from jetrl_compile.decode_audit import Decoded, decode, parting
from jetrl_compile.errors import LoweringError, ModelError
from jetrl_compile.layers import compile_layers, decoder_layers
from jetrl_compile.mismatch import TensorGap, operator_gaps
from jetrl_compile.pipeline import CompileReport
from jetrl_compile.precision_graph import PrecisionGraph
from jetrl_compile.recipe import Recipe, get_recipe
from jetrl_compile.recorder import Recorder, first_difference
from jetrl_compile.tracing import trace_model

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Audit:
    """What the audit of a live pair found.

    Attributes:
        report: Containment at all four levels.
        train_graph: The precision graph of the trainer's training graph.
        rollout_graph: The precision graph of the rollout model's graph.
        log_prob_gap: |rollout - train| of each token's log-prob, (B, L - 1), FP32,
            nats; 0 where masked out.
        stored: How much of each tensor that the rollout model stores is not what the
            trainer's weights give (level 3).
        operators: How much of each operator's value differs, in execution order.
        equal: The share of tokens, 0 to 1, whose log-probs are equal in bits.
    """

    report: ContainmentReport
    train_graph: PrecisionGraph
    rollout_graph: PrecisionGraph
    log_prob_gap: Tensor
    stored: tuple[TensorGap, ...] = ()
    operators: tuple[TensorGap, ...] = ()
    equal: float = 0.0


@dataclass(frozen=True)
class _Run:
    logits: Tensor
    graph: PrecisionGraph
    values: dict[str, Tensor]


def audit(
    trainer: nn.Module,
    rollout: nn.Module,
    input_ids: Tensor,
    *,
    recipe: str | Recipe = "jetrl",
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    tolerance: float = 0.0,
    providers: tuple[str, ...] | None = None,
    progress: Progress | None = None,
    exact: bool = False,
) -> Audit:
    """Check a rollout model against the trainer that it was made from.

    Both run on the same tokens, through the same passes: the trainer's training graph
    (with gradients), and the rollout model's inference graph. Neither model is changed.

    Args:
        trainer: A Hugging Face causal model, BF16 or FP32 masters.
        rollout: From `make_rollout_model`.
        input_ids: (B, L), int64.
        recipe: The recipe of both sides.
        attention_mask: (B, L), 1 at tokens, or None.
        position_ids: (B, L), or None.
        tolerance: Largest log-prob gap in nats that passes level 4; 0 asks for equal
            bits.
        providers: GEMM providers, the preferred one first; None: by device.
        progress: Called with a line before each step.
        exact: Check exact mode: kernels too (`check_containment`), and the rollout
            model decodes token by token, with a cache, half of each sequence.

    Raises:
        ModelError: A model cannot be run on the tokens, or the pair does not match.
    """
    say = progress or (lambda _: None)
    chosen = get_recipe(recipe)
    inputs = {"input_ids": input_ids}
    if attention_mask is not None:
        inputs["attention_mask"] = attention_mask
    if position_ids is not None:
        inputs["position_ids"] = position_ids
    options = {"recipe": chosen, "providers": providers, "exact": exact}
    say("running the training graph")
    train = _run(trainer, inputs, {**options, "phase": "train"})
    say("running the rollout graph")
    roll = _run(rollout, inputs, {**options, "phase": "rollout"})
    say("comparing structure and flow")
    report = check_containment(roll.graph, train.graph, exact=exact)
    say("comparing the bytes of the weights")
    result, differences, stored = compare_bytes(trainer, rollout)
    report = report.with_level(result, differences)
    say("comparing log-probs")
    if exact:
        say("decoding with the rollout model")
        decoded = decode(rollout, inputs, options)
        gap = _gap(decoded.logits, train.logits, input_ids, attention_mask)
        level = _check_decoded(train, decoded, gap, report)
    else:
        gap = _gap(roll.logits, train.logits, input_ids, attention_mask)
        level = _check_logits(train, roll, gap, tolerance, report)
    report = report.with_level(*level)
    order = [op.name for op in train.graph.operators if op.phase == "forward"]
    operators = operator_gaps(order, train.values, roll.values)
    equal = _equal_share(gap, attention_mask)
    return Audit(report, train.graph, roll.graph, gap, stored, operators, equal)


def _run(model: nn.Module, inputs: dict[str, Tensor], options: dict[str, Any]) -> _Run:
    """Run a model through the passes, recording every operator.

    A model whose FP8 GEMMs are all in its decoder layers is compiled a layer at a time,
    as in training; any other one, and an exact one, whole.
    """
    traced, layers = None, {}
    if not options["exact"]:
        traced = trace_model(
            model,
            phase=options["phase"],
            recipe=options["recipe"],
            providers=options["providers"] or ("reference",),
        )
        layers = _layers_with_fp8(model, traced)
    recorder = Recorder()
    reports: list[CompileReport] = []
    options = {
        **options,
        "lowering": "aot",
        "recorder": recorder,
        "fuse": False,  # so that each operator has a value
        "report": reports.append,
    }
    was_training = model.training
    model.eval()  # no dropout: both sides compute the same function
    torch._dynamo.reset()
    hooks: list[Any] = []
    before = {path: layer._compiled_call_impl for path, layer in layers.items()}
    called: Callable[..., Any] = model
    try:
        if layers:
            compile_layers(model, **options)
            hooks = recorder.watch(model, layers)
        else:
            called = torch.compile(
                model, backend="jetrl", fullgraph=True, options=options
            )
        with (
            warnings.catch_warnings(),
            torch.set_grad_enabled(options["phase"] == "train"),
            # A float attribute (eps) that differs between layers stays a constant.
            torch._dynamo.config.patch(specialize_float=True),
        ):
            # Dynamo looks at .grad of the activations between layers.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
            logits = called(**inputs, use_cache=False).logits.detach()
    except torch._dynamo.exc.BackendCompilerFailed as error:
        raise error.inner_exception from None
    except torch._dynamo.exc.Unsupported as error:
        raise ModelError(
            f"{type(model).__name__} cannot be compiled as one graph: "
            f"{str(error).splitlines()[0][:160]}"
        ) from None
    finally:
        model.train(was_training)
        for item in hooks:
            item.remove()
        for path, layer in layers.items():
            layer._compiled_call_impl = before[path]
        torch._dynamo.reset()
    if not reports:
        raise ModelError(
            f"{type(model).__name__} ran without being compiled, so nothing is known "
            "of its precision; unset TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE"
        )
    graph = reports[0].graph
    if layers and traced is not None:
        graph = _graph_that_ran(traced, reports)
    label = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    meta = {**graph.meta, "model": str(label)}
    values = _by_operator(graph, recorder.values)
    return _Run(logits, replace(graph, meta=meta), values)


def _layers_with_fp8(model: nn.Module, graph: PrecisionGraph) -> dict[str, nn.Module]:
    """The decoder layers, if all FP8 GEMMs are in them; else none."""
    try:
        layers = decoder_layers(model)
    except ModelError:
        return {}
    inside = tuple(f"{path}." for path in layers)
    fp8 = [op for op in graph.gemms("fprop") if graph.is_fp8(op)]
    return layers if all(op.module.startswith(inside) for op in fp8) else {}


def _graph_that_ran(
    traced: PrecisionGraph, reports: Sequence[CompileReport]
) -> PrecisionGraph:
    """Check the compiled layers against the traced graph of the whole model.

    The whole model's graph is traced without weights; that its layers are those that
    ran is checked here, GEMM by GEMM.

    Raises:
        LoweringError: A compiled layer is not as it was traced.
    """
    for report in reports:
        for op in report.graph.gemms():
            wanted = traced.by_name.get(op.name)
            operands = report.graph.operands[op.name]
            flows = {key: edge.flow for key, edge in operands.items()}
            there = traced.operands.get(op.name, {})
            if wanted != op or flows != {key: edge.flow for key, edge in there.items()}:
                raise LoweringError(
                    f"{op.name} ran as '{op}', but was traced as '{wanted}'; this is a "
                    "fault of the compiler, please report it"
                )
    return traced


def _by_operator(graph: PrecisionGraph, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values by operator; those recorded by module path get its operator's name."""
    named = dict(values)
    by_module: dict[str, list[str]] = {}
    for op in graph.operators:
        if op.phase == "forward" and op.kind not in ("parameter", "index"):
            by_module.setdefault(op.module, []).append(op.name)
    for path, operators in by_module.items():
        if path in values and len(operators) == 1:
            named[operators[0]] = values[path]
    return named


def _gap(a: Tensor, b: Tensor, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """|log p_a - log p_b| of each next token, computed in FP32."""
    targets = tokens[:, 1:, None]
    left, right = (
        torch.log_softmax(logits[:, :-1].float(), dim=-1).gather(-1, targets)[..., 0]
        for logits in (a, b)
    )
    gap = (left - right).abs()
    return gap if mask is None else gap * (mask[:, 1:] * mask[:, :-1]).to(gap.dtype)


def _equal_share(gap: Tensor, mask: Tensor | None) -> float:
    tokens = torch.ones_like(gap) if mask is None else mask[:, 1:] * mask[:, :-1]
    total = float(tokens.sum())
    return float(((gap == 0) * tokens).sum()) / total if total else 1.0


def _check_decoded(
    train: _Run, decoded: Decoded, gap: Tensor, report: ContainmentReport
) -> tuple[LevelResult, list[Difference]]:
    """Level 4 of exact mode: every token's log-prob is the trainer's, bit for bit."""
    differs = ~(gap == 0)  # NaN fails
    counts = {"tokens": gap.numel(), "tokens that differ": int(differs.sum())}
    found = parting(decoded, train.graph, train.values, differs)
    if found is None:
        return LevelResult(4, "passed", counts=counts), []
    name, place = "output", "outside the recorded operators"
    if found.operator is not None:
        name, (*_, edge) = found.operator, _edge(train.graph, found.operator, report)
        place = f"in its result (edge {edge})"
    share = 100 * (1 - counts["tokens that differ"] / max(1, gap.numel()))
    message = (
        f"{name}: {share:.2f}% of {gap.numel()} log-probs are equal in bits; those of "
        f"token {found.token + 1} of sequence {found.row} differ by "
        f"{float(gap[found.row, found.token]):.3g} nats, and bits part first {place}"
    )
    difference = Difference(4, name, "values", None, None, message)
    return LevelResult(4, "failed", counts=counts), [difference]


def _check_logits(
    train: _Run, roll: _Run, gap: Tensor, tolerance: float, report: ContainmentReport
) -> tuple[LevelResult, list[Difference]]:
    largest = float(gap.max()) if gap.numel() else 0.0
    order = [op.name for op in train.graph.operators if op.phase == "forward"]
    compared = sum(name in train.values and name in roll.values for name in order)
    counts = {"tokens": gap.numel(), "operators recorded": compared}
    if largest <= tolerance:  # NaN fails
        return LevelResult(4, "passed", counts=counts), []
    where = int((gap > tolerance).sum()) or gap.numel()
    found = first_difference(order, train.values, roll.values)
    if found is None:
        name, operand, place = "output", "", "outside the recorded operators"
    else:
        name, differ, total = found
        name, operand, edge = _edge(train.graph, name, report)
        place = f"at edge {edge} ({differ} of {total} elements of its value differ)"
    message = (
        f"log-probs differ by up to {largest:.3g} nats at {where} of {gap.numel()} "
        f"positions; values part first {place}"
    )
    difference = Difference(4, name, "values", None, None, message, operand=operand)
    return LevelResult(4, "failed", counts=counts), [difference]


def _edge(
    graph: PrecisionGraph, operator: str, report: ContainmentReport
) -> tuple[str, str, str]:
    """The first edge at which values part, given the first operator that differs.

    Everything before the operator is equal. If one of its operands is known to differ
    (another flow, other stored bytes), that edge is it; else the operator computes
    something else, and its first result edge is it.
    """
    operands = graph.operands[operator]
    for difference in report.differences:
        if difference.operator == operator and difference.operand in operands:
            edge = operands[difference.operand]
            return operator, difference.operand, f"{edge.source} -> {difference.name}"
    for edge in operands.values():
        if any(d.level == 3 and d.operator == edge.source for d in report.differences):
            return operator, edge.operand, f"{edge.source} -> {operator}.{edge.operand}"
    for edge in graph.edges:
        if edge.source == operator and graph.by_name[edge.target].phase == "forward":
            target = f"{edge.target}.{edge.operand}"
            return edge.target, edge.operand, f"{operator} -> {target}"
    return operator, "", f"{operator} -> output"
