"""Each room imports only what stands to its right.

rheostat (the client) -> rheostat_wire <- rheostat_server -> rheostat_engine -> vLLM, torch

bench, which is not a part of the product, may import all of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from .imports import Import, imports_in, imports_of

HEAVY = ("torch", "transformers", "triton", "vllm")
# Of vLLM, the server may use the engine that it embeds and what that takes, returns and counts.
VLLM_FACE = (
    "vllm.AsyncEngineArgs",
    "vllm.LLM",
    "vllm.SamplingParams",
    "vllm.config",
    "vllm.engine.arg_utils",
    "vllm.exceptions",
    "vllm.inputs",
    "vllm.logprobs",
    "vllm.lora.request",
    "vllm.outputs",
    "vllm.platforms",
    "vllm.sampling_params",
    "vllm.tokenizers",
    "vllm.usage.usage_lib",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.exceptions",
    "vllm.v1.metrics",
)
ENGINE_LAYERS = (
    "cached_property",
    "immutable",
    "plan",
    "settings",
    "process_end",
    "model_sites",
    "output",
    "channel",
    "worker.state",
    "worker.transport",
    "worker.capture",
    "worker.steering",
    "worker",
    "sites",
    "adapters",
    "async_llm",
    "",
)
"""Folders and modules of the engine, the lowest first; the last is the package's face."""
ENGINE_HELPERS = {"__init__", "cached_property", "immutable", "process_end"}
"""Modules of the engine that the server may use too: they are about Python alone."""
SERVER_LAYERS = (
    "errors",
    "config",
    "limits",
    "validation",
    "tensors",
    "tasks",
    "prompts",
    "selectors",
    "vectors",
    "sinks",
    "runs",
    "steering",
    "capture",
    "delivery",
    "engine",
    "subscriptions",
    "monitors",
    "admission",
    "requests",
    "generation",
    "derivation",
    "sweeps",
    "front_ends",
    "api",
    "serve",
)
"""Folders and modules of the server, the lowest first."""


MOST_ROOMS = 25
"""Folders and modules of the server that a newcomer may have to know."""


def client(root: Path) -> Iterable[Import]:
    return imports_in(root / "clients/python/rheostat", below=root)


def server(root: Path) -> Iterable[Import]:
    return imports_in(root / "server/rheostat_server", below=root)


def engine(root: Path) -> Iterable[Import]:
    return imports_in(root / "engine_ext/rheostat_engine", below=root)


def listed(imports: Iterable[Import]) -> list[str]:
    return [str(found) for found in imports]


def test_the_client_knows_no_engine(root: Path) -> None:
    assert listed(found for found in client(root) if found.below(*HEAVY, "rheostat_engine")) == []


def test_the_client_reaches_the_server_only_from_its_command_and_only_when_asked(
    root: Path,
) -> None:
    reaching = [found for found in client(root) if found.below("rheostat_server")]
    command = root / "clients/python/rheostat/_cli"
    assert (
        listed(
            found
            for found in reaching
            if not found.lazy or not (root / found.path).is_relative_to(command)
        )
        == []
    )
    assert reaching != []


def test_both_ends_share_the_wire_and_nothing_else(root: Path) -> None:
    assert listed(found for found in server(root) if found.below("rheostat")) == []
    assert any(found.below("rheostat_wire") for found in server(root))
    assert any(found.below("rheostat_wire") for found in client(root))


def test_the_wire_knows_neither_end(root: Path) -> None:
    wire = list(imports_in(root / "clients/python/rheostat_wire", below=root))
    ends = ("rheostat", "rheostat_server", "rheostat_engine", "rheostat_bench")
    assert listed(found for found in wire if found.below(*HEAVY, *ends)) == []


def test_the_server_knows_the_public_face_of_the_engine_alone(root: Path) -> None:
    face = root / "engine_ext/rheostat_engine"
    inside = {path.stem for path in face.iterdir()} - ENGINE_HELPERS
    used = [found for found in server(root) if found.below("rheostat_engine")]
    deep = [f"rheostat_engine.{name}" for name in inside]
    assert listed(found for found in used if found.below(*deep)) == []
    assert used != []


def test_vllm_enters_the_server_in_the_modules_named_for_it(root: Path) -> None:
    used = [found for found in server(root) if found.below("vllm")]
    assert listed(found for found in used if not found.path.name.startswith("vllm_")) == []
    assert used != []


def test_the_server_knows_the_face_of_vllm_alone(root: Path) -> None:
    used = [found for found in server(root) if found.below("vllm") and found.name != "vllm"]
    assert listed(found for found in used if not found.below(*VLLM_FACE)) == []


