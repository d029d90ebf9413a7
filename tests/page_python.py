"""Python blocks of the documentation that cannot run here: what they name exists."""

import ast
from dataclasses import fields

from page_commands import check_vllm_settings, definition

from jetrl_compile.options import CompileOptions

OPTIONS = {field.name for field in fields(CompileOptions)}


def look_up(source: str) -> None:
    """Check imports from the package, options, settings and keywords of a block."""
    tree = ast.parse(source)
    imported: dict[str, ast.stmt | None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("jetrl_"):
            for alias in node.names:
                found = definition(str(node.module), alias.name)
                imported[alias.asname or alias.name] = found
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if _text(key) == "jetrl" and isinstance(value, ast.Dict):
                    check_vllm_settings([_text(key) for key in value.keys])
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            _check_call(node, imported)


def _check_call(node: ast.Call, imported: dict[str, ast.stmt | None]) -> None:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    given = {keyword.arg for keyword in node.keywords if keyword.arg}
    for keyword in node.keywords:
        if keyword.arg == "options" and isinstance(keyword.value, ast.Dict):
            keys = {_text(key) for key in keyword.value.keys}
            assert keys <= OPTIONS, f"no options of the backend: {keys - OPTIONS}"
    target = imported.get(name)
    if isinstance(target, ast.FunctionDef):
        known = {a.arg for a in (*target.args.args, *target.args.kwonlyargs)}
        known |= OPTIONS if target.args.kwarg else set()
        assert given <= known, f"{name} has no argument {given - known}"


def _text(node: ast.expr | None) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ""
