"""The work that is timed: forward, and forward + backward, of a stack or a layer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_compile.errors import ModelError
from jetrl_compile.layers import decoder_layers

FORWARD, TRAIN = "forward", "forward+backward"
MOST_TOKENS = 1 << 30


@dataclass(frozen=True)
class Shape:
    """A batch of token sequences.

    Attributes:
        batch: Sequences.
        length: Tokens of each.
    """

    batch: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.batch * self.length

    def __str__(self) -> str:
        return f"{self.batch}x{self.length}"


def parse_shape(text: str) -> Shape:
    """Read `BATCHxLENGTH`, such as "4x2048".

    Raises:
        ModelError: It cannot be read.
    """
    batch, _, length = text.partition("x")
    shape = Shape(0, 0)
    if batch.isdecimal() and length.isdecimal():
        shape = Shape(int(batch), int(length))
    if not 1 <= shape.tokens <= MOST_TOKENS:
        raise ModelError(
            f"the shape {text!r} cannot be read; write BATCHxLENGTH, such as 4x2048, "
            f"at most {MOST_TOKENS:,} tokens"
        )
    return shape


@dataclass(frozen=True)
class Steps:
    """What is timed, of one model and one shape.

    Attributes:
        forward: The forward pass without gradient, as of reference models and old
            log-probs; returns the last hidden states.
        train: The forward and the backward pass from a fixed random gradient of the
            last hidden states, in BF16. Gradients are dropped before, so that each
            step makes them anew; they are there until the next step.
        drop: Drops the gradients.
    """

    forward: Callable[[], Tensor]
    train: Callable[[], Tensor]
    drop: Callable[[], None]

    def named(self, forward_only: bool = False) -> dict[str, Callable[[], Tensor]]:
        """Return the steps by name."""
        return {FORWARD: self.forward} | ({} if forward_only else {TRAIN: self.train})


def stack_steps(model: Any, shape: Shape, device: torch.device, seed: int = 1) -> Steps:
    """Return the steps of a whole decoder stack: embedding, layers, last norm.

    Args:
        model: A Hugging Face causal model; its output head does not run.
        shape: Of the token ids, which are random.
        device: Where the model is.
        seed: Of tokens and gradient.
    """
    generator = torch.Generator(device).manual_seed(seed)
    vocabulary, hidden = model.config.vocab_size, model.config.hidden_size
    size = (shape.batch, shape.length)
    ids = torch.randint(0, vocabulary, size, generator=generator, device=device)
    body = model.get_decoder()

    def run() -> Tensor:
        result: Tensor = body(input_ids=ids, use_cache=False).last_hidden_state
        return result

    dy = _gradient((*size, hidden), device, generator)
    return _steps(run, dy, list(model.parameters()))


def layer_steps(model: Any, shape: Shape, device: torch.device, seed: int = 1) -> Steps:
    """Return the steps of a model's first decoder layer alone.

    Its input is random, in BF16, and has a gradient too; the other arguments (rotary
    embeddings, masks) are those that the model passes.

    Args:
        model: A Hugging Face causal model.
        shape: Of the input.
        device: Where the model is.
        seed: Of input and gradient.

    Raises:
        ModelError: The model does not call its first layer.
    """
    layer = next(iter(decoder_layers(model).values()))
    kwargs = _arguments(model, layer, shape, device)
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.batch, shape.length, model.config.hidden_size)
    x = _gradient(size, device, generator).requires_grad_()

    def run() -> Tensor:
        result = layer(x, **kwargs)
        only: Tensor = result[0] if isinstance(result, tuple) else result
        return only

    dy = _gradient(size, device, generator)
    return _steps(run, dy, [x, *layer.parameters()])


def layers_steps(
    model: Any, shape: Shape, device: torch.device, seed: int = 1
) -> Steps:
    """Return the steps of all decoder layers, called one after the other.

    Without the model around them, which looks at values of its inputs on the CPU, they
    can be captured as one CUDA graph. Input and other arguments: see `layer_steps`.

    Args:
        model: A Hugging Face causal model.
        shape: Of the input.
        device: Where the model is.
        seed: Of input and gradient.

    Raises:
        ModelError: The model does not call one of its layers.
    """
    layers = list(decoder_layers(model).values())
    given = [_arguments(model, layer, shape, device) for layer in layers]
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.batch, shape.length, model.config.hidden_size)
    x = _gradient(size, device, generator).requires_grad_()

    def run() -> Tensor:
        hidden: Any = x
        for layer, kwargs in zip(layers, given, strict=True):
            result = layer(hidden, **kwargs)
            hidden = result[0] if isinstance(result, tuple) else result
        last: Tensor = hidden
        return last

    dy = _gradient(size, device, generator)
    leaves = [p for layer in layers for p in layer.parameters()]
    return _steps(run, dy, [x, *leaves])


def _arguments(
    model: Any, layer: nn.Module, shape: Shape, device: torch.device
) -> dict[str, Any]:
    """Return the keyword arguments with which a model calls a layer."""
    seen: list[dict[str, Any]] = []

    def look(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs)

    ids = torch.zeros((shape.batch, shape.length), dtype=torch.long, device=device)
    handle = layer.register_forward_pre_hook(look, with_kwargs=True)
    try:
        with torch.no_grad():
            model.get_decoder()(input_ids=ids, use_cache=False)
    finally:
        handle.remove()
    if not seen:
        raise ModelError(f"{type(model).__name__} does not call one of its layers")
    return seen[0]


def _gradient(
    size: tuple[int, ...], device: torch.device, generator: torch.Generator
) -> Tensor:
    return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)


def _steps(run: Callable[[], Tensor], dy: Tensor, leaves: list[Tensor]) -> Steps:
    def drop() -> None:
        for leaf in leaves:
            leaf.grad = None

    def forward() -> Tensor:
        with torch.no_grad():
            return run()

    def train() -> Tensor:
        drop()
        result: Any = run()
        result.backward(dy)
        last: Tensor = result.detach()
        return last

    return Steps(forward, train, drop)
