"""Quantize and fused kernels, in bytes moved a second, against a copy on the device.

Bytes are those that must be moved: each argument read once, each result written once. A
kernel that reads something twice gets no credit for it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetrl_compile.bench.results import Row
from jetrl_compile.bench.timing import Clock, in_turns
from jetrl_compile.bench.ways import failure
from jetrl_compile.formats import AMAX_FLOOR
from jetrl_compile.kernels import fused_ops, ops

COPY = "copy"
OF_COPY, GB_PER_S = "of copy", "GB/s"
TABLE = "quantize and fused kernels"
COPY_BYTES = 2**30  # read; as many are written
# Buffers are taken in turn, so that the 50 MB of a Hopper GPU's L2 hold none of them.
ROTATE_BYTES = 2**28
CALLS = 8  # of one CUDA graph
GROUP, BLOCK = (1, 128), (128, 128)
NO_TRANSPOSE = (-1, 0)
_QUANTIZER = ("fp32", AMAX_FLOOR)
# Linked so that `torch.ops.jetrl` has them.
_DEFINED = (ops, fused_ops)


@dataclass(frozen=True)
class Kernel:
    """A call of an operator.

    Attributes:
        op: Its name in `torch.ops.jetrl`.
        what: What it is called for.
        inputs: Makes the tensors from rows, columns and a device: random.
        call: Calls the operator with them.
    """

    op: str
    what: str
    inputs: Callable[[int, int, torch.device], list[Tensor]]
    call: Callable[[Any, list[Tensor]], Any]


def _random(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def _matrix(rows: int, cols: int, device: torch.device) -> list[Tensor]:
    return [_random(rows, cols, device=device)]


def _two_parts(rows: int, cols: int, device: torch.device) -> list[Tensor]:
    half = max(128, cols // 2 // 128 * 128)
    if half >= cols:
        return _matrix(rows, cols, device)
    sizes = (half, cols - half)
    return [_random(rows, size, device=device) for size in sizes]


def _codes(rows: int, cols: int, device: torch.device) -> list[Tensor]:
    x = _random(rows, cols, device=device)
    return [*ops.quantize(x, *GROUP, False, *_QUANTIZER, None)]


def _norm(rows: int, cols: int, device: torch.device) -> list[Tensor]:
    x, residual = (_random(rows, cols, device=device) for _ in range(2))
    return [x, residual, _random(cols, device=device)]


def _scaled(rows: int, cols: int, device: torch.device) -> list[Tensor]:
    rstd = torch.rand(rows, 1, device=device) + 0.5
    return [_random(rows, cols, device=device), rstd, _random(cols, device=device)]


def _gate_up(rows: int, cols: int, device: torch.device) -> list[Tensor]:
    both = _random(rows, 2 * cols, device=device)
    return [both[:, :cols], both[:, cols:]]


def _dy_gate_up(rows: int, cols: int, device: torch.device) -> list[Tensor]:
    return [_random(rows, cols, device=device), *_gate_up(rows, cols, device)]


def _quantize(
    rows: int, cols: int, transpose: bool
) -> Callable[[Any, list[Tensor]], Any]:
    return lambda op, t: op(t[0], rows, cols, transpose, *_QUANTIZER, None)


KERNELS: tuple[Kernel, ...] = (
    Kernel("quantize", "1x128", _matrix, _quantize(*GROUP, False)),
    Kernel("quantize", "1x128 of x^T", _matrix, _quantize(*GROUP, True)),
    Kernel("quantize", "128x128", _matrix, _quantize(*BLOCK, False)),
    Kernel("quantize", "128x128 of x^T", _matrix, _quantize(*BLOCK, True)),
    Kernel(
        "quantize_parts",
        "1x128 of two parts",
        _two_parts,
        lambda op, t: op(t, 1, *GROUP, False, *_QUANTIZER, None),
    ),
    Kernel(
        "quantize_twice",
        "1x128, 1x128 of x^T",
        _matrix,
        lambda op, t: op(t, 0, *GROUP, *GROUP, *_QUANTIZER),
    ),
    Kernel(
        "quantize_twice",
        "1x128, 128x128 of x^T",
        _matrix,
        lambda op, t: op(t, 0, *GROUP, *BLOCK, *_QUANTIZER),
    ),
    Kernel(
        "requantize",
        "1x128 to 1x128 of x^T",
        _codes,
        lambda op, t: op(*t, *GROUP, *GROUP, True, *_QUANTIZER, None),
    ),
    Kernel(
        "rms_norm_quantize",
        "add, norm, 1x128",
        _norm,
        lambda op, t: op(*t, 1e-6, None, *GROUP, *NO_TRANSPOSE, *_QUANTIZER),
    ),
    Kernel(
        "scale_rows_quantize",
        "128x128 of y^T",
        _scaled,
        lambda op, t: op(*t, *BLOCK, True, *_QUANTIZER, None),
    ),
    Kernel(
        "silu_mul_quantize",
        "1x128",
        _gate_up,
        lambda op, t: op(*t, *GROUP, *NO_TRANSPOSE, *_QUANTIZER),
    ),
    Kernel(
        "silu_mul_quantize",
        "1x128, 128x128 of y^T",
        _gate_up,
        lambda op, t: op(*t, *GROUP, *BLOCK, *_QUANTIZER),
    ),
    Kernel(
        "silu_mul_backward_quantize",
        "1x128, 1x128 of dy^T, 128x128 of y^T",
        _dy_gate_up,
        lambda op, t: op(*t, None, None, *GROUP, *GROUP, *BLOCK, *_QUANTIZER),
    ),
)


def measure_kernels(
    shapes: Sequence[tuple[int, int]],
    device: torch.device,
    rounds: int,
    say: Callable[[str], None],
    sample_ms: float = 5.0,
) -> list[Row]:
    """Return a row for each kernel and shape, and one for the copy.

    Args:
        shapes: Rows (tokens) and columns of the matrix that is quantized.
        device: Where.
        rounds: Samples of each.
        say: Called with a line before each shape.
        sample_ms: How long a sample lasts at least.
    """
    torch.manual_seed(0)
    rows: list[Row] = []
    for m, cols in shapes:
        say(f"{m}x{cols}: quantize and fused kernels against a copy")
        rows += _measure(m, cols, Clock(device, run_ahead=True), rounds, sample_ms)
    return rows


def _measure(m: int, cols: int, clock: Clock, rounds: int, ms: float) -> list[Row]:
    device = clock.device
    works: dict[str, Callable[[], object]] = {}
    moved: dict[str, int] = {}
    problems: dict[str, str] = {}
    on_gpu = device.type == "cuda"
    size = COPY_BYTES if on_gpu else min(2 * m * cols, COPY_BYTES)
    works[COPY], moved[COPY] = _copy(size, device)
    for kernel in KERNELS:
        name = f"{kernel.op}: {kernel.what}"
        try:
            works[name], moved[name] = _rotating(kernel, m, cols, device)
        except Exception as error:  # a kernel's compiler raises whatever it likes
            problems[name] = failure(error)
    notes: dict[str, str] = {}
    if on_gpu:
        for name, work in works.items():
            if name != COPY:
                works[name], notes[name] = _replayed(work)
    timings = in_turns(works, clock, rounds, sample_ms=ms if on_gpu else 0.0)
    for name in works:
        if name != COPY and on_gpu and not notes[name]:
            timings[name] = timings[name].divided(CALLS)
    rates = {name: moved[name] / timings[name].median / 1e6 for name in works}
    rows = []
    for name in (COPY, *(f"{kernel.op}: {kernel.what}" for kernel in KERNELS)):
        case = f"{m}x{cols}"
        if name in problems:
            rows.append(Row(case, name, note=problems[name], failed=True, table=TABLE))
            continue
        values = {GB_PER_S: rates[name]}
        if name != COPY:
            values[OF_COPY] = rates[name] / rates[COPY]
        note = notes.get(name, "")
        if name == COPY:
            note = f"{moved[COPY] / 2**20:.0f} MiB, half of it read"
        rows.append(Row(case, name, timings[name], values, note, table=TABLE))
    return rows


def _replayed(work: Callable[[], object]) -> tuple[Callable[[], object], str]:
    """Return a replay of some calls as one CUDA graph: it has no launches between.

    Returns:
        The replay and "", or the work itself and why it could not be captured.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                work()
    except Exception as error:
        return work, f"launched one by one: {failure(error)}"

    def replay(work: Callable[[], object] = work) -> None:
        graph.replay()  # reads the buffers that `work` holds

    return replay, ""


def _copy(size: int, device: torch.device) -> tuple[Callable[[], object], int]:
    source = torch.randn(size // 2, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * source.nbytes


def _rotating(
    kernel: Kernel, m: int, cols: int, device: torch.device
) -> tuple[Callable[[], object], int]:
    """Return a call that takes other buffers each time, and the bytes that it moves."""
    op = getattr(torch.ops.jetrl, kernel.op)
    first = kernel.inputs(m, cols, device)
    read = sum(t.numel() * t.element_size() for t in first)
    results = kernel.call(op, first)
    written = sum(t.numel() * t.element_size() for t in results)
    count = -(-ROTATE_BYTES // max(read, 1)) if device.type == "cuda" else 1
    count = max(1, min(count, 64))
    inputs = deque([first, *(kernel.inputs(m, cols, device) for _ in range(count - 1))])
    kept: deque[Any] = deque(maxlen=max(1, min(16, ROTATE_BYTES // max(written, 1))))

    def work() -> None:
        inputs.rotate()
        kept.append(kernel.call(op, inputs[0]))

    for _ in range(3):
        work()
    return work, read + written
