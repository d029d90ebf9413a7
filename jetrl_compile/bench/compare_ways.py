"""Run one model in several ways, in turns, and tell times and memory."""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_compile.bench.cuda_graphs import GRAPHS, Captured, capture, marked
from jetrl_compile.bench.memory import (
    GIB,
    driver_allocations,
    held_bytes,
    peak_bytes,
)
from jetrl_compile.bench.models import fitting
from jetrl_compile.bench.profiling import attention_kernels, write_profile
from jetrl_compile.bench.results import PEAK, Row, compare
from jetrl_compile.bench.steps import FORWARD, TRAIN, Shape, Steps
from jetrl_compile.bench.timing import Clock, in_turns
from jetrl_compile.bench.ways import (
    COMPILE,
    EAGER,
    JETRL,
    TORCHAO,
    Way,
    WaySpec,
    dynamo_for_many_ways,
    failure,
    graphs_compiled,
)
from jetrl_compile.errors import ModelError, ProviderError
from jetrl_compile.pipeline import CompileReport
from jetrl_compile.report_sink import collect_reports

BASELINES = (EAGER, COMPILE, TORCHAO)
MakeSteps = Callable[[Any, Shape, torch.device], Steps]


@dataclass(frozen=True)
class Plan:
    """How ways are compared.

    Attributes:
        device: Where.
        shapes: Of the tokens.
        rounds: Samples of each way.
        sample_ms: How long a sample lasts at least; 0: one step.
        run_ahead: As of `Clock`.
        forward_only: Whether the backward pass is left out.
        graphs: "none", "inductor" (compiled layers run under Inductor's CUDA graphs) or
            "step" (each step of each way is one CUDA graph).
        profile: Where to write a profile of `profile_way` at the first shape, or None.
        profile_way: Its name.
        say: Called with a line before each part.
    """

    device: torch.device
    shapes: tuple[Shape, ...]
    rounds: int = 7
    sample_ms: float = 0.0
    run_ahead: bool = False
    forward_only: bool = False
    graphs: str = "none"
    profile: str | None = None
    profile_way: str = "jetrl"
    say: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        """Check the mode of CUDA graphs."""
        if self.graphs not in GRAPHS:
            raise ProviderError(
                f"the mode of CUDA graphs {self.graphs!r} is unknown; use one of "
                f"{', '.join(GRAPHS)}"
            )
        if self.graphs != "none" and self.device.type != "cuda":
            raise ProviderError("CUDA graphs need a GPU; leave out --graphs")


@dataclass
class _Runner:
    """A way and what is known of it."""

    spec: WaySpec
    way: Way | None = None
    problem: str = ""
    own_bytes: int = 0
    graphs: int = 0
    attention: str = ""
    reports: list[CompileReport] = field(default_factory=list)
    peak: int | None = None
    same_bits: dict[str, bool] = field(default_factory=dict)
    captured: Captured | None = None


def compare_ways(
    model: nn.Module, specs: Sequence[WaySpec], make_steps: MakeSteps, plan: Plan
) -> list[Row]:
    """Return a row for each step, shape and way; a way that fails has its reason.

    Args:
        model: The one model; left as it was.
        specs: The ways.
        make_steps: Of a shape: what is timed.
        plan: How.
    """
    rows: list[Row] = []
    with dynamo_for_many_ways():
        runners = [_Runner(spec) for spec in specs]
        for index, shape in enumerate(plan.shapes):
            try:
                with fitting(f"{shape} tokens", plan.device, "give a smaller --shape"):
                    steps = make_steps(model, shape, plan.device)
            except ModelError as error:
                if not rows:
                    raise
                rows += _not_made(runners, shape, plan, error)
                continue
            for runner in runners:
                plan.say(f"{runner.spec.name}, {shape}: compiling and warming up")
                _warm_up(runner, runners, model, steps, plan)
            if plan.graphs == "step":
                for runner in runners:
                    plan.say(f"{runner.spec.name}, {shape}: capturing CUDA graphs")
                    _capture(runner, steps, plan)
            if plan.profile and index == 0:
                _profile(runners, steps, plan)
            rows += _time(runners, steps, shape, plan)
            for runner in runners:
                runner.captured = None  # its memory is needed for the next shape
    return compare(rows, BASELINES, {s.name: (JETRL,) for s in specs if s.is_exact})


