"""Compile DeepGEMM's kernels before the first real call, several at once.

DeepGEMM compiles a kernel with nvcc at its first use, which takes 5 to 14 seconds and
cannot happen while a CUDA graph is captured. Which kernel a GEMM needs follows from all
its sizes, the number of tokens included (`deep_gemm_tiles.py`); one GEMM for each is
run on memory of its size, by worker processes that each have a CUDA context of their
own (about 0.5 GiB of GPU memory, and the GEMM's operands). What is compiled stays in a
folder, the variable `DG_JIT_CACHE_DIR`, else ~/.deep_gemm, for later processes with the
same DeepGEMM, at the same path, and the same nvcc. Of several processes that warm up
one folder, ranks say, one compiles and the others wait, and find it done.
"""

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from jetrl_compile.errors import ProviderError, one_line
from jetrl_compile.kernels.deep_gemm_cache import (
    CACHE_VARIABLE,
    add_token_counts,
    add_warmed_up,
    cache_dir,
    kernels,
    locked,
    token_counts,
    warmed_up,
)
from jetrl_compile.kernels.deep_gemm_tiles import H200_SMS, Kernel, kernel_for
from jetrl_compile.kernels.exact_kernels import bf16_gemm
from jetrl_compile.kernels.layouts import align, empty_quantized
from jetrl_compile.kernels.provider import GemmShape
from jetrl_compile.kernels.provider_deep_gemm import (
    COLUMNS_1D1D,
    DEEP_GEMM,
    decodes,
    nvcc,
)

