"""The rollout's end of a trainer's weight sync: what came, and whether all of it did.

Weights come in buckets, each in one of two formats: BF16, which vLLM's loaders take and
the storage quantizes, or E4M3 codes and scales as they are stored, which are copied. A
model refuses to generate from the first bucket on until the sync was complete, checked
and released.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from jetrl_compile.errors import RefitError
from jetrl_compile.formats import short_name
from jetrl_compile.integrations.vllm.live_model import config_of, guard_heads
from jetrl_compile.integrations.vllm.stored import StoredTensor, stored_tensors

Named = tuple[str, Tensor]
E4M3 = torch.float8_e4m3fn


class SyncReceiver:
    """Takes weight syncs into a loaded model, one after the other.

    Attributes:
        stored: What the model stores, in order.
        step: Whose weights the last sync brings.
        failure: The first error of the sync that is going on. The buckets that are
            still to come are thrown away, since their sender waits for answers.
    """

    def __init__(self, model: nn.Module) -> None:
        """Take syncs into a model.

        Args:
            model: A model that was loaded with `quantization="jetrl"`.

        Raises:
            ModelError: It was loaded otherwise.
        """
        self.state = config_of(model).state
        guard_heads(model)
        self.stored: tuple[StoredTensor, ...] = tuple(stored_tensors(model))
        self.failure: Exception | None = None
        self._has_fp8 = any(item.part is not None for item in self.stored)
        self._targets = {item.name: item for item in self.stored}
        self._seen: set[str] = set()
        self._codes: set[str] = set()  # layers whose codes came as they are
        self._scales: dict[str, Tensor] = {}
        self.step: int | None = None

    def begin(self, step: int | None) -> None:
        """Refuse to generate until `release`: a sync begins.

        Args:
            step: Whose weights will come.
        """
        self.step, self.failure = step, None
        for known in (self._seen, self._codes, self._scales):
            known.clear()
        self.state.begin(f"the weight sync of step {step} was not finished")

    def take(self, weights: Iterable[Named]) -> list[Named]:
        """Write codes and scales of a bucket; return the other tensors of it.

        Args:
            weights: By Hugging Face's names; codes are float8_e4m3fn, (N, K), scales
                FP32, both of whole layers. The tensors may be overwritten afterwards.

        Returns:
            What vLLM's loaders must load.

        Raises:
            RefitError: A shape does not fit, or a weight holds NaN or infinity.
        """
        others = []
        for name, tensor in weights:
            self._seen.add(name)
            target = self._targets.get(name)
            is_scale = target is not None and not name.endswith(".weight")
            if target is None or target.part is None:
                others.append((name, tensor))
            elif tensor.dtype is E4M3 or is_scale:
                self._copy(target, tensor)
            else:
                others.append((name, tensor))
        return others

    def _copy(self, target: StoredTensor, tensor: Tensor) -> None:
        """Write codes or scales into their place; a layer is done when both came."""
        if tuple(tensor.shape) != target.shape or tensor.dtype != target.tensor.dtype:
            raise RefitError(
                f"{target.name} came as {short_name(tensor.dtype)} "
                f"{tuple(tensor.shape)}, the engine stores "
                f"{short_name(target.tensor.dtype)} {target.shape}; send the weights "
                "of the same architecture, by the same recipe"
            )
        part = target.part
        assert part is not None
        with torch.no_grad():
            target.tensor.copy_(tensor[target.source])
        if tensor.dtype is E4M3:
            self._codes.add(part.name)
        else:
            self._scales[part.name] = target.tensor
        if part.name in self._codes and part.name in self._scales:
            self.state.wrote(part, self._scales.pop(part.name))

    def finish(self) -> int:
        """Check that a whole sync came; the model still refuses to generate.

        Returns:
            The number of tensors that came.

        Raises:
            RefitError: Tensors are missing.
            Exception: What failed in a bucket.
        """
        if self.failure is not None:
            raise self.failure
        missing = [item.name for item in self.stored if not self._came(item)]
        if missing:
            raise RefitError(
                f"the weight sync of step {self.step} left out {len(missing)} of "
                f"{len(self.stored)} tensors, first {missing[0]}; send all weights"
            )
        return len(self._seen)

    def _came(self, item: StoredTensor) -> bool:
        if item.name in self._seen:
            return True
        if item.part is None or item.name.endswith(".weight"):
            return False
        # Scales are made here where the weight came in BF16.
        name = item.part.name
        return f"{name}.weight" in self._seen and name not in self._codes

    def release(self) -> None:
        """Let the model generate: the sync was finished, and checked if it had to be.

        Raises:
            RefitError: Weights are missing, or hold NaN or infinity.
        """
        self.finish()
        if self._has_fp8 and not (self.state.is_whole or self.state.broken):
            raise RefitError(
                f"the weight sync of step {self.step} brought all tensors, and the "
                "model's loaders did not write all FP8 layers; send them by the names "
                "that vLLM loads"
            )
        self.state.pushing = ""
        self.state.check()