def _not_made(
    runners: Sequence[_Runner], shape: Shape, plan: Plan, error: ModelError
) -> list[Row]:
    """Return the rows of a shape that cannot be measured; others were."""
    steps = (FORWARD,) if plan.forward_only else (FORWARD, TRAIN)
    return [
        Row(f"{step} {shape}", runner.spec.name, note=str(error), failed=True)
        for step in steps
        for runner in runners
    ]


@contextlib.contextmanager
def _on(runner: _Runner) -> Iterator[None]:
    assert runner.way is not None
    with runner.way.active():
        yield


def _warm_up(
    runner: _Runner,
    runners: Sequence[_Runner],
    model: nn.Module,
    steps: Steps,
    plan: Plan,
) -> None:
    """Compile a way for a shape, run it, and measure its memory."""
    if runner.problem:
        return
    before, compiled = _held(plan.device), graphs_compiled()
    with collect_reports() as reports:
        _try_to_warm_up(runner, runners, model, steps, plan, before)
    runner.reports += reports
    runner.graphs += graphs_compiled() - compiled
    is_compiled = runner.way is not None and runner.way.is_compiled
    if is_compiled and not runner.graphs and not runner.problem:
        runner.problem = "Dynamo compiled nothing, so the layers ran eagerly"


def _try_to_warm_up(
    runner: _Runner,
    runners: Sequence[_Runner],
    model: nn.Module,
    steps: Steps,
    plan: Plan,
    before: int,
) -> None:
    try:
        if runner.way is None:
            runner.way = Way(runner.spec, model, graphs=plan.graphs == "inductor")
        while True:
            try:
                _run_twice(runner, steps, plan)
                break
            except Exception as error:
                if not runner.way.relax(failure(error)):
                    raise
        steps.drop()
        runner.own_bytes += max(0, _held(plan.device) - before)
        others = sum(other.own_bytes for other in runners if other is not runner)
        if not plan.forward_only:
            with _on(runner):
                found = peak_bytes(steps.train, plan.device)
            runner.peak = None if found is None else found - others
    except Exception as error:
        runner.problem = failure(error)
    finally:
        steps.drop()


def _run_twice(runner: _Runner, steps: Steps, plan: Plan) -> None:
    """Run each step often enough to compile and record it; see which attention runs."""
    for name, work in steps.named(plan.forward_only).items():
        with _on(runner):
            first = marked(work)().clone()
            if name == FORWARD:
                kernels, again = attention_kernels(marked(work))
                runner.attention = f"attention {kernels or 'unknown'}"
            again = marked(work)()
            runner.same_bits[name] = torch.equal(first, again)
            del first, again


def _capture(runner: _Runner, steps: Steps, plan: Plan) -> None:
    """Capture a way's steps, after all ways are warmed up: captures share memory."""
    if runner.spec.is_exact and not runner.problem:
        runner.problem = (
            "not captured as a CUDA graph: exact attention finds the sequences of a "
            "batch on the CPU"
        )
    if runner.problem:
        return
    try:
        with _on(runner):
            runner.captured = capture(steps, plan.forward_only)
    except Exception as error:
        runner.problem = f"not captured as a CUDA graph: {failure(error)}"
    finally:
        steps.drop()


def _held(device: torch.device) -> int:
    gc.collect()
    return held_bytes(device)


