"""In a worker of vLLM: syncs that are whole or refused, the live graph, digests.

verl mixes a class of its own into vLLM's worker (`worker_extension_cls`), which
receives weights; this is a subclass of it. Names begin with `jetrl_`, since vLLM
refuses names that its worker has. Results are JSON: other objects vLLM does not send
between processes.
"""

from typing import Any

from torch import Tensor, nn
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from jetrl_compile.integrations.verl_vllm.documents import read_config
from jetrl_compile.integrations.vllm.engine import graph_document
from jetrl_compile.integrations.vllm.exact import prepare_exact
from jetrl_compile.integrations.vllm.sync_digests import (
    digest_document,
    layout_document,
)
from jetrl_compile.integrations.vllm.sync_receiver import SyncReceiver

_LOGITS = "compute_logits"


class WorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension, with syncs that are whole or refused, and their digests."""

    model_runner: Any
    jetrl_syncs: SyncReceiver | None = None

    def jetrl_graph(self) -> str:
        """Return the precision graph of the live model, as JSON.

        verl masks the logits of tokens that the tokenizer does not have by a method of
        its own on the model; the graph is of the model's own logits.
        """
        model = self._jetrl_model
        masking = vars(model).pop(_LOGITS, None)
        try:
            return graph_document(model)
        finally:
            if masking is not None:
                setattr(model, _LOGITS, masking)

    def jetrl_layout(self) -> str:
        """Return what this rank stores, as JSON."""
        return layout_document(self._jetrl_model)

    def jetrl_prepare(self, config: str) -> str:
        """Write the trainer's tables of cosines and sines into this rank's.

        Args:
            config: The trainer's, as `config_document` writes it.

        Returns:
            The kernel of `jetrl::log_probs` that the trainer is to run.

        Raises:
            ModelError: The engine is not in exact mode.
        """
        return prepare_exact(read_config(config), self._jetrl_model)

    def jetrl_begin(self, step: int | None) -> None:
        """Refuse to generate from now on: the weights of a step will come."""
        self._jetrl_receiver.begin(step)

    def jetrl_digests(self) -> str:
        """Return the digests of what this rank stores, as JSON.

        Raises:
            RefitError: The last sync did not bring all weights.
        """
        self._jetrl_receiver.finish()
        return digest_document(self._jetrl_model)

    def jetrl_release(self) -> None:
        """Generate with the weights of the last sync.

        Raises:
            RefitError: It did not bring all weights.
        """
        self._jetrl_receiver.release()

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        """Receive all weights; refuse to generate until `jetrl_release`.

        Raises:
            RefitError: Weights are missing, do not fit, or hold NaN or infinity.
        """
        self._jetrl_receiver.begin(self._jetrl_receiver.step)
        super().update_weights_from_ipc(*args, **kwargs)
        self._jetrl_receiver.finish()

    def _update_weights(
        self, weights: list[tuple[str, Tensor]], peft_config: Any, base_sync_done: bool
    ) -> None:
        """Load a bucket of weights.

        The sender waits for an answer to each bucket, so an error is kept until all
        buckets were answered.
        """
        receiver = self._jetrl_receiver
        if receiver.failure is not None:
            return
        try:
            others = receiver.take(weights)
            if others:
                super()._update_weights(others, peft_config, base_sync_done)
        except Exception as error:
            # Frames of its traceback hold tensors of the bucket, which is freed next.
            error.__context__ = error.__cause__ = None
            receiver.failure = error.with_traceback(None)

    @property
    def _jetrl_model(self) -> nn.Module:
        model: nn.Module = self.model_runner.model
        return model

    @property
    def _jetrl_receiver(self) -> SyncReceiver:
        if self.jetrl_syncs is None:
            self.jetrl_syncs = SyncReceiver(self._jetrl_model)
        return self.jetrl_syncs
