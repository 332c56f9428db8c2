"""Builds the project with setuptools, and editable installs with a plain .pth file.

Why not setuptools' own editable install: for packages in several source folders it installs a
finder on `sys.meta_path`, which Python asks after the folders of `sys.path`. Beside a clone that is
called `rheostat`, `import rheostat` then finds the clone itself, as a namespace package. A package
in a folder of a .pth file wins against a namespace package, wherever the script lies.

Only what the packaging standards define is used: PEP 517 for the metadata, PEP 660 for the wheel of
an editable install, PEP 427 for what a wheel holds.
"""

import base64
import hashlib
import tempfile
import tomllib
import zipfile
from pathlib import Path

from setuptools.build_meta import *  # noqa: F403  # every hook but one is setuptools' own
from setuptools.build_meta import get_requires_for_build_wheel, prepare_metadata_for_build_wheel

_WHEEL = """\
Wheel-Version: 1.0
Generator: rheostat
Root-Is-Purelib: true
Tag: py3-none-any
"""


def get_requires_for_build_editable(config_settings: dict[str, str] | None = None) -> list[str]:
    """As for a wheel."""
    return get_requires_for_build_wheel(config_settings)


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: dict[str, str] | None = None
) -> str:
    """As for a wheel."""
    return prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, str] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Writes a wheel that puts the source folders on the path; returns its name."""
    with tempfile.TemporaryDirectory() as folder:
        info = prepare_metadata_for_build_editable(folder, config_settings)
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(Path(folder, info).rglob("*"))
            if path.is_file()
        }
    project = info.removesuffix(".dist-info")
    files[f"{info}/WHEEL"] = _WHEEL.encode()
    files[f"__editable__.{project}.pth"] = "".join(f"{path}\n" for path in _sources()).encode()
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    wheel = f"{project}-py3-none-any.whl"
    with zipfile.ZipFile(Path(wheel_directory, wheel), "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return wheel


def _sources() -> list[Path]:
    """The folders that hold the packages, of which pyproject.toml has the list."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    return [
        Path(folder).resolve()
        for folder in project["tool"]["setuptools"]["packages"]["find"]["where"]
    ]


def _record(files: dict[str, bytes], own: str) -> bytes:
    """The list by which an installer knows what it has installed."""
    lines = []
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(content)}\n")
    return "".join([*lines, f"{own},,\n"]).encode()
