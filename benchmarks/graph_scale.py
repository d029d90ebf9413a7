"""Build, check, write and read back graphs of 100,000 operators; print the cost.

    python benchmarks/graph_scale.py [--operators 100000] [--json]

What is built: a Dynamo-level graph as vLLM has it (fused layers, opaque operators, one
in-place attention a layer), at a quarter, a half and all of the size, and checked
against the graph of another engine that runs the same model.

Exit status 1 if a check, or build and check of the whole size, take more than 5 seconds
of one core, or the process more than 2 GiB.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from jetrl_compile.containment import check_containment, group_differences
from jetrl_compile.formats import Flow, blocks, groups
from jetrl_compile.graph_builder import build_precision_graph
from jetrl_compile.graph_json import read_graph, write_graph
from jetrl_compile.precision_graph import Edge, Operator, PrecisionGraph, make_graph
from jetrl_compile.report import FORMATS, render

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from vllm_description import Engine, describe_engine

MAX_SECONDS = 5.0
MAX_GIB = 2.0
T = TypeVar("T")


def chain_graph(operators: int, *, scale_format: str = "fp32") -> PrecisionGraph:
    """Return a chain of layers: each a norm, a GEMM, a residual add and two weights."""
    ops = [Operator("input.0", "input", compute_dtype="bf16")]
    edges: list[Edge] = []
    hidden, bf16 = "input.0", Flow("bf16")
    x, w = groups("K", scale_format), blocks("K", scale_format)
    for index in range(operators // 5):
        base = f"model.layers.{index // 100}.mlp.experts.{index % 100}"
        norm, gemm, add = f"{base}.norm", f"{base}.down_proj", f"{base}:residual_add"
        ops += [
            Operator(f"{norm}.weight", "parameter", norm),
            Operator(f"{norm}:norm", "norm", norm, (("eps", 1e-6),), "fp32", "aten"),
            Operator(f"{gemm}.weight", "parameter", gemm),
            Operator(
                f"{gemm}:fprop",
                "gemm",
                gemm,
                (("K", 4096), ("N", 4096)),
                "fp32",
                "deep_gemm",
                True,
            ),
            Operator(add, "residual_add", base, (), "bf16"),
        ]
        edges += [
            Edge(hidden, f"{norm}:norm", "x", bf16),
            Edge(f"{norm}.weight", f"{norm}:norm", "w", bf16),
            Edge(f"{norm}:norm", f"{gemm}:fprop", "x", replace(x)),
            Edge(f"{gemm}.weight", f"{gemm}:fprop", "w", replace(w)),
            Edge(f"{gemm}:fprop", add, "x", bf16),
            Edge(hidden, add, "residual", bf16),
            Edge("input.0", add, "after_0", bf16),
            Edge("input.0", add, "after_1", bf16),
            Edge("input.0", add, "after_2", bf16),
            Edge("input.0", add, "after_3", bf16),
        ]
        hidden = add
    return make_graph(ops, edges, model="chain")


def measure_build(operators: int) -> dict[str, float]:
    """Return seconds of building and checking a described vLLM graph of that size."""
    engine = Engine("qwen3", linear="lowered", add_norm="own")
    fixed = len(build_precision_graph(describe_engine(engine)).graph.operators)
    more = replace(engine, layers=engine.layers + 1)
    each = len(build_precision_graph(describe_engine(more)).graph.operators) - fixed
    layers = engine.layers + -(-(operators - fixed) // each)
    other = describe_engine(
        replace(engine, layers=layers, attention="returning", activation="opaque")
    )
    train = build_precision_graph(other).graph
    del other
    captured = describe_engine(replace(engine, layers=layers))
    start = time.process_time()
    graph = build_precision_graph(captured).graph
    built = time.process_time()
    report = check_containment(graph, train)
    checked = time.process_time()
    assert report.contained, report.verdict()
    return {
        "operators": len(graph.operators),
        "nodes": len(captured.nodes),
        "build_seconds": round(built - start, 3),
        "check_seconds": round(checked - built, 3),
    }


def measure(operators: int) -> dict[str, float]:
    """Return sizes, seconds of each step and the peak memory of this process."""
    times: dict[str, float] = {}

    def timed(name: str, step: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = step()
        times[f"{name}_seconds"] = round(time.perf_counter() - start, 3)
        return result

    train = timed("make_graph", lambda: chain_graph(operators))
    rollout = chain_graph(operators)
    report = timed("check", lambda: check_containment(rollout, train))
    assert report.contained, report.verdict()
    other = chain_graph(operators, scale_format="ue8m0")
    report = timed("check_all_differ", lambda: check_containment(other, train))
    grouped = timed("group", lambda: group_differences(report))
    assert len(grouped) == 2, len(grouped)
    for name in FORMATS:
        timed(f"report_{name}", lambda name=name: render(report, name))  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.json"
        timed("write", lambda: write_graph(train, path))
        size = path.stat().st_size
        assert timed("read", lambda: read_graph(path)) == train
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "operators": len(train.operators),
        "edges": len(train.edges),
        **times,
        "file_mib": round(size / 2**20, 1),
        "peak_gib": round(peak, 2),
    }


def main() -> int:
    """Run the benchmark and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--operators", type=int, default=100_000)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    found: dict[str, float] = {}
    for part in (4, 2, 1):
        size = arguments.operators // part
        for name, value in measure_build(size).items():
            found[f"vllm_{size}_{name}"] = value
    total = found[f"vllm_{size}_build_seconds"] + found[f"vllm_{size}_check_seconds"]
    found |= measure(arguments.operators)
    if arguments.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:32} {value:>12,}")
    slow = max(found["check_seconds"], total) > MAX_SECONDS
    return int(slow or found["peak_gib"] > MAX_GIB)


if __name__ == "__main__":
    sys.exit(main())
