"""The package as a whole: what it exposes, and what it must not pull in."""

import importlib
import pkgutil
import subprocess
import sys
from importlib import metadata

import rheostat


def test_the_client_imports_neither_torch_nor_vllm_nor_the_server():
    modules = [
        name
        for _, name, _ in pkgutil.walk_packages(rheostat.__path__, "rheostat.")
        if not name.endswith("__main__")
    ]
    program = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        "heavy = {'torch', 'vllm', 'rheostat_server', 'rheostat_engine', 'matplotlib'}\n"
        "heavy |= {'datasets', 'pyarrow', 'safetensors', 'gguf', 'pandas', 'xarray'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_everything_public_is_listed_once_in_order_and_explained():
    names = rheostat.__all__
    assert names == sorted(set(names))
    silent = [name for name in names if not getattr(rheostat, name).__doc__]
    assert silent == []


def test_the_version_is_that_of_the_distribution():
    assert rheostat.__version__ == metadata.version("rheostat")


def test_stored_captures_are_there_once_the_package_is_imported():
    program = "import rheostat; print(rheostat.captures.open_captures.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "open_captures\n"


def test_both_clients_have_the_same_methods():
    sync, aio = (
        {
            (owner.__name__, name)
            for owner in (
                module.Engine,
                module.Vectors,
                module.Steering,
                module.Stream,
                module.Session,
                module.Subscription,
                module.Watch,
            )
            for name in dir(owner)
            if not name.startswith("_")
        }
        for module in (rheostat, importlib.import_module("rheostat.aio"))
    )
    assert sync == aio
