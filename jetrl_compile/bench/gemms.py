"""Block-scaled GEMMs by provider and role, in TFLOP/s, against BF16 torch.mm."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl_compile.bench.kernels import ROTATE_BYTES
from jetrl_compile.bench.models import GemmSize
from jetrl_compile.bench.results import Row
from jetrl_compile.bench.timing import Clock, Timing, in_turns
from jetrl_compile.bench.ways import failure
from jetrl_compile.errors import RecipeError
from jetrl_compile.formats import Flow
from jetrl_compile.kernels import ops
from jetrl_compile.kernels.dispatch import PROVIDERS, ROLES, GemmShape
from jetrl_compile.recipe import get_recipe

BF16 = "torch.mm BF16"
TFLOPS, OVER_BF16 = "TFLOP/s", "over BF16"
TABLE = "GEMMs"
RECIPES = ("jetrl", "jetrl_paper")
OPERANDS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}


@dataclass(frozen=True)
class _Operands:
    """BF16 operands of one GEMM: out = a b^T."""

    a: Tensor
    b: Tensor


def measure_gemms(
    sizes: Sequence[GemmSize],
    tokens: Sequence[int],
    device: torch.device,
    rounds: int,
    say: Callable[[str], None],
    sample_ms: float = 5.0,
    recipes: Sequence[str] = RECIPES,
) -> list[Row]:
    """Return a row for each size, role, recipe and provider, and for all sizes.

    Roles that two recipes quantize alike are measured once, under the first recipe.

    Args:
        sizes: The GEMMs of a layer.
        tokens: Values of M. Only fprop is measured for fewer than 1024 tokens on a
            GPU: decoding has no backward.
        device: Where. On a GPU the provider "reference" is left out.
        rounds: Samples of each.
        say: Called with a line before each GEMM.
        sample_ms: How long a sample lasts at least.
        recipes: Their names.
    """
    torch.manual_seed(0)
    clock = Clock(device, run_ahead=True)
    on_gpu = device.type == "cuda"
    providers, rows = _usable(on_gpu)
    for m in tokens:
        for role in ROLES:
            if on_gpu and m < 1024 and role != "fprop":
                continue
            seen: dict[tuple[Flow, Flow], str] = {}
            for recipe in recipes:
                pair = operand_flows(recipe, role)
                if pair in seen:
                    continue
                seen[pair] = recipe
                made: list[Row] = []
                case = f"M={m}, recipe {recipe}"
                for size in sizes:
                    say(f"{role} {size.name} {case}")
                    made += _measure(
                        f"{role} {size.name} {case}",
                        size,
                        role,
                        m,
                        pair,
                        providers,
                        clock,
                        rounds,
                        sample_ms if on_gpu else 0.0,
                    )
                rows += [*made, *_total(f"{role} all {case}", made, sizes, m)]
    return rows


def _usable(on_gpu: bool) -> tuple[list[str], list[Row]]:
    """Return the names of providers to measure, and a row for each other one."""
    names, rows = [], []
    for provider in PROVIDERS.values():
        why = provider.usable()
        if on_gpu and provider.name == "reference":
            why = "too slow on a GPU to be measured"
        if why is None:
            names.append(provider.name)
        else:
            rows.append(
                Row("providers", provider.name, note=why, failed=True, table=TABLE)
            )
    return names, rows


def operand_flows(recipe: str, role: str) -> tuple[Flow, Flow]:
    """Return the flows of a and b of a role's GEMM, out = a b^T."""
    flows = get_recipe(recipe).flows
    if flows is None:
        raise RecipeError(f"recipe {recipe} has no FP8 to measure")
    a, b = (flows.flow(role, operand) for operand in OPERANDS[role])
    return a, b


