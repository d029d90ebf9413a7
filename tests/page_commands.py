"""Commands of the documentation: run where they can be, and looked up elsewhere."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import typer.main
from pages import ROOT
from typer.testing import CliRunner

from jetrl_compile import _HOMES, cli
from jetrl_compile.integrations.vllm.settings import KEYS

JETRL = typer.main.get_command(cli.app)
MAKEFILE = (ROOT / "Makefile").read_text()
PYPROJECT = (ROOT / "pyproject.toml").read_text()
CONSTRAINTS = (ROOT / "constraints.txt").read_text().lower()
STATUS = re.compile(r"# exits (\d)")


def lines_of(text: str) -> Iterator[tuple[list[str], int]]:
    """The commands of a shell block, each with the exit status that it claims."""
    for line in text.replace("\\\n", " ").splitlines():
        status = STATUS.search(line)
        words = shlex.split(line, comments=True)
        if words:
            yield words, int(status[1]) if status else 0


def without_variables(words: list[str]) -> list[str]:
    """The words behind VARIABLE=value."""
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return words


def run(words: list[str], status: int) -> str:
    """Run a `jetrl` command and return what it printed; look up another one."""
    if words[0] != "jetrl":
        look_up(words)
        return ""
    result = CliRunner().invoke(cli.app, words[1:])
    assert result.exit_code == status, f"exits {result.exit_code}: {result.output}"
    return result.stdout


def look_up(words: list[str]) -> None:
    """Check that what a command names exists: options, files, targets, extras."""
    words = without_variables(words)
    for word in words:
        if setting := re.search(r"\bjetrl_(\w+)=", word):
            assert setting[1] in verl_settings(), word
    match words:
        case [] | ["export" | "cd" | "git", *_]:
            pass
        case ["jetrl", *rest]:
            parse_jetrl(rest)
        case ["make", *rest]:
            for word in rest:
                known = re.search(rf"^{re.escape(word)}:", MAKEFILE, re.MULTILINE)
                assert "=" in word or known, f"make has no target {word}"
        case ["pip", "install", *rest]:
            for word in rest:
                check_requirement(word)
        case ["python", "-m", module, *_]:
            own = ROOT / (module.replace(".", "/") + ".py")
            assert own.exists() or not module.startswith("jetrl_compile"), module
        case ["python" | "pytest" | "bash" | "sh", *rest]:
            for word in rest:
                if not word.startswith("-") and "/" in word:
                    assert (ROOT / word).exists(), word
        case _:
            raise AssertionError(f"what does {words[0]} do? see tests/page_commands.py")


def parse_jetrl(words: list[str]) -> None:
    """Check that a command of `jetrl` has these options, without running it."""
    command = JETRL
    while words and not words[0].startswith("-"):
        commands = getattr(command, "commands", None)
        if commands is None:
            break
        assert words[0] in commands, f"jetrl has no command {words[0]}"
        command, words = commands[words[0]], words[1:]
    known = {name for param in command.params for name in param.opts}
    known |= {name for param in command.params for name in param.secondary_opts}
    for word in words:
        if word.startswith("-") and word not in ("-h", "--help"):
            assert word.partition("=")[0] in known, f"{command.name} has no {word}"


def check_requirement(word: str) -> None:
    """Check that a requirement is this package with its extras, or a pinned one."""
    if word.startswith("-") or word == "constraints.txt":
        return
    name, _, extras = word.rstrip("]").partition("[")
    if name in (".", "jetrl-compile"):
        for extra in filter(None, extras.split(",")):
            assert re.search(rf"^{extra} = \[", PYPROJECT, re.MULTILINE), word
    else:
        assert f"\n{name.partition('==')[0].lower()}==" in CONSTRAINTS, word


def verl_settings() -> set[str]:
    """The settings of the integration with verl, which cannot be imported here."""
    found = definition("jetrl_compile.integrations.verl.settings", "Settings")
    assert isinstance(found, ast.ClassDef)
    targets = [node.target for node in found.body if isinstance(node, ast.AnnAssign)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def check_vllm_settings(keys: list[str]) -> None:
    """Check keys of `additional_config={"jetrl": {...}}`."""
    assert set(keys) <= set(KEYS), keys


def definition(module: str, name: str) -> ast.stmt | None:
    """Return what defines a name in a module of the package; None for a module."""
    if module == "jetrl_compile" and name in _HOMES:
        return definition(f"jetrl_compile.{_HOMES[name]}", name)
    folder = ROOT / module.replace(".", "/")
    if (folder / f"{name}.py").exists():
        return None
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    for node in ast.parse(Path(path).read_text()).body:
        names = [getattr(node, "name", "")]
        if isinstance(node, ast.Assign):
            names = [getattr(target, "id", "") for target in node.targets]
        elif isinstance(node, ast.AnnAssign):
            names = [getattr(node.target, "id", "")]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        if name in names:
            return node
    raise AssertionError(f"{module} has no {name}")
