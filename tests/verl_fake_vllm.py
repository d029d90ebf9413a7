"""verl's processes with a vLLM that is a model in the server's own process.

    VERL_USE_EXTERNAL_MODULES=jetrl_compile.integrations.verl_cpu,verl_fake_vllm

verl imports it in every process. Its replica, its server and adapter and its transfer
of weights are real, and so is this package's part of them; vLLM's engine is not.
"""

import asyncio
import importlib.metadata
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from verl_vllm_doubles import CONTENTS, AnyModules, Engine, make_worker, version

importlib.metadata.version = version
sys.meta_path.insert(0, AnyModules(CONTENTS))


class FakeEngine(Engine):
    """Samples one request at a time; sleeping, it loses its weights."""

    def __init__(self, worker: Any, vocabulary: int) -> None:
        super().__init__(worker)
        self.vocabulary = vocabulary
        self.lock = asyncio.Lock()
        self.generator = torch.Generator().manual_seed(0)

    def __getattr__(self, name: str) -> Any:
        async def nothing(*_: Any, **__: Any) -> None:
            return None

        return nothing

    async def sleep(self, level: int) -> None:
        assert level == 2
        for parameter in self.workers[0].model_runner.model.parameters():
            parameter.data.view(torch.uint8).fill_(7)

    async def generate(
        self, prompt: Any, sampling_params: Any, **_: Any
    ) -> AsyncIterator[Any]:
        async with self.lock:
            tokens, chosen = await asyncio.to_thread(
                self._sample, list(prompt["prompt_token_ids"]), sampling_params
            )
        output = SimpleNamespace(
            token_ids=tokens, logprobs=chosen, finish_reason="length"
        )
        yield SimpleNamespace(outputs=[output], metrics=None)

    def _sample(self, ids: list[int], params: Any) -> Any:
        model = self.workers[0].model_runner.model
        tokens: list[int] = []
        chosen = []
        for _ in range(params.max_tokens):
            every = torch.tensor(ids + tokens)
            with torch.no_grad():
                hidden = model(every, torch.arange(len(every)))[-1:]
                logits: Tensor = model.compute_logits(hidden)[0].float()
            log_probs = logits.log_softmax(-1)
            token = int(torch.multinomial(log_probs.exp(), 1, generator=self.generator))
            tokens.append(token)
            chosen.append({token: SimpleNamespace(logprob=float(log_probs[token]))})
        return tokens, chosen


async def launch_server(self: Any, **_: Any) -> None:
    """Start the engine with random weights, as verl's servers do."""
    from transformers import AutoModelForCausalLM
    from vllm_engine_model import EngineModel

    torch.set_num_threads(1)
    make: Any = AutoModelForCausalLM.from_config
    model = make(self.model_config.hf_config, dtype=torch.bfloat16)
    kwargs = dict(self.config.engine_kwargs.get("vllm") or {})
    self._preprocess_engine_kwargs(kwargs)
    assert kwargs["quantization"] == "jetrl", kwargs
    worker = make_worker(EngineModel(model))
    worker.monkey_patch_model(model.config.vocab_size)
    self.engine = FakeEngine(worker, model.config.vocab_size)
    self._server_port = 1


def _use() -> None:
    # The server of this package is a subclass. It cannot be imported here: it imports
    # verl, whose import this module is a part of.
    from verl.workers.rollout.vllm_rollout import vllm_async_server

    fake: Any = launch_server
    vllm_async_server.vLLMHttpServer.launch_server = fake


_use()