def _measure(
    case: str,
    size: GemmSize,
    role: str,
    m: int,
    pair: tuple[Flow, Flow],
    providers: Sequence[str],
    clock: Clock,
    rounds: int,
    sample_ms: float,
) -> list[Row]:
    works: dict[str, Callable[[], object]] = {}
    problems: dict[str, str] = {}
    try:
        pairs = _operands(size, role, m, clock.device)
        works[BF16] = _bf16(pairs, role)
        quantized = [_quantized(operands, pair) for operands in pairs]
    except Exception as error:  # memory, or a kernel's compiler
        return [Row(case, BF16, note=failure(error), failed=True, table=TABLE)]
    shape = GemmShape(role, size.n, size.k, *pair, m=m, device_type=clock.device.type)
    for provider in PROVIDERS.values():
        if provider.name not in providers:
            continue
        why = provider.rejects(shape)
        if why is not None:
            problems[provider.name] = why
            continue
        work = _fp8(quantized, pair, provider.name)
        try:
            for _ in range(3):
                work()
            clock.synchronize()
        except Exception as error:  # a kernel's compiler raises whatever it likes
            problems[provider.name] = failure(error)
            continue
        works[provider.name] = work
    timings = in_turns(works, clock, rounds, sample_ms=sample_ms)
    flops = 2 * m * size.n * size.k
    rows = [
        Row(case, name, timing, _values(flops, timing, timings[BF16]), table=TABLE)
        for name, timing in timings.items()
    ]
    return rows + [
        Row(case, name, note=why, failed=True, table=TABLE)
        for name, why in problems.items()
    ]


def _values(flops: int, timing: Timing, base: Timing) -> dict[str, float]:
    values = {TFLOPS: flops / timing.median / 1e9}
    if timing is not base:
        values[OVER_BF16] = base.median / timing.median
    return values


def _total(case: str, rows: list[Row], sizes: Sequence[GemmSize], m: int) -> list[Row]:
    """Return rows of all sizes together, for the ways that ran each of them."""
    flops = sum(2 * m * size.n * size.k for size in sizes)
    names = list(dict.fromkeys(row.way for row in rows))
    totals: dict[str, Timing] = {}
    for name in names:
        found = [row.timing for row in rows if row.way == name and row.timing]
        if len(found) == len(sizes):
            totals[name] = Timing(
                sum(t.median for t in found),
                sum(t.low for t in found),
                sum(t.high for t in found),
                max(t.spread for t in found),
                min(t.samples for t in found),
            )
    if BF16 not in totals:
        return []
    return [
        Row(case, name, timing, _values(flops, timing, totals[BF16]), table=TABLE)
        for name, timing in totals.items()
    ]


def _operands(
    size: GemmSize, role: str, m: int, device: torch.device
) -> list[_Operands]:
    """Return BF16 operands, several where a few would stay in the GPU's L2."""
    rows_a, rows_b, inner = {
        "fprop": (m, size.n, size.k),
        "dgrad": (m, size.k, size.n),
        "wgrad": (size.n, size.k, m),
    }[role]
    once = (rows_a + rows_b) * inner  # bytes of the FP8 operands
    count = 1
    if device.type == "cuda":
        count = max(2, min(32, -(-ROTATE_BYTES // once)))

    def random(rows: int) -> Tensor:
        return torch.randn((rows, inner), device=device, dtype=torch.bfloat16)

    return [_Operands(random(rows_a), random(rows_b)) for _ in range(count)]


def _bf16(pairs: Sequence[_Operands], role: str) -> Callable[[], object]:
    """Return a call of torch.mm on tensors that lie in memory as in training.

    fprop reads x and w as they are (NT), dgrad dy and w (NN), wgrad dy^T and x, both
    transposed views (TN).
    """
    layouts = {
        "fprop": lambda p: (p.a, p.b.t()),
        "dgrad": lambda p: (p.a, p.b.t().contiguous()),
        "wgrad": lambda p: (p.a.t().contiguous().t(), p.b.t().contiguous()),
    }
    ready = deque(layouts[role](pair) for pair in pairs)

    def work() -> None:
        ready.rotate()
        torch.mm(*ready[0])

    for _ in range(3):
        work()
    return work


def _quantized(operands: _Operands, pair: tuple[Flow, Flow]) -> tuple[Tensor, ...]:
    made: list[Tensor] = []
    for tensor, flow in zip((operands.a, operands.b), pair, strict=True):
        region = flow.granularity
        assert region is not None, "operands of recipes are quantized"
        made += ops.quantize(
            tensor,
            region.rows,
            region.cols,
            False,
            flow.scale_format,
            flow.amax_floor,
            None,
        )
    return tuple(made)


def _fp8(
    quantized: Sequence[tuple[Tensor, ...]], pair: tuple[Flow, Flow], provider: str
) -> Callable[[], object]:
    regions: list[int] = []
    for flow in pair:
        assert flow.granularity is not None, "operands of recipes are quantized"
        regions += [flow.granularity.rows, flow.granularity.cols]
    ready = deque(quantized)

    def work() -> None:
        ready.rotate()
        ops.gemm(*ready[0], *regions, torch.bfloat16, provider)

    return work
