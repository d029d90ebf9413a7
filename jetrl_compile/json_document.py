"""Reading JSON that may be damaged: every defect becomes one kind of error."""

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from jetrl_compile.errors import GraphFormatError

T = TypeVar("T")
_TYPE_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def type_name(value: object) -> str:
    """Return how JSON calls the type of a value."""
    return _TYPE_NAMES.get(type(value), type(value).__name__)


class Document:
    """A parsed JSON file of a known format.

    Attributes:
        name: The file's name, for messages.
        root: The outermost object.
        remedy: What to do about a damaged file, the last part of each message.
    """

    def __init__(self, name: str, text: str | bytes, remedy: str) -> None:
        self.name = name
        self.remedy = remedy
        self.root = self._parse(text)

    def _parse(self, text: str | bytes) -> dict[str, Any]:
        try:
            if isinstance(text, bytes):
                text = text.decode("utf-8-sig")
            root = json.loads(
                text, parse_constant=_not_finite, object_pairs_hook=_unique_keys
            )
            if re.search(r"\\u[dD][89a-fA-F]", text):
                json.dumps(root, ensure_ascii=False).encode()
        except json.JSONDecodeError as error:
            if error.pos >= len(text.rstrip()):
                self.fail(f"ends in the middle, at line {error.lineno}")
            self.fail(
                f"is not JSON: {error.msg.lower().removesuffix(' at')} at line "
                f"{error.lineno} column {error.colno}"
            )
        except UnicodeDecodeError as error:
            self.fail(f"is not UTF-8 text: byte {error.start} is {error.reason}")
        except UnicodeEncodeError:
            self.fail("has an escaped lone surrogate, which is no character")
        except RecursionError:
            self.fail("is nested too deeply")
        except ValueError as error:
            self.fail(f"has a value that cannot be read: {error}")
        if not isinstance(root, dict):
            self.fail(f"holds {type_name(root)}; needed is an object")
        return root

    def fail(self, found: str) -> NoReturn:
        """Raise the error of this file.

        Args:
            found: What is wrong, as a sentence part that the file's name begins.

        Raises:
            GraphFormatError: Always.
        """
        raise GraphFormatError(f"{self.name} {found}; {self.remedy}")

    def check_header(self, format_name: str, version: int, what: str) -> None:
        """Check the fields `format` and `version`.

        Raises:
            GraphFormatError: Another format, or a newer version than `version`.
        """
        found = self.root.get("format")
        if found != format_name:
            has = f"the format {_short(found)}" if found else "no field 'format'"
            self.fail(f"has {has}; needed is {what} ('format': '{format_name}')")
        found = self.field(self.root, "version", int, "the file")
        if found > version:
            raise GraphFormatError(
                f"{self.name} has version {_short(found)} of {format_name}; this "
                f"jetrl-compile reads versions up to {version}: upgrade it"
            )
        if found < 1:
            self.fail(f"has version {_short(found)}; versions begin at 1")

    def only(self, item: Mapping[str, Any], known: Iterable[str], where: str) -> None:
        """Check that an object has no field beside the known ones.

        Raises:
            GraphFormatError: It has one. A misspelt field would else be lost silently.
        """
        names = list(known)
        for key in item:
            if key not in names:
                near = difflib.get_close_matches(key, names, n=1)
                hint = f"'{near[0]}'" if near else f"one of {', '.join(names)}"
                self.fail(f"has the unknown field {_short(key)} in {where}; use {hint}")

    def field(
        self,
        item: Mapping[str, Any],
        key: str,
        kind: type[T],
        where: str,
        default: T | None = None,
    ) -> T:
        """Return a field of exactly this type, or the default where it is missing.

        Raises:
            GraphFormatError: It is missing and has no default, or has another type.
        """
        value = item.get(key, default)
        if type(value) is not kind:
            if value is None and key not in item:
                self.fail(f"has no field '{key}' in {where}")
            self.fail(
                f"has {_short(value)} as '{key}' in {where}; needed is "
                f"{_TYPE_NAMES[kind]}"
            )
        return value

    def strings(self, item: Mapping[str, Any], key: str, where: str) -> dict[str, str]:
        """Return a field that is an object of strings, or an empty one.

        Raises:
            GraphFormatError: It is anything else.
        """
        found = self.field(item, key, dict, where, {})
        for name, value in found.items():
            if type(value) is not str:
                self.fail(
                    f"has {_short(value)} as '{key}.{name}' in {where}; needed is a "
                    "string"
                )
        return found


def read_document(path: Path | str, remedy: str) -> Document:
    """Read and parse a JSON file.

    Raises:
        GraphFormatError: The file cannot be read or is not a JSON object.
    """
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise GraphFormatError(
            f"cannot read {path}: {reason}; name a file that exists and can be read"
        ) from error
    return Document(str(path), data, remedy)


def is_number(value: object) -> bool:
    """Return whether a value is a finite number; true and false are none."""
    if type(value) is int:
        return True
    return type(value) is float and math.isfinite(value)


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, (dict, list)) else type_name(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _not_finite(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number in JSON")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the field {_short(twice)} occurs twice in one object")
    return table
