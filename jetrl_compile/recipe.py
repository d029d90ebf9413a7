"""Recipes: which GEMMs are FP8, and how each of their operands is quantized."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from jetrl_compile.errors import RecipeError
from jetrl_compile.formats import SCALE_FORMATS, Flow, blocks, groups

GEMM_ROLES = ("fprop", "dgrad", "wgrad")
PHASES = ("train", "rollout")
SAVED_X = ("wgrad_operand", "fprop_codes")


@dataclass(frozen=True)
class GemmFlows:
    """The flows of the two operands of each of the three GEMMs of a linear layer.

    Attributes:
        fprop_x: x of y = x w^T, along K.
        fprop_w: w of fprop, along K.
        dgrad_dy: dy of dx = dy w, along N.
        dgrad_w: w of dgrad, along N; the same codes as `fprop_w` where both are blocks.
        wgrad_dy: dy of dw = dy^T x, along M.
        wgrad_x: x of wgrad, along M.
        saved_x: What of x is kept for backward: "wgrad_operand" (quantized from BF16
            in forward), or "fprop_codes" (requantized in backward).
    """

    fprop_x: Flow
    fprop_w: Flow
    dgrad_dy: Flow
    dgrad_w: Flow
    wgrad_dy: Flow
    wgrad_x: Flow
    saved_x: str = "wgrad_operand"

    def __post_init__(self) -> None:
        """Check that each flow is a quantized one along its GEMM's contraction."""
        if self.saved_x not in SAVED_X:
            raise RecipeError(
                f"saved_x {self.saved_x!r} is unknown; use one of {', '.join(SAVED_X)}"
            )
        for role, direction, operands in (
            ("fprop", "K", ("x", "w")),
            ("dgrad", "N", ("dy", "w")),
            ("wgrad", "M", ("dy", "x")),
        ):
            for operand in operands:
                flow = self.flow(role, operand)
                if not flow.is_quantized or flow.direction != direction:
                    raise RecipeError(
                        f"{role}.{operand} has the flow {flow}; needed is a quantized "
                        f"flow along {direction}, the contraction of {role}"
                    )
                if flow.scale_format not in SCALE_FORMATS:
                    raise RecipeError(
                        f"{role}.{operand} has the scale format {flow.scale_format!r}; "
                        f"use one of {', '.join(SCALE_FORMATS)}"
                    )

    def flow(self, role: str, operand: str) -> Flow:
        """Return the flow of operand "x", "w" or "dy" of a GEMM role."""
        flow: Flow = getattr(self, f"{role}_{operand}")
        return flow


@dataclass(frozen=True)
class Recipe:
    """A precision flow for a model: which GEMMs are quantized in which phase, and how.

    Attributes:
        name: Its name in the registry.
        flows: The operands' flows, or None for a model without FP8.
        train: Whether the trainer's GEMMs are quantized.
        rollout: Whether the rollout model's GEMMs are quantized.
        include: Patterns of modules to quantize although `keep_roles` names their
            role: exact module paths, or globs where `*` stands for one path component
            or a part of it and `**` for any number of components.
        exclude: Patterns of modules to leave in high precision; wins over `include`.
        keep_roles: Roles that stay in high precision: "lm_head" (makes the logits),
            "router" (its result chooses experts).
        description: One line for people.
    """

    name: str
    flows: GemmFlows | None = None
    train: bool = False
    rollout: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    keep_roles: tuple[str, ...] = ("lm_head", "router")
    description: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Check that the parts fit together."""
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", self.name):
            raise RecipeError(
                f"recipe name {self.name!r} is not letters, digits, '_', '-' and '.'; "
                "choose another name"
            )
        if (self.train or self.rollout) and self.flows is None:
            raise RecipeError(
                f"recipe {self.name!r} quantizes but has no flows; give it flows"
            )
        for name in ("include", "exclude", "keep_roles"):
            given = getattr(self, name)
            if isinstance(given, str):
                raise RecipeError(
                    f"{name}={given!r} of recipe {self.name!r} is one string; write "
                    f"({given!r},)"
                )
            object.__setattr__(self, name, tuple(given))  # a list would not hash
        for pattern in (*self.include, *self.exclude):
            compile_pattern(pattern)

    def quantizes(self, phase: str) -> bool:
        """Return whether "train" or "rollout" has FP8 GEMMs.

        Raises:
            RecipeError: The phase is neither.
        """
        if phase not in PHASES:
            raise RecipeError(f"phase {phase!r} is unknown; use train or rollout")
        return self.train if phase == "train" else self.rollout

    def reason_to_keep(self, module: str, role: str, phase: str) -> str | None:
        """Return why a linear layer stays in high precision, or None for FP8.

        Args:
            module: Its module path, such as "model.layers.0.mlp.gate_proj".
            role: "linear", "lm_head" or "router".
            phase: "train" or "rollout".
        """
        if not self.quantizes(phase):
            return f"recipe {self.name} has no FP8 in {phase}"
        for pattern in self.exclude:
            if compile_pattern(pattern).fullmatch(module):
                return f"recipe {self.name} excludes {pattern!r}"
        for pattern in self.include:
            if compile_pattern(pattern).fullmatch(module):
                return None
        if role in self.keep_roles:
            return f"recipe {self.name} keeps the role {role} in high precision"
        return None

    def unmatched(self, modules: Iterable[str]) -> tuple[str, ...]:
        """Return the patterns that match none of some modules."""
        known = list(modules)
        return tuple(
            pattern
            for pattern in (*self.include, *self.exclude)
            if not any(map(compile_pattern(pattern).fullmatch, known))
        )

    def check_patterns(self, modules: Iterable[str]) -> None:
        """Check that each pattern matches a module of a whole model.

        Raises:
            RecipeError: One matches nothing; near names are listed.
        """
        known = list(modules)
        for pattern in self.unmatched(known):
            near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3)
            hint = f"near names: {', '.join(near)}" if near else "it has no such GEMM"
            raise RecipeError(
                f"pattern {pattern!r} of recipe {self.name!r} matches none of the "
                f"model's {len(known)} linear layers; {hint}"
            )


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return the anchored regex of a module path or glob.

    `*` matches within one path component, `**` any number of whole components, `?` one
    character; everything else stands for itself. "mlp.gate" therefore never matches
    "mlp.gate_up_proj".

    Raises:
        RecipeError: The pattern is empty or has an empty component.
    """
    if not pattern or any(not part for part in pattern.split(".")):
        raise RecipeError(
            f"module pattern {pattern!r} is empty or has an empty component; "
            "write a module path, or a glob such as 'model.layers.*.mlp.gate_proj'"
        )
    parts = []
    for part in pattern.split("."):
        if part == "**":
            parts.append(r"(?:[^.]+\.)*")
            continue
        text = re.escape(part).replace(r"\*", "[^.]*").replace(r"\?", "[^.]")
        parts.append(text + r"\.")
    regex = "".join(parts)
    if regex.endswith(r"(?:[^.]+\.)*"):
        return re.compile(regex.removesuffix(r"(?:[^.]+\.)*") + r"[^.]+(?:\.[^.]+)*")
    return re.compile(regex.removesuffix(r"\."))