def test_the_engine_knows_neither_grpc_nor_the_wire_nor_the_server(root: Path) -> None:
    left = ("google", "grpc", "grpc_health", "grpc_reflection", "grpc_status")
    rooms = ("rheostat", "rheostat_server")
    assert listed(found for found in engine(root) if found.below(*left, *rooms)) == []


def test_vllm_enters_the_engine_through_its_adapters_alone(root: Path) -> None:
    used = [found for found in engine(root) if found.below("vllm")]
    adapters = Path("engine_ext/rheostat_engine/adapters")
    assert listed(found for found in used if not found.path.is_relative_to(adapters)) == []
    assert used != []


LAYERS = pytest.mark.parametrize(
    ("face", "layers"),
    [
        ("engine_ext/rheostat_engine", ENGINE_LAYERS),
        ("server/rheostat_server", SERVER_LAYERS),
    ],
)


@LAYERS
def test_a_module_imports_only_its_own_layer_and_lower_ones(
    root: Path, face: str, layers: Sequence[str]
) -> None:
    upward = [
        f"{module} imports {imported}"
        for module, imports in imports_by_module(root, face).items()
        for imported in imports
        if layer(imported, layers) > layer(module, layers)
    ]
    assert upward == []


@LAYERS
def test_no_modules_import_each_other(root: Path, face: str, layers: Sequence[str]) -> None:
    assert list(TopologicalSorter(imports_by_module(root, face)).static_order())  # or CycleError


@LAYERS
def test_every_module_has_a_layer_and_every_layer_a_module(
    root: Path, face: str, layers: Sequence[str]
) -> None:
    modules = set(imports_by_module(root, face)) - {""}
    assert [one for one in layers if one and not {one} & {*parents(modules)}] == []
    assert [one for one in modules if not {*layers} & {*parents([one])}] == []


def test_the_server_has_few_rooms(root: Path) -> None:
    modules = set(imports_by_module(root, "server/rheostat_server")) - {""}
    assert len({module.partition(".")[0] for module in modules}) <= MOST_ROOMS


def test_plans_and_reports_need_neither_torch_nor_vllm(root: Path) -> None:
    plain = [found for found in engine(root) if set(found.path.parts) & {"plan", "channel"}]
    assert listed(found for found in plain if found.below(*HEAVY)) == []
    assert any(found.below("numpy") for found in plain)


def imports_by_module(root: Path, face: str) -> dict[str, set[str]]:
    """The modules of a package that each of its modules imports, lazily too."""
    package = Path(face).name
    modules = {module_name(path.relative_to(root / face)) for path in (root / face).rglob("*.py")}
    imports: dict[str, set[str]] = {module: set() for module in modules}
    for one in imports_in(root / face, below=root):
        module = module_name(one.path.relative_to(face))
        if one.below(package):
            name = one.name.removeprefix(package).removeprefix(".")
            while name not in modules:
                name = name.rpartition(".")[0]
            imports[module].add(name)
    return imports


def module_name(path: Path) -> str:
    """A module's dotted name within its package; empty for the package's face."""
    return ".".join(path.with_suffix("").parts).removesuffix("__init__").removesuffix(".")


def parents(modules: Iterable[str]) -> Iterator[str]:
    """Each module and the folders that it is in."""
    for module in modules:
        while module:
            yield module
            module = module.rpartition(".")[0]


def layer(module: str, layers: Sequence[str]) -> int:
    """The place of a module among `layers`; the face of a package, if not named, is above all."""
    return next((layers.index(one) for one in parents([module]) if one in layers), len(layers))


def test_the_product_does_not_know_its_benchmarks(root: Path) -> None:
    product = [*client(root), *server(root), *engine(root)]
    assert listed(found for found in product if found.below("rheostat_bench")) == []


def test_the_benchmarks_know_the_face_of_vllm_alone(root: Path) -> None:
    used = imports_in(root / "bench/rheostat_bench", below=root)
    deep = [found for found in used if found.below("vllm") and found.name != "vllm"]
    assert listed(found for found in deep if not found.below(*VLLM_FACE)) == []
    assert deep != []


def test_imports_are_read_in_every_form(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text(
        "import vllm.config\n"
        "from . import near\n"
        "from ..far import thing\n"
        "class A:\n"
        "    async def f(self):\n"
        "        from torch import nn\n"
    )
    found = imports_of(source, "room.inner", below=tmp_path)
    assert [(found.line, found.name, found.lazy) for found in found] == [
        (1, "vllm.config", False),
        (2, "room.inner.near", False),
        (3, "room.far.thing", False),
        (6, "torch.nn", True),
    ]
