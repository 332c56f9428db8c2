"""The tree under test, and the wheel that is built from a copy of it."""

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ROOTS = ("clients/python", "server", "engine_ext")
CLUTTER = ("__pycache__", "*.egg-info", "build")


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


def copy_sources(target: Path) -> None:
    """Copy what a build needs."""
    for name in (*ROOTS, "tools"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns(*CLUTTER))
    for name in ("pyproject.toml", "LICENSE", "MANIFEST.in", "README.md"):
        shutil.copy(ROOT / name, target)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel, built from a copy: a build leaves folders behind that a later one would pack."""
    source = tmp_path_factory.mktemp("source")
    copy_sources(source)
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    built = subprocess.run(
        [*command, "--wheel-dir", str(target), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (path,) = target.iterdir()
    with zipfile.ZipFile(path) as archive:
        yield archive