_REGISTRY: dict[str, Recipe] = {}


def register_recipe(recipe: Recipe) -> Recipe:
    """Make a recipe known by its name and return it.

    Raises:
        RecipeError: Another recipe has that name.
    """
    if _REGISTRY.setdefault(recipe.name, recipe) != recipe:
        raise RecipeError(
            f"a different recipe named {recipe.name!r} is registered; choose another "
            "name"
        )
    return recipe


def get_recipe(recipe: "str | Recipe") -> Recipe:
    """Return a recipe by its name; a recipe is returned as it is.

    Raises:
        RecipeError: No recipe has that name.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise RecipeError(
            f"recipe {recipe!r} is no name and no Recipe; use one of "
            f"{', '.join(_REGISTRY)}"
        )
    if recipe not in _REGISTRY:
        near = difflib.get_close_matches(recipe, _REGISTRY, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise RecipeError(
            f"recipe {recipe!r} is unknown; {hint}known: {', '.join(_REGISTRY)}"
        )
    return _REGISTRY[recipe]


def recipe_names() -> tuple[str, ...]:
    """Return the names of the registered recipes, in order of registration."""
    return tuple(_REGISTRY)


def _flows(scale_format: str = "fp32") -> GemmFlows:
    return GemmFlows(
        fprop_x=groups("K", scale_format),
        fprop_w=blocks("K", scale_format),
        dgrad_dy=groups("N", scale_format),
        dgrad_w=blocks("N", scale_format),
        wgrad_dy=groups("M", scale_format),
        wgrad_x=blocks("M", scale_format),
    )


JETRL = register_recipe(
    Recipe(
        "jetrl",
        _flows(),
        train=True,
        rollout=True,
        description="one FP8 flow; wgrad reads x in 128x128 blocks made from BF16",
    )
)
JETRL_PAPER = register_recipe(
    Recipe(
        "jetrl_paper",
        GemmFlows(
            fprop_x=groups("K"),
            fprop_w=blocks("K"),
            dgrad_dy=groups("N"),
            dgrad_w=blocks("N"),
            wgrad_dy=groups("M"),
            wgrad_x=replace(groups("M"), source_dtype="e4m3"),
            saved_x="fprop_codes",
        ),
        train=True,
        rollout=True,
        description="Jet-RL as published: x saved as fprop codes, requantized in wgrad",
    )
)
ROLLOUT_ONLY = register_recipe(
    Recipe(
        "rollout_only",
        _flows(),
        rollout=True,
        description="BF16 trainer, FP8 rollouts: the off-policy baseline",
    )
)
BF16 = register_recipe(Recipe("bf16", description="no FP8 anywhere"))
JETRL_UE8M0 = register_recipe(
    Recipe(
        "jetrl_ue8m0",
        _flows("ue8m0"),
        train=True,
        rollout=True,
        description="as jetrl, with power-of-two scales (Blackwell)",
    )
)
