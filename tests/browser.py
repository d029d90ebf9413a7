"""A headless Chromium for tests of the HTML page."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

INSTALLED = ("chromium", "chromium-browser", "google-chrome")
# Where `make test` unpacks the one from npm, with libraries and fonts of its own.
UNPACKED = Path(sys.prefix) / "browser"


def find() -> tuple[str, dict[str, str | float | bool]]:
    """Return a browser's path and environment, or skip the test."""
    environment: dict[str, str | float | bool] = dict(os.environ)
    if path := os.environ.get("JETRL_CHROMIUM"):
        return path, environment
    for name in INSTALLED:
        if path := shutil.which(name):
            return path, environment
    if (UNPACKED / "chromium").exists():
        environment["LD_LIBRARY_PATH"] = str(UNPACKED / "al2023" / "lib")
        return str(UNPACKED / "chromium"), environment
    pytest.skip(
        "no Chromium: install one, set JETRL_CHROMIUM to its path, or install npm and "
        "run `make test`, which gets one"
    )


@contextmanager
def launched() -> Iterator[Browser]:
    """Run a headless Chromium; tests run as root too, where it has no sandbox."""
    path, environment = find()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"], env=environment
        )
        yield browser
        browser.close()
