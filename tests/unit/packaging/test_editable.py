"""What an editable install, as `make setup` makes it, puts beside a clone called rheostat."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from .conftest import ROOTS, copy_sources

SCRIPT = """
import json, rheostat, rheostat_engine, rheostat_server
from importlib.metadata import distribution

sinks = distribution("rheostat").entry_points.select(group="rheostat.capture_sinks")
print(json.dumps({
    "files": [rheostat.__file__, rheostat_engine.__file__, rheostat_server.__file__],
    "connects": callable(rheostat.connect),
    "sinks": sorted(entry.name for entry in sinks),
    "origin": json.loads(distribution("rheostat").read_text("direct_url.json")),
}))
"""
FINDER = 'build-backend = "setuptools.build_meta"'


def clean() -> dict[str, str]:
    """An environment in which nothing is importable that is not installed."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone called rheostat, and a script beside it."""
    folder = tmp_path / "rheostat"
    folder.mkdir()
    copy_sources(folder)
    (tmp_path / "script.py").write_text(SCRIPT)
    return folder


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A virtual environment that has what this one has, but for the project itself."""
    venv.create(tmp_path / "venv", with_pip=False)
    borrowed = tmp_path / "borrowed"
    borrowed.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "rheostat" not in path.name and path.suffix != ".pth":
            (borrowed / path.name).symlink_to(path)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(str(borrowed))
    return tmp_path / "venv" / "bin" / "python"


def install(clone: Path, python: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    offline = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*pip, "install", *offline, "--editable", str(clone)],
        capture_output=True,
        text=True,
        check=False,
        env=clean(),
    )
    assert done.returncode == 0, done.stderr


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, env=clean()
    )


def check(clone: Path, python: Path) -> None:
    """A script beside the clone, and the command there, use the clone's packages."""
    done = run(str(python), "script.py", cwd=clone.parent)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [Path(file).is_relative_to(clone) for file in report["files"]] == [True] * 3
    assert report["connects"]
    assert report["sinks"] == ["filesystem", "logging", "memory"]
    assert report["origin"] == {"dir_info": {"editable": True}, "url": clone.as_uri()}
    command = run(str(python.with_name("rheostat")), "--version", cwd=clone.parent)
    assert command.stdout.startswith("rheostat 0."), command.stderr


def test_a_script_beside_a_clone_called_rheostat_imports_the_package(
    clone: Path, python: Path
) -> None:
    before = set(clone.rglob("*"))
    install(clone, python)
    written = {path for path in set(clone.rglob("*")) - before if "__pycache__" not in path.parts}
    check(clone, python)
    assert {path.relative_to(clone).parts[-2:] for path in written if path.is_dir()} <= {
        (folder.rpartition("/")[2], "rheostat.egg-info") for folder in ROOTS
    }


def test_an_install_by_setuptools_finder_is_replaced_and_removed_whole(
    clone: Path, python: Path
) -> None:
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    before = {path.name for path in packages.iterdir()}
    project = clone / "pyproject.toml"
    ours = project.read_text()
    project.write_text(re.sub(r"(?m)^build-backend = .*\nbackend-path = .*$", FINDER, ours))
    install(clone, python)
    shadowed = run(str(python), "script.py", cwd=clone.parent)
    assert "'rheostat' has no attribute 'connect'" in shadowed.stderr
    project.write_text(ours)
    install(clone, python)
    check(clone, python)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    done = run(*pip, "uninstall", "--yes", "rheostat", cwd=clone.parent)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in packages.iterdir()} - {"__pycache__"} == before
    assert not python.with_name("rheostat").exists()