MAX_WORKERS = 16
WORKER_BYTES = 1 << 30
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, order=True)
class Call:
    """One GEMM, as DeepGEMM sees it.

    Attributes:
        m: Rows of `a`.
        n: Rows of `b`.
        k: The contraction.
        b_rows: Rows of a region of `b`: 1 or 128.
        out_dtype: Short name of the result's dtype.
        over_tokens: Whether the contraction is over tokens.
        quantized: Whether operands are FP8; else BF16, as exact mode's output head.
    """

    m: int
    n: int
    k: int
    b_rows: int = 128
    out_dtype: str = "bf16"
    over_tokens: bool = False
    quantized: bool = True

    def __str__(self) -> str:
        if not self.quantized:
            return f"{self.m}x{self.n}x{self.k}, bf16"
        return f"{self.m}x{self.n}x{self.k}, b by {self.b_rows}x128, {self.out_dtype}"

    def kernel(self, sms: int) -> "tuple[Kernel | Call, int]":
        """Return the kernel that it needs, or itself where none is foreseen.

        With it comes the contraction that is compiled in, or 0.
        """
        if not self.quantized:
            return self, 0
        by_groups = self.b_rows == 1 or self.out_dtype == "fp32"
        k = align(self.k, COLUMNS_1D1D) if by_groups else self.k
        found = kernel_for(self.m, self.n, k, by_groups, sms) or self
        free = self.over_tokens and self.k not in token_counts()
        return found, 0 if free else k

    def operand_bytes(self) -> int:
        """Return the memory of its operands and its result, scales aside."""
        wide = 4 if self.out_dtype == "fp32" else 2
        read = self.k * (self.m + self.n) * (1 if self.quantized else 2)
        return read + self.m * self.n * wide

    def key(self) -> str:
        """Return what tells its kernel from others, in the list of those compiled."""
        return f"{self}, over {'tokens' if self.over_tokens else 'features'}, " + str(
            self.kernel(_sms())
        )

    def run(self) -> None:
        """Run it on uninitialized memory of the current GPU and wait for it."""
        device = torch.device("cuda")
        if not self.quantized:
            sizes = ((self.m, self.k), (self.n, self.k))
            x, w = (
                torch.empty(size, dtype=torch.bfloat16, device=device) for size in sizes
            )
            bf16_gemm(x, w, "deep_gemm")
            torch.cuda.synchronize()
            return
        turned = self.over_tokens
        a = empty_quantized((self.m, self.k), 1, 128, device, turned)
        b = empty_quantized((self.n, self.k), self.b_rows, 128, device, turned)
        dtype = _DTYPES[self.out_dtype]
        DEEP_GEMM.gemm(*a, *b, 1, 128, self.b_rows, 128, dtype)
        torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What a warm-up did.

    Attributes:
        calls: How many kernels were foreseen; for each one a GEMM is run, unless it
            was in an earlier warm-up with this folder.
        compiled: How many kernels are new in the cache folder.
        cached: How many kernels it held before.
        rejected: GEMMs that DeepGEMM does not run, each with the reason.
        failed: GEMMs that raised, each with the message.
        seconds: How long it took.
        cache_dir: The folder.
    """

    calls: int
    compiled: int
    cached: int
    rejected: tuple[tuple[str, str], ...]
    failed: tuple[tuple[str, str], ...]
    seconds: float
    cache_dir: Path


def calls_of(
    shapes: Iterable[GemmShape], heads: Iterable[tuple[int, int, int]] = ()
) -> tuple[list[Call], tuple[tuple[str, str], ...]]:
    """Return a DeepGEMM call for each kernel that GEMMs need, the smallest that does.

    Args:
        shapes: The FP8 GEMMs.
        heads: M, N and K of the BF16 GEMMs of exact mode; each has its call.

    Returns:
        The calls, and the GEMMs that DeepGEMM does not run, each with the reason.

    Raises:
        ProviderError: A GEMM's number of tokens, N or K is not known.
    """
    calls: set[Call] = set()
    rejected: dict[str, str] = {}
    for shape in shapes:
        m, n, k = shape.sizes
        if m is None or n is None or k is None or min(m, n, k) < 0:
            raise ProviderError(
                f"a kernel cannot be compiled for {shape}: a size is not known; give "
                "the number of tokens"
            )
        why = DEEP_GEMM.rejects(shape)
        if why is not None:
            rejected[str(shape)] = why
        elif min(m, n, k) > 0:
            assert shape.b.granularity is not None
            over_tokens = shape.role == "wgrad"
            rows = shape.b.granularity.rows
            if rows == 128 and shape.out_dtype == "bf16" and decodes(m, n, k):
                continue  # another kernel than DeepGEMM's
            calls.add(Call(m, n, k, rows, shape.out_dtype, over_tokens))
    sms, by_kernel = _sms(), dict[tuple[Kernel | Call, int], Call]()
    for call in sorted(calls):
        by_kernel.setdefault(call.kernel(sms), call)
    found = list(by_kernel.values())
    found += [Call(*sizes, quantized=False) for sizes in sorted(set(heads))]
    return found, tuple(rejected.items())


def _sms() -> int:
    if not torch.cuda.is_available():
        return H200_SMS
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(properties.multi_processor_count)


def warm_up(
    shapes: Iterable[GemmShape],
    *,
    jobs: int | None = None,
    into: Path | None = None,
    progress: Progress | None = None,
    exact_tokens: Iterable[int] = (),
    heads: Iterable[tuple[int, int, int]] = (),
) -> WarmUp:
    """Compile what DeepGEMM needs for GEMMs.

    Args:
        shapes: The GEMMs, with their number of tokens and device type "cuda".
        jobs: Worker processes; default: one a CPU core, at most 16, and no more than
            free GPU memory holds: a GiB each, and the operands of the largest call.
            0: none, the calls are made one after the other in this process.
        into: The cache folder; default: `cache_dir()`. The variable is set for this
            process too.
        progress: Called with the calls done, all calls, and the last one, or what it
            waits for.
        exact_tokens: Numbers of tokens for which wgrad has kernels of its own, which
            are a few percent faster; for other numbers one kernel serves all.
        heads: M, N and K of the BF16 GEMMs of exact mode.

    Raises:
        ProviderError: DeepGEMM cannot run here, a size is not known, or DeepGEMM has
            already been told another folder in this process.
    """
    start = time.perf_counter()
    why = DEEP_GEMM.usable()
    if why is not None:
        calls_of(shapes)  # what is wrong with them comes first
        raise ProviderError(
            f"deep_gemm cannot be warmed up: {why}; it needs a Hopper GPU, nvcc and "
            "pip install 'jetrl-compile[hopper]'"
        )
    if into is not None:
        _use_folder(into.expanduser().absolute())
    show = progress or (lambda *_: None)
    told = f"waiting for another process that warms up {cache_dir()}"
    add_token_counts(exact_tokens, lambda: show(0, 0, told))
    calls, rejected = calls_of(shapes, heads)
    before, identity = kernels(), _identity()
    failed: list[tuple[str, str]] = []
    if _missing(calls, identity):
        with locked(lambda: show(0, len(calls), told)):
            missing = _missing(calls, identity)  # less, where another compiled some
            failed = _run(missing, jobs, show)
            names = {name for name, _ in failed}
            ran = [call.key() for call in missing if str(call) not in names]
            if ran:
                add_warmed_up(identity, ran)
    return WarmUp(
        len(calls),
        len(kernels() - before),
        len(before),
        rejected,
        tuple(failed),
        time.perf_counter() - start,
        cache_dir(),
    )


def _use_folder(folder: Path) -> None:
    if "deep_gemm" in sys.modules and folder != cache_dir().absolute():
        raise ProviderError(
            f"deep_gemm is imported and keeps its kernels in {cache_dir()}, not in "
            f"{folder}; set {CACHE_VARIABLE} before the process starts"
        )
    os.environ[CACHE_VARIABLE] = str(folder)
    token_counts.cache_clear()


def _identity() -> tuple[object, ...]:
    """Return what kernels depend on beside their calls."""
    found = importlib.util.find_spec("deep_gemm")
    sizes: dict[str, int] = {}
    if found is not None and found.origin:
        files = sorted(Path(found.origin).parent.glob("*"))
        sizes = {str(path): path.stat().st_size for path in files if path.is_file()}
    return (sizes, nvcc(), _sms())


def _missing(calls: Sequence[Call], identity: tuple[object, ...]) -> list[Call]:
    known = warmed_up(identity)
    return [call for call in calls if call.key() not in known]


def _workers(calls: Sequence[Call]) -> int:
    """Return how many processes the cores and the GPU's free memory allow for.

    Each may run the largest call while the others do.
    """
    cores = min(MAX_WORKERS, os.cpu_count() or 1)
    if not torch.cuda.is_available():
        return cores
    free, _ = torch.cuda.mem_get_info()
    largest = max((call.operand_bytes() for call in calls), default=0)
    return max(min(cores, free // (WORKER_BYTES + largest)), 1)


def _run(
    calls: Sequence[Call], jobs: int | None, progress: Progress
) -> list[tuple[str, str]]:
    workers = _workers(calls) if jobs is None else jobs
    failed: list[tuple[str, str]] = []
    if workers < 1 or not calls:
        for done, call in enumerate(calls, 1):
            failed += _try(call)
            progress(done, len(calls), str(call))
        return failed
    # Spawned, since a process that has a CUDA context cannot be forked.
    with ProcessPoolExecutor(
        min(workers, max(len(calls), 1)), mp_context=get_context("spawn")
    ) as pool:
        pending = {pool.submit(_try, call): call for call in calls}
        for done, future in enumerate(as_completed(pending), 1):
            call = pending[future]
            try:
                failed += future.result()
            except Exception as error:  # a worker died: of memory, say
                failed.append((str(call), one_line(error)))
            progress(done, len(calls), str(call))
    return failed


def _try(call: Call) -> list[tuple[str, str]]:
    """Run a call; return it with the message if it raised."""
    try:
        call.run()
    except Exception as error:  # DeepGEMM raises RuntimeError for all it asserts
        return [(str(call), one_line(error))]
    finally:
        torch.cuda.empty_cache()
    return []
