"""The ways in which one model is run: eager, compiled, FP8; all on the same weights.

A way keeps the compiled call of each decoder layer (`_compiled_call_impl`; in exact
mode also of the last norm and the output head) and the linear layers that it puts in
place of the model's. Switching on a way puts them in, switching it off takes them out,
so that the GPU holds one model. Exact mode's attention is switched with them.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from jetrl_compile.bench.torchao import with_fp8_linears
from jetrl_compile.errors import JetRLError, RecipeError, one_line
from jetrl_compile.exact_attention import NAME
from jetrl_compile.layers import compile_layers, decoder_layers
from jetrl_compile.recipe import recipe_names

EAGER, COMPILE, TORCHAO, JETRL = "eager", "compile", "torchao", "jetrl"
KINDS = (EAGER, COMPILE, TORCHAO, JETRL)
# Ways share the code of a layer's forward, and so Dynamo's limit for it.
RECOMPILE_LIMIT = 256
_CALL = "_compiled_call_impl"


@dataclass(frozen=True)
class WaySpec:
    """A way, as asked for.

    Attributes:
        name: What tables call it.
        kind: "eager", "compile" (BF16, torch.compile a layer), "torchao" (its
            blockwise FP8 linear layers, compiled a layer where that works) or "jetrl".
        options: Of `torch.compile`, or of the backend jetrl.
    """

    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """Whether it is exact mode."""
        return self.kind == JETRL and bool(self.options.get("exact"))


def parse_way(text: str) -> WaySpec:
    """Read `NAME` or `NAME:KEY=VALUE,...`.

    "eager", "compile" and "torchao" are what they say; any other name is a way through
    the backend jetrl. A name that is a recipe's chooses that recipe, unless the options
    do. Values are true, false, whole numbers, lists of words joined by "+", or words.

    Raises:
        RecipeError: It cannot be read.
    """
    name, colon, rest = text.partition(":")
    pairs = [part.partition("=") for part in rest.split(",")] if colon else []
    if not name or any(not key or not equals for key, equals, _ in pairs):
        raise RecipeError(
            f"the way {text!r} cannot be read; write NAME or NAME:KEY=VALUE,KEY=VALUE"
        )
    options = {key: _value(value) for key, _, value in pairs}
    kind = name if name in KINDS else JETRL
    if kind == JETRL and "recipe" not in options:
        if name in recipe_names():
            options["recipe"] = name
        elif options:
            options["recipe"] = JETRL
        else:
            near = difflib.get_close_matches(name, (*KINDS, *recipe_names()), n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise RecipeError(
                f"the way {name!r} is unknown; {hint}use one of {', '.join(KINDS)}, a "
                "recipe, or a name with options"
            )
    return WaySpec(name, kind, options)


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if "+" in text:
        return tuple(text.strip("+").split("+"))
    try:
        return int(text)
    except ValueError:
        return text


def choose_ways(
    defaults: Iterable[str], more: Iterable[str], skip: Iterable[str]
) -> list[WaySpec]:
    """Return the default ways and more, without some; a later one replaces an earlier.

    Raises:
        RecipeError: A way cannot be read, one to skip is not there, or none is left.
    """
    ways = {way.name: way for way in map(parse_way, (*defaults, *more))}
    for name in skip:
        if ways.pop(name, None) is None:
            raise RecipeError(
                f"there is no way {name!r} to skip; there are {', '.join(ways)}"
            )
    if not ways:
        raise RecipeError("every way is skipped; leave one to measure")
    return list(ways.values())


class Way:
    """A way of running a model's decoder layers, ready to be switched on.

    Attributes:
        spec: What was asked for.
        note: What is to be known of it: how torchao's layers run, for example.
    """

    def __init__(self, spec: WaySpec, model: nn.Module, graphs: bool = False) -> None:
        """Compile the layers; Dynamo does so at their first call.

        Args:
            spec: The way.
            model: With a list of decoder layers; left as it was.
            graphs: Whether compiled layers run under Inductor's CUDA graphs.

        Raises:
            JetRLError: An option is unknown, or the way is not to be had here.
        """
        self.spec = spec
        self.note = ""
        self.graphs = graphs
        self._layers = list(decoder_layers(model).values())
        self._linears = with_fp8_linears(self._layers) if spec.kind == TORCHAO else {}
        self._model: Any = model
        self._attention = ""
        self._calls: list[tuple[nn.Module, Callable[..., Any]]] = []
        try:
            self._compile(model)
        finally:
            self._take_out()

    def _take_out(self) -> None:
        """Keep what was compiled, and leave the model as it was."""
        for module in self._model.modules():
            call = vars(module).pop(_CALL, None)
            if call is not None:
                self._calls.append((module, call))
        self._restore_attention()

    def _restore_attention(self) -> None:
        if self.spec.is_exact and self._attention:
            self._model.set_attn_implementation(self._attention)

    def _compile(self, model: nn.Module) -> None:
        more: dict[str, Any] = {"mode": "reduce-overhead"} if self.graphs else {}
        if self.spec.kind in (COMPILE, TORCHAO):
            more |= {"fullgraph": True, "dynamic": False, **self.spec.options}
            for layer in self._layers:
                layer.compile(**more)
        elif self.spec.kind == JETRL:
            if self.spec.is_exact:
                self._attention = self._model.config._attn_implementation
            compile_layers(model, **more, **self.spec.options)

    def relax(self, reason: str) -> bool:
        """Run torchao's layers eagerly after a failure to compile.

        Args:
            reason: Why it failed, for the note.

        Returns:
            Whether there is something left to try: once, and only for torchao.
        """
        if self.spec.kind != TORCHAO or self.note:
            return False
        self.note = f"eager, not compiled: {reason}"
        self._calls = []
        return True

    @property
    def is_compiled(self) -> bool:
        """Whether its layers run compiled."""
        return bool(self._calls)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the model this way within the body."""
        self.switch_on()
        try:
            yield
        finally:
            self.switch_off()

    def switch_on(self) -> None:
        """Run the model this way from now on; no other way may be on."""
        for (parent, name), (_, own) in self._linears.items():
            setattr(parent, name, own)
        for module, call in self._calls:
            setattr(module, _CALL, call)
        if self.spec.is_exact:
            self._model.set_attn_implementation(NAME)

    def switch_off(self) -> None:
        """Run the model as it was."""
        for module, _ in self._calls:
            vars(module).pop(_CALL, None)
        self._restore_attention()
        for (parent, name), (original, _) in self._linears.items():
            setattr(parent, name, original)


@contextmanager
def dynamo_for_many_ways() -> Iterator[None]:
    """Let many ways be compiled in one process, and none run eagerly unnoticed."""
    import torch._dynamo as dynamo

    dynamo.reset()
    config: Any = dynamo.config
    try:
        with config.patch(
            recompile_limit=RECOMPILE_LIMIT,
            accumulated_recompile_limit=4 * RECOMPILE_LIMIT,
            fail_on_recompile_limit_hit=True,
        ):
            yield
    finally:
        dynamo.reset()


def graphs_compiled() -> int:
    """Return how many graphs Dynamo compiled in this process so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def failure(error: BaseException) -> str:
    """Return why a way cannot be measured, for a table; bugs here are raised again.

    A compiler raises whatever it likes, so nearly everything counts as a way's failure.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
        raise error
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    prefix = "" if isinstance(error, JetRLError) else f"{type(error).__name__}: "
    return f"{prefix}{one_line(error)}"
