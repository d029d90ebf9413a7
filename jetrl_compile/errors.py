"""Every exception that this package raises.

Each message says what was found, what was needed and what to do, in one or two lines.
The command line prints the message alone and exits with status 2.
"""


class JetRLError(Exception):
    """Base class of this package's exceptions."""


class PrecisionFlowError(JetRLError, ValueError):
    """A tensor, graph or annotation that no precision flow can carry."""


class RecipeError(JetRLError, ValueError):
    """An unknown recipe, or one whose patterns or formats are impossible."""


class ProviderError(JetRLError, ValueError):
    """An unknown provider, or no provider that accepts an operator."""


class GraphFormatError(JetRLError, ValueError):
    """A precision graph or captured graph that cannot be read."""


class LoweringError(JetRLError, RuntimeError):
    """A GEMM that the recipe names was not lowered, or the lowered graph differs."""


class ModelError(JetRLError, ValueError):
    """A model, checkpoint or config folder that cannot be used."""


class RefitError(JetRLError, RuntimeError):
    """A weight sync that failed; the rollout model must not generate."""


class ContainmentError(JetRLError, RuntimeError):
    """A live rollout that is not contained in the trainer; the run must stop."""


class OutputError(JetRLError, OSError):
    """A file that cannot be written."""


class MetricsError(JetRLError, ValueError):
    """Log-probs that no mismatch metric can be computed from."""


def one_line(error: BaseException, limit: int = 160) -> str:
    """Return a library's message on one line, its reason included; cut off if long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
