"""The set-up takes no CUDA build, removes what does not import, and agrees with the lock."""

import importlib.util
import re
import tomllib
import venv
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version


@pytest.fixture(scope="module")
def setup(root: Path) -> ModuleType:
    loader = SourceFileLoader("rheostat_tools_setup", str(root / "tools" / "setup"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class Pip:
    """Stands for pip: records what is asked of it; a dry run succeeds if it `finds`."""

    def __init__(self, *, finds: bool = True) -> None:
        self.finds = finds
        self.calls: list[tuple[str, ...]] = []

    def __call__(self, folder: Path, *arguments: str, quiet: bool = False) -> bool:
        self.calls.append(arguments)
        return self.finds or "--dry-run" not in arguments


DRY_RUN = ("install", "--dry-run", "--no-deps", "torch==2.13.0+cpu")


def test_torch_comes_from_where_pip_finds_a_cpu_build_by_itself(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pip = Pip()
    monkeypatch.setattr(setup, "pip", pip)
    setup.install_torch(tmp_path)
    assert pip.calls == [DRY_RUN, ("install", "--no-deps", "torch==2.13.0+cpu")]


def test_torch_comes_from_pytorch_s_cpu_index_where_pip_finds_no_cpu_build(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pip = Pip(finds=False)
    monkeypatch.setattr(setup, "pip", pip)
    setup.install_torch(tmp_path)
    index = ("--index-url", "https://download.pytorch.org/whl/cpu")
    assert pip.calls == [DRY_RUN, ("install", "--no-deps", *index, "torch==2.13.0+cpu")]


def test_a_companion_that_does_not_import_is_removed_and_one_that_does_stays(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pip = Pip()
    monkeypatch.setattr(setup, "pip", pip)
    venv.create(tmp_path, with_pip=False)
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    (packages / "torchvision.py").write_text("raise RuntimeError('no such operator')")
    (packages / "torchaudio.py").write_text("")
    setup.remove_broken_companions(tmp_path)
    assert pip.calls == [("uninstall", "--yes", "--quiet", "torchvision")]


def test_a_library_that_vllm_needs_is_asked_for_by_the_name_of_its_package(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(setup.ctypes, "CDLL", missing)
    with pytest.raises(SystemExit, match="apt-get install libnuma1"):
        setup.check_machine()


def locked(root: Path) -> dict[str, Version]:
    lines = (root / "requirements" / "ci.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    return {
        canonicalize_name(pin.name): Version(str(pin.specifier).removeprefix("==")) for pin in pins
    }


def test_the_lock_holds_every_requirement_of_ci_within_its_range(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    installed = [*project["dependencies"], *extras["cpu"], *extras["dev"], *extras["files"]]
    wanted = [Requirement(line) for line in installed]
    pins = locked(root)
    outside = [
        str(requirement)
        for requirement in wanted
        if (version := pins.get(canonicalize_name(requirement.name))) is None
        or version not in requirement.specifier
    ]
    assert outside == []


def test_the_lock_and_the_set_up_mean_the_same_torch(root: Path, setup: ModuleType) -> None:
    assert f"torch=={locked(root)['torch']}" == setup.TORCH


def test_the_lock_pins_exact_versions_and_names_no_file_or_index(root: Path) -> None:
    lines = (root / "requirements" / "ci.txt").read_text().splitlines()
    pin = re.compile(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.+!-]+")
    assert [line for line in lines if not line.startswith("#") and not pin.fullmatch(line)] == []


def test_buf_is_the_one_that_the_generated_code_is_made_with(root: Path) -> None:
    generators = (root / "tools" / "generate-requirements.txt").read_text().splitlines()
    assert f"buf-bin=={locked(root)['buf-bin']}" in generators
