"""Where a report's graphs were read: files and lines, for CI to point at."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from jetrl_compile.differences import Difference

_NAME = '{"name": '


@dataclass(frozen=True, slots=True)
class Origin:
    """The file that a difference is shown in.

    Attributes:
        file: Its path, relative to the repository where it is in one; "" for none.
        lines: For names of operators and of edges, their line in it, from 1.
    """

    file: str = ""
    lines: Mapping[str, int] = field(default_factory=dict)

    def line(self, item: Difference) -> int:
        """Return the line of a difference; 1 where it is not known."""
        return self.lines.get(item.name) or self.lines.get(item.operator) or 1


def graph_lines(text: str) -> dict[str, int]:
    """Return the line of each operator and edge in a precision graph's JSON text.

    Only lines as `graph_to_json` writes them are found.
    """
    found: dict[str, int] = {}
    decode = json.JSONDecoder().raw_decode
    operator = ""
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if line.startswith(_NAME):
                operator = str(decode(line, len(_NAME))[0])
                found[operator] = number
            elif line.startswith(" [") and operator:
                found[f"{operator}.{decode(line, 2)[0]}"] = number
        except ValueError:  # a file that somebody laid out otherwise
            continue
    return found
