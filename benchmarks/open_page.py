"""How long the page of a large model takes to make, to open, and to open a layer.

    python benchmarks/open_page.py [--browser PATH]

From configs, without weights: the training graphs of Qwen3-32B and DeepSeek-V3, made by
`jetrl graph`, drawn by `jetrl show`, opened in a headless Chromium from file://. The
medians of 5 openings; the frame time is the median of 60 frames of panning with all
layers open, drawn in software where there is no GPU. Exit status 1 if Qwen3-32B takes
3 s or more to open.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright
from trace_configs import config_of

MOST_SECONDS = 3.0
OPENINGS = 5
INSTALLED = ("chromium", "chromium-browser", "google-chrome")
FRAMES = """async () => {
  const times = [];
  let before = performance.now();
  for (let i = 0; i < 60; i += 1) {
    jetrl.cy.panBy({ x: i % 2 ? 9 : -9, y: 5 });
    await new Promise(requestAnimationFrame);
    times.push(performance.now() - before);
    before = performance.now();
  }
  return times;
}"""
TOGGLE = """() => {
  const before = performance.now();
  jetrl.toggle(0);
  return performance.now() - before;
}"""


def default_browser() -> str:
    """Return a browser: an installed one, or the one that `make test` unpacks."""
    for name in INSTALLED:
        if path := shutil.which(name):
            return path
    return str(Path(sys.prefix) / "browser" / "chromium")


def make_page(name: str, folder: Path) -> tuple[Path, float]:
    """Make a model's page; return it with the seconds that `jetrl show` took."""
    config_of(name).save_pretrained(folder)
    graph, page = folder / "graph.json", folder / "flow.html"
    jetrl = [sys.executable, "-m", "jetrl_compile.cli"]
    quiet: dict[str, Any] = {"check": True, "capture_output": True}
    subprocess.run([*jetrl, "graph", str(folder), "-o", str(graph)], **quiet)
    start = time.perf_counter()
    subprocess.run([*jetrl, "show", str(graph), "-o", str(page)], **quiet)
    return page, time.perf_counter() - start


def measure(browser: Browser, page: Path) -> dict[str, float]:
    """Open a page several times; return medians in milliseconds."""
    ready, layer, frame = [], [], []
    for _ in range(OPENINGS):
        tab = browser.new_page(viewport={"width": 1500, "height": 1000})
        start = time.perf_counter()
        tab.goto(page.as_uri())
        tab.wait_for_selector("html[data-ready]", state="attached")
        ready.append(1000 * (time.perf_counter() - start))
        layer.append(tab.evaluate(TOGGLE))
        tab.click("#open-all")
        frame.append(statistics.median(tab.evaluate(FRAMES)))
        boxes = tab.evaluate("jetrl.seen.elements.size")
        tab.close()
    return {
        "open": statistics.median(ready),
        "layer": statistics.median(layer),
        "frame": statistics.median(frame),
        "boxes": boxes,
    }


def main() -> int:
    """Measure both models; return the exit status."""
    parser = argparse.ArgumentParser(description="Measure the page of large models.")
    parser.add_argument("--browser", default=default_browser())
    missed = False
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=parser.parse_args().browser, args=["--no-sandbox"]
        )
        for name in ("qwen3-32b", "deepseek-v3"):
            with tempfile.TemporaryDirectory() as folder:
                page, seconds = make_page(name, Path(folder))
                found = measure(browser, page)
                size = page.stat().st_size / 1000
            missed |= name == "qwen3-32b" and found["open"] > 1000 * MOST_SECONDS
            print(
                f"{name}: jetrl show {seconds:.1f} s, {size:.0f} kB, "
                f"opens in {found['open']:.0f} ms, a layer in {found['layer']:.0f} ms, "
                f"frame {found['frame']:.0f} ms with {found['boxes']} boxes"
            )
        print(f"Chromium {browser.version}")
        browser.close()
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
