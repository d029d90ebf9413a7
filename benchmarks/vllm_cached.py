"""The graph of a vLLM engine whose compiled pieces came from vLLM's cache.

    python benchmarks/vllm_cached.py qwen3-8b --layers 2

Needs a Hopper GPU and vLLM 0.24. Two processes, one after the other, load the same
checkpoint with seeded random weights and share a compile cache that is empty at first.
Each checks levels 1 to 3 against a trainer, and says how many compiled pieces the pass
ran on: the second must have none, and be contained all the same. Prints a line for
each; exits with 1 if one is wrong.
"""

import hashlib
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from vllm_engines import Failed, Worker, cache_bytes, make_llm, write_config
from vllm_trainer import make_trainer
from vllm_warm_up import Wanted, warm_up

TOKENS = 128  # of a step


def load(folder: str, cache: int) -> tuple[str, int, str]:
    """Load an engine and check it.

    Args:
        folder: With a checkpoint.
        cache: Bytes of the key/value cache.

    Returns:
        The verdict, compiled pieces that the pass ran on, and a digest of the graph.
    """
    from transformers import AutoModelForCausalLM

    from jetrl_compile.integrations.vllm.engine import check_engine, engine_graph

    llm = make_llm(
        folder,
        cache,
        quantization="jetrl",
        max_num_seqs=8,
        max_model_len=TOKENS,
        max_num_batched_tokens=TOKENS,
        compilation_config={"cudagraph_capture_sizes": [1, 4]},
    )
    read: Any = AutoModelForCausalLM.from_pretrained
    trainer = read(folder, dtype="bfloat16").cuda()
    report = check_engine(llm, trainer)
    for one in report.differences:
        print(one.level, one.operator, one.attribute, one.message)
    graph = engine_graph(llm)
    edges = sorted(str(edge) for edge in graph.edges)
    digest = hashlib.sha256("\n".join(edges).encode()).hexdigest()[:16]
    return report.verdict(), int(graph.meta["compared_pieces"]), digest


def judge(found: list[tuple[str, int, str]]) -> str:
    """Return what is wrong with both runs, or ""."""
    (first, compiled, graph), (second, again, same) = found
    if not first.startswith("contained") or not second.startswith("contained"):
        return "not contained"
    if not compiled:
        return "the first process compiled nothing"
    if again:
        return "the cache missed: the second process compiled again"
    return "" if graph == same else "the graphs differ"


def main(
    model: Annotated[str, typer.Argument(help="A built-in shape.")] = "qwen3-8b",
    layers: Annotated[int, typer.Option(help="Layers to keep.")] = 2,
    logs: Annotated[Path | None, typer.Option(help="Folder of logs.")] = None,
) -> None:
    """Load twice, and compare."""
    found = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as kept:
        config = write_config(model, Path(folder), layers)
        make_trainer(config, 1).save_pretrained(folder)
        warm_up(Wanted(folder, [4]), Wanted(folder, [TOKENS]), jobs=8)
        for name in ("compiled", "cached"):
            log = logs / f"{name}_{model}.log" if logs else None
            cache = {"VLLM_CACHE_ROOT": kept, "TORCHINDUCTOR_CACHE_DIR": f"{kept}/i"}
            given = (load, folder, cache_bytes(config, 8, TOKENS))
            worker = Worker(name, partial, *given, log=log, environment=cache)
            worker.send()
            try:
                worker.wait()
                found.append(worker.receive())
            except Failed as error:
                typer.echo(str(error))
                raise typer.Exit(1) from None
            finally:
                worker.stop()
            verdict, pieces, digest = found[-1]
            typer.echo(f"{name}: {verdict}; {pieces} compiled pieces; graph {digest}")
    wrong = judge(found)
    if wrong:
        typer.echo(f"WRONG: {wrong}")
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
