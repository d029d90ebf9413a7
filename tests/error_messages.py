"""Every error message in the sources, found by reading them: nothing is run."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jetrl_compile import errors

ROOT = Path(__file__).parent.parent
FOLDERS = ("jetrl_compile", "passes", "kernels", "examples")
HOLE = "..."  # stands for what a message is given
CLASSES = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.JetRLError)
}
# Methods that raise: what they are given is a part of the message.
RAISERS = {"fail": "GraphFormatError", "BadParameter": "BadParameter"}
# Caught where they are raised (their text reaches users within another message), those
# of Python itself, and an exit status, which has no text.
OTHERS = {"ValueError", "KeyError", "AttributeError", "NotImplementedError", "Exit"}


@dataclass(frozen=True)
class Message:
    """An error message.

    Attributes:
        kind: The class of the exception; "" where it is the caller's choice.
        text: The message, "..." for each part that is filled in.
        place: File and line.
    """

    kind: str
    text: str
    place: str


def source_files() -> list[Path]:
    """The sources, each once: the package reaches three folders by links."""
    links = {ROOT / "jetrl_compile" / name for name in FOLDERS[1:]}
    paths = [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in paths if not links & set(path.parents)]


def messages() -> list[Message]:
    """Every message of every source file."""
    return [found for path in source_files() for found in messages_of(path)]


def messages_of(path: Path) -> Iterator[Message]:
    """The messages of one file."""
    tree = ast.parse(path.read_text())
    raised = {
        node.exc
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = _name(node.func)
        if name in CLASSES:
            kind = name
        elif name in RAISERS:
            kind = RAISERS[name]
        elif name == "warn" and len(node.args) > 1:
            kind = _name(node.args[1])
        elif node in raised and name == "error":
            kind = ""  # a class that is an argument
        elif node in raised and name not in OTHERS and not _returns(tree, name):
            raise AssertionError(f"{path}:{node.lineno}: raises {name}, see OTHERS")
        else:
            continue
        where = f"{path.relative_to(ROOT)}:{node.lineno}"
        for text in _texts(node.args[0], tree):
            if any(char.isalpha() for char in text):  # not a frame around another one
                yield Message(kind, " ".join(text.split()), where)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _texts(node: ast.expr, tree: ast.Module) -> list[str]:
    """What an expression may say; of a call or an attribute, what it may be."""
    if isinstance(node, ast.Call):
        return [
            t for value in _returns(tree, _name(node.func)) for t in _texts(value, tree)
        ]
    if isinstance(node, ast.Attribute):
        values = [
            assign.value
            for assign in ast.walk(tree)
            if isinstance(assign, ast.Assign)
            and any(_name(target) == node.attr for target in assign.targets)
        ]
        return [t for value in values for t in _texts(value, tree)]
    if isinstance(node, ast.IfExp):
        return _texts(node.body, tree) + _texts(node.orelse, tree)
    text = _template(node)
    assert text != HOLE, f"write out what {ast.unparse(node)!r} says"
    return [text]


def _returns(tree: ast.Module, name: str) -> list[ast.expr]:
    return [
        inner.value
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == name
        for inner in ast.walk(node)
        if isinstance(inner, ast.Return) and inner.value is not None
    ]


def _template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else HOLE
            for part in node.values
        )
    if isinstance(node, ast.BinOp):
        return _template(node.left) + _template(node.right)
    return HOLE
