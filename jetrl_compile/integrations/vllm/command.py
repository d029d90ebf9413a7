"""The engine "vllm" by name: what commands run, and what people do with it."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from jetrl_compile.containment import Difference, LevelResult
from jetrl_compile.engines import EngineAudit
from jetrl_compile.errors import JetRLError, ModelError, one_line
from jetrl_compile.integrations.vllm.engine import (
    check_engine,
    engine_graph,
    refit,
)
from jetrl_compile.integrations.vllm.exact import exact_settings, prepare_exact
from jetrl_compile.integrations.vllm.log_probs import (
    gap_metrics,
    sample,
    trainer_log_probs,
)
from jetrl_compile.precision_graph import PrecisionGraph

__all__ = [
    "audit",
    "check_engine",
    "engine_graph",
    "gap_metrics",
    "graph",
    "load",
    "refit",
    "sample",
    "trainer_log_probs",
]
Progress = Callable[[str], None]
PROMPT = 8  # tokens of a prompt of an audit
GPU_MEMORY = 0.4  # of the GPU, for the engine: the trainer needs the rest


def load(folder: Path | str, recipe: str, length: int = 64, **settings: Any) -> Any:
    """Return vLLM's LLM of a folder, in this process.

    Args:
        folder: A Hugging Face model.
        recipe: The recipe's name.
        length: Tokens of the longest sequence, its prompt included.
        **settings: More arguments of LLM.

    Raises:
        ModelError: vLLM cannot be imported, or refuses the model or a setting.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        from vllm import LLM
    except ImportError as error:
        raise ModelError(
            f"vLLM cannot be imported: {one_line(error)}; install it with "
            "pip install 'jetrl-compile[vllm]'"
        ) from error

    chosen: dict[str, Any] = {
        "quantization": "jetrl",
        "additional_config": {"jetrl": {"recipe": recipe}},
        "skip_tokenizer_init": True,
        "gpu_memory_utilization": GPU_MEMORY,
        "max_model_len": length,
        "compilation_config": {"cudagraph_capture_sizes": [1, 8]},
    }
    try:
        return LLM(model=str(folder), **{**chosen, **settings})
    except JetRLError:
        raise
    except ValueError as error:
        raise ModelError(f"vLLM refuses {folder}: {one_line(error, 400)}") from error


def graph(
    folder: Path | str,
    *,
    recipe: str = "jetrl",
    progress: Progress | None = None,
    exact: bool = False,
) -> PrecisionGraph:
    """Load a model into vLLM with random weights; return the graph that it runs.

    Args:
        folder: With a `config.json`; weights are not read.
        recipe: The recipe's name.
        progress: Called with a line before each step.
        exact: In exact mode.
    """
    say = progress or (lambda _: None)
    say(f"loading {folder} into vLLM")
    more = exact_settings(recipe) if exact else {}
    llm = load(folder, recipe, load_format="dummy", **more)
    say("tracing the live model")
    return engine_graph(llm)


def audit(
    folder: Path | str,
    *,
    recipe: str = "jetrl",
    sequences: int = 2,
    length: int = 64,
    seed: int = 0,
    tolerance: float = 0.0,
    progress: Progress | None = None,
    exact: bool = False,
) -> EngineAudit:
    """Check all four levels of vLLM's model of a folder against the trainer's.

    The engine samples answers to random prompts at temperature 1; the trainer, compiled
    with the same recipe, scores them.

    Args:
        folder: A Hugging Face model with weights.
        recipe: The recipe's name.
        sequences: Sequences to sample.
        length: Tokens that are sampled a sequence.
        seed: Of prompts and sampling.
        tolerance: Largest log-prob gap in nats that passes level 4.
        progress: Called with a line before each step.
        exact: In exact mode, on both sides.
    """
    from jetrl_compile.exact_attention import use_exact_attention
    from jetrl_compile.layers import compile_layers
    from jetrl_compile.model_loading import load_causal_model

    say = progress or (lambda _: None)
    say(f"loading {folder} into vLLM")
    more = exact_settings(recipe) if exact else {}
    llm = load(folder, recipe, PROMPT + length, **more)
    say("loading the trainer")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trainer: Any = load_causal_model(folder).to(device, torch.bfloat16)
    kernel = ""
    if exact:
        use_exact_attention(trainer)
        kernel = llm.apply_model(partial(prepare_exact, trainer.config))[0]
    say("comparing structure, flow and bytes")
    report = check_engine(llm, trainer, recipe=recipe, exact=exact)
    say("sampling")
    generator = torch.Generator().manual_seed(seed)
    vocabulary = int(trainer.get_input_embeddings().weight.shape[0])
    prompts = torch.randint(
        vocabulary, (sequences, PROMPT), generator=generator
    ).tolist()
    sampled = sample(llm, prompts, length, seed=seed)
    say("scoring with the trainer")
    compile_layers(trainer, recipe=recipe, exact=exact)
    train = trainer_log_probs(trainer, sampled, kernel)
    gap = (train - sampled.log_probs).abs()
    largest = float(gap[sampled.mask].max())
    counts = {"tokens": int(sampled.mask.sum())}
    differences = []
    if not largest <= tolerance:  # NaN fails
        message = (
            f"log-probs of sampled tokens differ by up to {largest:.3g} nats, mean "
            f"{float(gap[sampled.mask].mean()):.3g}"
        )
        differences = [Difference(4, "output", "values", None, None, message)]
    status = "failed" if differences else "passed"
    report = report.with_level(LevelResult(4, status, counts=counts), differences)
    equal = float((gap[sampled.mask] == 0).float().mean())
    return EngineAudit(report, gap, gap_metrics(sampled, train), equal)
