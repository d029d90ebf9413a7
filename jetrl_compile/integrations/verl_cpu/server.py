"""A rollout on a CPU: a Hugging Face model with FP8 weights, sampled a batch at a time.

It refuses to generate from the first moment of a weight sync until the sync was checked
and ended, so weights of two steps never meet.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from verl.workers.rollout.replica import TokenOutput

from jetrl_compile.digests import stored_digests
from jetrl_compile.errors import ModelError, RefitError
from jetrl_compile.exact_attention import use_exact_attention
from jetrl_compile.examples.sampling import left_pad, sample
from jetrl_compile.graph_json import graph_to_json
from jetrl_compile.integrations.verl.phases import PhaseLedger
from jetrl_compile.integrations.verl.settings import Settings
from jetrl_compile.layers import compile_layers
from jetrl_compile.pipeline import CompileReport
from jetrl_compile.rollout import make_rollout_model, refit
from jetrl_compile.tracing import trace_model

GREEDY = 1e-4  # stands for temperature 0: what is most likely has probability one
_WINDOW = 0.05  # seconds in which requests join a batch


@dataclass(frozen=True)
class Request:
    """A prompt that waits for its batch."""

    prompt: list[int]
    temperature: float
    max_tokens: int
    answer: "asyncio.Future[TokenOutput]"


class CPUServer:
    """A rollout model with verl's interface of a server; one in each replica."""

    def __init__(
        self,
        path: str,
        config: Any,
        settings: Settings,
        max_tokens: int,
        seed: int,
        vocabulary: int | None = None,
    ) -> None:
        """Load a model and store its linear layers as the recipe says.

        Args:
            path: Folder of the Hugging Face model.
            config: Its config, with what the user overrides.
            settings: Of this package.
            max_tokens: Longest response, in tokens.
            seed: Of sampling.
            vocabulary: In exact mode, tokens from here on are never sampled, as by
                verl's vLLM servers; None: all may be.
        """
        torch.set_num_threads(1)
        load: Any = AutoModelForCausalLM.from_pretrained  # untyped
        self.config, self.max_tokens = config, max_tokens
        model = load(path, config=config, dtype=torch.bfloat16).eval()
        if settings.exact:
            use_exact_attention(model)
        self.vocabulary = vocabulary if settings.exact else None
        self.model = make_rollout_model(model, settings.recipe)
        self.graph = trace_model(
            self.model, phase="rollout", recipe=settings.recipe, exact=settings.exact
        )
        reports: list[CompileReport] = []
        stands_for = compile_layers(
            self.model,
            **settings.backend_options,
            phase="rollout",
            report=reports.append,
        )
        self.ledger = PhaseLedger(self.graph, stands_for)
        self.ledger.reports = reports
        self.ledger.watch(self.model)
        self.generator = torch.Generator().manual_seed(seed)
        self.step: int | None = None
        self.refusal = "no weights came from the trainer yet"
        self._waiting: list[Request] = []
        self._lock = asyncio.Lock()

    async def precision_graph(self) -> str:
        """Return the rollout model's precision graph as JSON."""
        return graph_to_json(self.graph)

    async def begin_sync(self, step: int | None) -> None:
        """Refuse to generate from now on."""
        self.refusal = f"the weight sync of step {step} was not finished"

    async def load_weights(self, weights: Mapping[str, Tensor]) -> dict[str, str]:
        """Write a trainer's weights, all or nothing; return what is stored, as digests.

        Raises:
            RefitError: They do not fit; the model is unchanged and refuses to generate.
        """
        async with self._lock:
            refit(self.model, weights)
        return stored_digests(self.model)

    async def end_sync(self, step: int | None) -> None:
        """Generate again, with the weights of a step."""
        self.step, self.refusal = step, ""

    async def generate(
        self,
        request_id: str,
        prompt_ids: Any,
        sampling_params: Mapping[str, Any],
        **_: Any,
    ) -> TokenOutput:
        """Sample a response.

        Raises:
            RefitError: The weights are not those of one finished sync.
            ModelError: A sampling parameter cannot be served.
        """
        if self.refusal:
            raise RefitError(f"the rollout refuses to generate: {self.refusal}")
        temperature = _checked(sampling_params)
        limit = int(sampling_params.get("max_tokens") or self.max_tokens)
        answer: asyncio.Future[TokenOutput] = asyncio.get_running_loop().create_future()
        prompt = [int(token) for token in prompt_ids]
        self._waiting.append(Request(prompt, temperature, limit, answer))
        await asyncio.sleep(_WINDOW)
        async with self._lock:
            if not answer.done():
                first = self._waiting[0]
                key = first.temperature, first.max_tokens
                batch = [
                    r for r in self._waiting if (r.temperature, r.max_tokens) == key
                ]
                self._waiting = [r for r in self._waiting if r not in batch]
                outputs = await asyncio.to_thread(self._sample, batch)
                for request, output in zip(batch, outputs, strict=True):
                    request.answer.set_result(output)
        return await answer

    def _sample(self, batch: list[Request]) -> list[TokenOutput]:
        ends = self.config.eos_token_id
        stop = list(ends) if isinstance(ends, (list, tuple)) else [ends]
        pad = self.config.pad_token_id
        pad = stop[0] if pad is None else pad
        tokens, mask = left_pad([request.prompt for request in batch], pad)
        self.ledger.begin()
        rollouts = sample(
            self.model,
            tokens,
            mask,
            max_new_tokens=batch[0].max_tokens,
            stop=stop,
            pad=pad,
            generator=self.generator,
            temperature=batch[0].temperature,
            vocabulary=self.vocabulary,
        )
        self.ledger.end("rollout", training=False)
        return [
            TokenOutput(
                token_ids=response,
                log_probs=log_probs[row].tolist(),
                stop_reason="completed",
                extra_fields={"global_steps": self.step},
            )
            for response, log_probs, row in zip(
                rollouts.responses,
                rollouts.log_probs,
                rollouts.response_mask,
                strict=True,
            )
        ]

    async def set_global_steps(self, step: int | None) -> None:
        """Note the step of the weights."""
        self.step = step

    async def wake_up(self, *_: Any, **__: Any) -> None:
        """Do nothing: weights stay in memory."""

    async def sleep(self, *_: Any, **__: Any) -> None:
        """Do nothing: weights stay in memory."""

    async def clear_kv_cache(self) -> None:
        """Do nothing: a batch has a cache of its own."""

    async def abort_all_requests(self, **_: Any) -> dict[str, Any]:
        """Return that none was aborted: responses are short."""
        return {}

    async def resume_generation(self) -> None:
        """Do nothing."""

    async def start_profile(self, **_: Any) -> None:
        """Do nothing."""

    async def stop_profile(self, **_: Any) -> None:
        """Do nothing."""


def _checked(given: Mapping[str, Any]) -> float:
    """Return the temperature, once the other parameters are those that are served."""
    top_p, top_k = given.get("top_p", 1.0), given.get("top_k", -1)
    penalty = given.get("repetition_penalty", 1.0)
    if top_p not in (None, 1.0) or top_k not in (None, -1, 0) or penalty != 1.0:
        raise ModelError(
            f"top_p={top_p}, top_k={top_k}, repetition_penalty={penalty}: the CPU "
            "rollout samples from the whole distribution; set them to 1.0, -1 and 1.0"
        )
    return float(given.get("temperature", 1.0) or GREEDY)
