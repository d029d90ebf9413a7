"""What benchmarks with vLLM share: model folders, engines in processes of their own.

Several engines share a GPU: each is told how much memory its key/value cache has, and
none takes what is free. They load at the same time, and work in turns.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jetrl_compile.bench.models import BUILT_IN, find_config

# Source: the model's config.json on Hugging Face.
SMOLLM2: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
}
SHAPES = (*BUILT_IN, "smollm2-135m")
KINDS = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}
WHOLE_GRAPH = {"mode": 2, "backend": "jetrl", "cudagraph_mode": "FULL_DECODE_ONLY"}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that batches form in the same way
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # Only the kernels that are needed are compiled, ahead and all at once.
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "HF_HUB_OFFLINE": "1",
}
_CONTEXT = get_context("spawn")
_GIB = 1 << 30


def write_config(model: str, folder: Path, layers: int | None = None) -> Any:
    """Write the config.json of a shape; return the config.

    Args:
        model: A name of `SHAPES`, or a folder with a config.json.
        folder: Where it is written.
        layers: How many decoder layers to keep; None: all.
    """
    if model == "smollm2-135m":
        from transformers import LlamaConfig

        config: Any = LlamaConfig(**SMOLLM2)
        config.num_hidden_layers = layers or config.num_hidden_layers
    else:
        config = find_config(model, layers)
    if model == "llama3.1-8b":
        config.rms_norm_eps = 1e-5
    config.architectures = [f"{KINDS[config.model_type]}ForCausalLM"]
    config.dtype = "bfloat16"
    config.bos_token_id, config.eos_token_id = 0, 1
    config.save_pretrained(folder)
    return config


def cache_bytes(config: Any, sequences: int, length: int, ranks: int = 1) -> int:
    """Return the bytes of a BF16 key/value cache, with room for odd blocks.

    Args:
        config: Of the model.
        sequences: At a time.
        length: Tokens of each, its prompt included.
        ranks: Tensor parallel size.
    """
    size = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    heads = max(1, config.num_key_value_heads // ranks)
    token = config.num_hidden_layers * 2 * heads * size * 2
    return (sequences + 2) * (length + 32) * token + _GIB // 4


def make_llm(folder: Path | str, cache: int, **settings: Any) -> Any:
    """Return vLLM's LLM of a folder that leaves the rest of the GPU to others.

    Args:
        folder: With a config.json.
        cache: Bytes of the key/value cache.
        **settings: More arguments of LLM.
    """
    from vllm import LLM

    return LLM(
        model=str(folder),
        **{
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            # What must be free at the start; the cache's size is given.
            "gpu_memory_utilization": 0.02,
            "kv_cache_memory_bytes": cache,
            **settings,
        },
    )


class Failed(RuntimeError):  # noqa: N818
    """An engine's process raised; the message ends with its traceback."""


class Worker:
    """A process with an engine, which answers one question at a time.

    Attributes:
        name: What it is called in tables and logs.
        seconds: How long it took to get ready.
    """

    def __init__(
        self,
        name: str,
        start: Callable[..., Callable[..., Any]],
        *args: Any,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it; `start(*args)` runs there and returns what answers questions.

        Args:
            name: What it is called.
            start: Importable; loads the engine.
            *args: Of `start`.
            log: Where what it prints goes; None: to the terminal.
            environment: More variables of its environment.
        """
        self.name = name
        self.seconds = 0.0
        self._begin = time.perf_counter()
        self._pipe, theirs = _CONTEXT.Pipe()
        variables = {**ENVIRONMENT, **(environment or {})}
        given = (start, args, theirs, log, variables)
        # An engine may have processes of its own, so it is no daemon.
        self._process = _CONTEXT.Process(target=_serve, args=given, daemon=False)
        self._process.start()
        theirs.close()

    def wait(self) -> None:
        """Wait until it is ready.

        Raises:
            Failed: It raised.
        """
        self.receive()
        self.seconds = time.perf_counter() - self._begin

    def send(self, *args: Any) -> None:
        """Ask without waiting for the answer."""
        self._pipe.send(args)

    def receive(self) -> Any:
        """Wait for the answer.

        Raises:
            Failed: It raised, or ended.
        """
        try:
            good, answer = self._pipe.recv()
        except EOFError:
            self._process.join(5)
            code = self._process.exitcode
            raise Failed(f"{self.name} ended with exit code {code}") from None
        if not good:
            raise Failed(f"{self.name}: {answer}")
        return answer

    def ask(self, *args: Any) -> Any:
        """Ask and wait for the answer."""
        self.send(*args)
        return self.receive()

    def stop(self) -> None:
        """End the process, at once."""
        self._pipe.close()
        self._process.join(3)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(10)


def wait_all(workers: list[Worker], say: Callable[[str], None]) -> list[Worker]:
    """Wait for workers that load at the same time; return those that are ready.

    What failed is said, and stopped: the others are measured all the same.
    """
    ready = []
    for worker in workers:
        try:
            worker.wait()
        except Failed as error:
            say(str(error))
            worker.stop()
        else:
            say(f"{worker.name}: ready after {worker.seconds:.0f} s")
            ready.append(worker)
    return ready


def _serve(
    start: Callable[..., Callable[..., Any]],
    args: tuple[Any, ...],
    pipe: Connection,
    log: Path | None,
    variables: Mapping[str, str],
) -> None:
    os.environ.update(variables)
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(file.fileno(), stream.fileno())
    try:
        answer = start(*args)
        pipe.send((True, None))
        while True:
            asked = pipe.recv()
            pipe.send((True, answer(*asked)))
    except (EOFError, BrokenPipeError):  # no more questions
        return
    except BaseException:
        traceback.print_exc()
        pipe.send((False, traceback.format_exc(limit=-6)))
        raise
