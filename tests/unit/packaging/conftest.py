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


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel, built from a copy: a build leaves folders behind that a later one would pack."""
    source = tmp_path_factory.mktemp("source")
    for name in ROOTS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns(*CLUTTER))
    for path in ROOT.iterdir():
        if path.name in {"pyproject.toml", "LICENSE", "README.md"}:
            shutil.copy(path, source)
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
