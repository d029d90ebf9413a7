"""The bundled JavaScript is what the script that renews it says."""

import re
import shutil
from pathlib import Path

import pytest

from jetrl_compile.errors import OutputError
from jetrl_compile.show import vendor
from jetrl_compile.show.page import SCRIPTS

FOLDER = Path(vendor.__file__).parent / "assets" / "vendor"
FILES = [(package, *file) for package in vendor.PACKAGES for file in package.files]


@pytest.mark.parametrize(("package", "path", "name", "wanted"), FILES)
def test_digests(package: vendor.Package, path: str, name: str, wanted: str) -> None:
    assert vendor.digest((FOLDER / name).read_bytes()) == wanted, f"{package}: {path}"


def test_nothing_else_is_bundled() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {name for *_, name, _ in FILES}
    bundled = {f"vendor/{name}" for *_, name, _ in FILES if name.endswith(".js")}
    assert bundled == {name for name in SCRIPTS if name.startswith("vendor/")}


@pytest.mark.parametrize("package", vendor.PACKAGES, ids=lambda package: package.name)
def test_versions_and_licences(package: vendor.Package) -> None:
    texts = {name: vendor.asset(f"vendor/{name}") for _, name, _ in package.files}
    code = next(text for name, text in texts.items() if name.endswith(".js"))
    assert re.search(rf"[\"']{re.escape(package.version)}[\"']", code)
    licence = next(text for name, text in texts.items() if name.startswith("LICENSE"))
    assert package.licence == "MIT"
    assert "Permission is hereby granted, free of charge" in licence


def test_scripts_can_be_inlined() -> None:
    for name in SCRIPTS:
        text = vendor.asset(name)
        assert "</script" not in text.lower(), name
        assert "<!--" not in text, name
        assert "\r" not in text, name  # the parser would change it, and its digest


def test_no_npm_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(OutputError, match=r"install Node\.js"):
        vendor.fetch(vendor.PACKAGES[0], tmp_path)