def _time(
    runners: Sequence[_Runner], steps: Steps, shape: Shape, plan: Plan
) -> list[Row]:
    """Time every way that works, in turns."""
    clock = Clock(plan.device, run_ahead=plan.run_ahead)
    usable = {runner.spec.name: runner for runner in runners if not runner.problem}
    rows: list[Row] = []
    for step in steps.named(plan.forward_only):
        case = f"{step} {shape}"
        plan.say(f"{case}: timing {', '.join(usable)}")
        works = {name: _work(runner, steps, step) for name, runner in usable.items()}
        on: list[Way] = []

        def switch(name: str, on: list[Way] = on) -> None:
            while on:
                on.pop().switch_off()
            way = usable[name].way
            assert way is not None
            way.switch_on()
            on.append(way)

        asked = driver_allocations(plan.device)
        host: dict[str, float] = {}
        try:
            timings = in_turns(
                works, clock, plan.rounds, sample_ms=plan.sample_ms, before=switch
            )
            asked = driver_allocations(plan.device) - asked
            for name, work in works.items():
                switch(name)
                clock.synchronize()
                host[name] = clock.queue_ms(work, 1)
                clock.synchronize()
        finally:
            while on:
                on.pop().switch_off()
            steps.drop()
        for runner in runners:
            row = Row(case, runner.spec.name, note=runner.problem, failed=True)
            if not runner.problem:
                row = replace(
                    row, timing=timings[runner.spec.name], failed=False, note=""
                )
                row = _described(row, runner, step)
                if plan.device.type == "cuda":
                    row = _on_gpu(row, host[runner.spec.name], asked)
            rows.append(row)
    return rows


def _on_gpu(row: Row, host_ms: float, asked: int) -> Row:
    """Add what tells whether the GPU waited: for the host, or for memory."""
    note = row.note
    if asked:
        note += f"; the allocator asked the driver {asked} times while ways were timed"
    return replace(row, values={**row.values, "host ms": host_ms}, note=note)


def _work(runner: _Runner, steps: Steps, step: str) -> Callable[[], Tensor]:
    if runner.captured is not None:
        return runner.captured.replay[step]
    return marked(steps.named()[step])


def _described(row: Row, runner: _Runner, step: str) -> Row:
    assert runner.way is not None
    values: dict[str, float] = {}
    if step == TRAIN and runner.peak is not None:
        values[PEAK] = runner.peak / GIB
    if runner.way.is_compiled:
        values["graphs"] = runner.graphs
    lowered = fp8_note(runner.reports)
    notes = [note for note in (runner.way.note, lowered, runner.attention) if note]
    same = runner.same_bits[step]
    if runner.captured is not None:
        same = same and runner.captured.same_bits[step]
    notes.append("same bits again" if same else "other bits when run again")
    return replace(row, values=values, note="; ".join(notes))


def fp8_note(reports: Sequence[CompileReport]) -> str:
    """Return how many GEMMs are FP8, by whom they run, and what was not fused."""
    counts: dict[str, None] = {}
    providers: dict[str, None] = {}
    left: dict[str, None] = {}
    for report in reports:
        if not report.graph.gemms():  # exact mode compiles more than layers
            continue
        roles = report.lowered if report.training else ("fprop",)
        numbers = ", ".join(f"{report.lowered[role]} {role}" for role in roles)
        counts[f"{'training' if report.training else 'inference'} {numbers}"] = None
        fp8 = [op for op in report.graph.gemms() if report.graph.is_fp8(op)]
        providers |= {str(op.provider): None for op in fp8}
        left |= dict.fromkeys(report.notes)
    if not counts:
        return ""
    text = f"FP8 GEMMs of a layer: {', '.join(counts)}, by {'+'.join(providers)}"
    return "; ".join([text, *left])


def _profile(runners: Sequence[_Runner], steps: Steps, plan: Plan) -> None:
    for runner in runners:
        if runner.spec.name == plan.profile_way and not runner.problem:
            plan.say(f"profiling {runner.spec.name}")
            works = {
                name: marked(work)
                for name, work in steps.named(plan.forward_only).items()
            }
            assert plan.profile is not None
            with _on(runner):
                write_profile(works, plan.profile, title=runner.spec.name)
            steps.drop()
            return
    why = [r.problem for r in runners if r.spec.name == plan.profile_way]
    reason = f" ({why[0]})" if why else ""
    raise ProviderError(
        f"there is no usable way {plan.profile_way!r} to profile{reason}; choose one "
        "with --profile-way"
    )
