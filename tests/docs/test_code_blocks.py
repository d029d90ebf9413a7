"""All code of README.md and docs/ runs as it stands there.

The blocks of a page run in order, in one folder and with one set of names. A comment
before a block says what it needs where that is not here (`<!-- needs: a GPU -->`): then
what it names is looked up: modules, functions, options, settings. A block of the
language "text" after `<!-- prints -->` is what the block before it prints.
"""

import doctest
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

import page_commands
import page_python
import pytest
from pages import PAGES, PARSER, ROOT, Block, blocks
from tiny_models import IGNORE_SCRIPT_METHOD

from jetrl_compile import pipeline
from jetrl_compile.kernels import dispatch

SHELL = ("sh", "bash")
LANGUAGES = {"python", *SHELL, "text", "yaml", "toml"}
BY_PAGE = {page: found for page in PAGES if (found := list(blocks(page)))}
EVERY = [block for found in BY_PAGE.values() for block in found]
CHECKER = doctest.OutputChecker()
OUTPUT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
CODE_PATH = re.compile(
    r"^(?:jetrl_compile|passes|kernels|examples|tests|docs|benchmarks)/[\w/.-]*$"
)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that the pages name: a config, and two models with equal weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models")
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config.save_pretrained(folder / "CONFIG_DIR")
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16)
    for name in ("TRAINER_DIR", "ROLLOUT_DIR"):
        model.save_pretrained(folder / name)
    return folder


@pytest.fixture
def own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the passes and providers that a page adds."""
    monkeypatch.setattr(pipeline, "PASSES", pipeline.PASSES)
    registry = dict(dispatch._REGISTRY)
    monkeypatch.setattr(dispatch, "_REGISTRY", registry)
    monkeypatch.setattr(dispatch, "PROVIDERS", MappingProxyType(registry))


@IGNORE_SCRIPT_METHOD
@pytest.mark.usefixtures("fresh_dynamo", "own_registries")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("page", BY_PAGE)
def test_blocks(
    page: str,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for path in models.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for block in BY_PAGE[page]:
        try:
            if block.note.startswith("needs:"):
                look_up(block)
            elif block.language == "python":
                run_python(block, names)
                printed = capsys.readouterr().out
            elif block.language in SHELL:
                printed = "".join(
                    page_commands.run(page_commands.without_variables(words), status)
                    for words, status in page_commands.lines_of(block.text)
                )
            elif block.note == "prints":
                assert CHECKER.check_output(block.text, printed, OUTPUT), printed
        except Exception as error:
            raise AssertionError(f"{block}: {error}") from error


def run_python(block: Block, names: dict[str, Any]) -> None:
    """Run a block; a traceback shows the page's lines."""
    above = "\n" * (block.line - 1)
    exec(compile(above + block.text, str(ROOT / block.page), "exec"), names)


def look_up(block: Block) -> None:
    """Check a block that cannot run here."""
    if block.language == "python":
        page_python.look_up(block.text)
    else:
        assert block.language in SHELL, block.language
        for words, _ in page_commands.lines_of(block.text):
            page_commands.look_up(words)


def test_languages_and_notes() -> None:
    for block in EVERY:
        assert block.language in LANGUAGES, block
        if block.note.startswith("needs:"):
            assert len(block.note.split()) > 1, block
        if block.note == "prints":
            assert block.language == "text", block


@pytest.mark.parametrize("page", PAGES)
def test_names_in_the_text_exist(page: str) -> None:
    for token in PARSER.parse((ROOT / page).read_text()):
        for child in token.children or ():
            text = child.content
            if child.type != "code_inline":
                continue
            if re.match(r"(?:jetrl|make) [a-z-]+(?: |$)", text) and "|" not in text:
                words = [word for word in text.split() if word != "..."]
                page_commands.look_up(words)
            elif CODE_PATH.match(text) and not text.endswith("__init__.py"):
                assert (ROOT / text).exists(), f"{page}: {text}"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for token in PARSER.parse((ROOT / page).read_text()):
        for child in token.children or ():
            for key in ("href", "src"):
                target = str(child.attrGet(key) or "").partition("#")[0]
                if target and not re.match(r"https?:|mailto:", target):
                    assert ((ROOT / page).parent / target).exists(), (page, target)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("from jetrl_compile.rollout import no_such", "has no no_such"),
        ("torch.compile(m, backend='jetrl', options={'recip': 1})", "no options"),
        ("LLM(m, additional_config={'jetrl': {'fus': 0}})", "fus"),
        ("from jetrl_compile.rollout import refit\nrefit(a, b, c=1)", "no argument"),
    ],
)
def test_a_wrong_name_is_seen(source: str, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        page_python.look_up(source)


@pytest.mark.parametrize(
    "line",
    [
        "jetrl check a.json b.json --frmat md",
        "jetrl chck a.json",
        "jetrl bench stack qwen3-8b --no-such",
        "make tests",
        "pip install '.[hoper]'",
        "python examples/no_such.py",
        "python -m verl.trainer.main_ppo actor.jetrl_recip=jetrl",
        "curl somewhere",
    ],
)
def test_a_wrong_command_is_seen(line: str) -> None:
    for words, _ in page_commands.lines_of(line):
        with pytest.raises(AssertionError):
            page_commands.look_up(words)
