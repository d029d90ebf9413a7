"""Build the wheel and use it outside the checkout: `make wheel-check`."""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

USE = """
import importlib.metadata, sys
from pathlib import Path

import torch
import jetrl_compile.errors

site = sys.argv[1]
assert jetrl_compile.errors.__file__.startswith(site), jetrl_compile.errors.__file__

def entry(group):
    points = importlib.metadata.entry_points(group=group, name="jetrl")
    (value,) = {point.value for point in points}
    return value

assert entry("console_scripts") == "jetrl_compile.cli:main"
assert entry("torch_dynamo_backends") == "jetrl_compile.backend:jetrl"
assert "jetrl" in torch._dynamo.list_backends()

linear = torch.nn.Linear(200, 72, dtype=torch.bfloat16)
x = torch.randn(5, 200, dtype=torch.bfloat16, requires_grad=True)
options = {"lowering": "aot"}
y = torch.compile(linear, backend="jetrl", options=options, fullgraph=True)(x)
y.float().square().sum().backward()
assert y.shape == (5, 72)
assert x.grad is not None and linear.weight.grad is not None
assert not torch.equal(y, linear(x)), "FP8 would differ from BF16"
"""


def run(*command: str, **environment: str) -> str:
    """Run a command in an empty folder and return what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nfailed: {' '.join(command[:6])}")
    return done.stdout


def missing_from(wheel: Path) -> set[str]:
    """Return the checkout's sources that the wheel lacks."""
    names = set(zipfile.ZipFile(wheel).namelist())
    needed = {"jetrl_compile/py.typed"}
    for folder in ("jetrl_compile", "passes", "kernels", "examples"):
        prefix = "" if folder == "jetrl_compile" else "jetrl_compile/"
        sources = (ROOT / folder).rglob("*.py")
        needed |= {prefix + str(path.relative_to(ROOT)) for path in sources}
    assets = (ROOT / "jetrl_compile" / "show" / "assets").rglob("*.*")
    needed |= {str(path.relative_to(ROOT)) for path in assets}
    return {name for name in needed if "__pycache__" not in name} - names


def main() -> None:
    """Build, install into a folder of its own, and use."""
    with tempfile.TemporaryDirectory() as temporary:
        dist, site = Path(temporary, "dist"), Path(temporary, "site")
        build = (sys.executable, "-m", "build", "--no-isolation", "-o", str(dist))
        run(*build, str(ROOT))  # an sdist, and the wheel from that sdist
        (wheel,) = dist.glob("*.whl")
        if missing := missing_from(wheel):
            sys.exit(f"the wheel lacks {', '.join(sorted(missing))}")
        pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
        target = ("--target", str(site), str(wheel))
        run(*pip, "install", "--no-deps", "--no-index", *target)
        path = {"PYTHONPATH": str(site)}
        run(sys.executable, "-W", "error::UserWarning", "-c", USE, str(site), **path)
        version = run(str(site / "bin" / "jetrl"), "--version", **path).strip()
        print(f"the wheel works outside the checkout: {version}")


if __name__ == "__main__":
    main()
