"""The JavaScript libraries inside the page: what they are, and how to renew them.

    python -m jetrl_compile.show.vendor [--check]

This fetches each package at its pinned version with npm and copies its files as they
are, with its licence, into assets/vendor/. To move to another version, edit `PACKAGES`,
run it, and write the digests that it prints here.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from jetrl_compile.errors import OutputError


@dataclass(frozen=True, slots=True)
class Package:
    """A library from npm.

    Attributes:
        name: In npm.
        version: Exactly.
        licence: Its SPDX name; the text is beside the files.
        files: For each file in the package, its name here and its SHA-256.
    """

    name: str
    version: str
    licence: str
    files: tuple[tuple[str, str, str], ...]


# cytoscape draws, pans and zooms; dagre lays out in layers and routes edges around
# boxes. Both have releases of this autumn, and have no dependencies that are not in
# these files.
PACKAGES = (
    Package(
        "cytoscape",
        "3.35.0",
        "MIT",
        (
            (
                "dist/cytoscape.min.js",
                "cytoscape.min.js",
                "71fa9ebec21a7ca2c40cff6aacc30d1f6464e363662ad4b2c197e1adc770cd94",
            ),
            (
                "LICENSE",
                "LICENSE.cytoscape.txt",
                "eb319c6e6f233607f71e8e2f450391751883cfc0eeb3ca7ef574c13d1d9c2203",
            ),
        ),
    ),
    Package(
        "@dagrejs/dagre",
        "3.1.3",
        "MIT",
        (
            (
                "dist/dagre.min.js",
                "dagre.min.js",
                "54a503e346f93ca0bb10abe7999587e037262935687aca45eb4e4b0f64bbb578",
            ),
            (
                "LICENSE",
                "LICENSE.dagre.txt",
                "6a349742a6cb219d5a2fc8d0844f6d89a6efc62e20c664450d884fc7ff2d6015",
            ),
        ),
    ),
)


def asset(name: str) -> str:
    """Return the text of a file in assets/."""
    folder = resources.files("jetrl_compile.show").joinpath("assets")
    return folder.joinpath(name).read_text(encoding="utf-8")


def digest(data: bytes) -> str:
    """Return the SHA-256 of bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def fetch(package: Package, folder: Path) -> dict[str, bytes]:
    """Return the files of a package as npm has them, by their names here.

    Args:
        package: Which.
        folder: For the downloaded archive.

    Raises:
        OutputError: There is no npm, or it cannot fetch the package.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise OutputError("npm was not found; install Node.js, then run this again")
    command = [npm, "pack", "--silent", f"{package.name}@{package.version}"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise OutputError(
            f"npm cannot fetch {package.name} {package.version}: {done.stderr.strip()}"
        )
    with tarfile.open(folder / done.stdout.split()[-1]) as archive:
        found = {}
        for path, name, _ in package.files:
            member = archive.extractfile(f"package/{path}")
            assert member is not None, f"{package.name} has no file {path}"
            found[name] = member.read()
    return found


def main() -> int:
    """Write the files; with --check only compare. Return 1 where something differs."""
    parser = argparse.ArgumentParser(description="Renew the page's libraries.")
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    target = Path(__file__).parent / "assets" / "vendor"
    status = 0
    for package in PACKAGES:
        with tempfile.TemporaryDirectory() as folder:
            files = fetch(package, Path(folder))
        for _, name, wanted in package.files:
            found = digest(files[name])
            if found != wanted:
                print(f"{name}: npm has {found}, this file says {wanted or 'nothing'}")
                status = 1
            if not check:
                (target / name).write_bytes(files[name])
    return status


if __name__ == "__main__":
    sys.exit(main())
