"""``rheostat vectors``: list stored vectors, and transfer them from and to files."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rheostat._cli import derive
from rheostat._cli._common import (
    CommandError,
    Subparsers,
    add_force,
    add_target,
    check_writable,
    connected,
    layers,
    points,
    warn,
    writing,
)
from rheostat._cli._listing import add_json, print_json, print_table
from rheostat._cli._progress import Phase
from rheostat._cli._rows import check_layers, part
from rheostat._cli._stored import digests_by_name, fetched, short_digest, stored, warn_if_moved
from rheostat._fields import counted
from rheostat._files import FORMATS, load_vector, save_vector
from rheostat._points import show_layers
from rheostat._steering.vectors import Vector, VectorInfo, defaults, inline

_WRITTEN = tuple(format for format in FORMATS if format != "sae")


def add(commands: Subparsers) -> None:
    """Register the command and its own subcommands."""
    parser = commands.add_parser(
        "vectors",
        help="list, put, get, import, export, name, derive and delete vectors",
        description="List, put, get, import, export, name, derive and delete stored vectors.",
        example="""\
rheostat vectors list
rheostat vectors put joy.npy --points resid_post --layers 3""",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION")

    listing = actions.add_parser(
        "list",
        help="show the stored vectors",
        description="Show the stored vectors by name, and how many have no name.",
        example="""\
rheostat vectors list --prefix demo/
rheostat vectors list --all""",
    )
    add_json(listing)
    which = listing.add_mutually_exclusive_group()
    which.add_argument("--prefix", default="", help="only names that begin with this")
    which.add_argument(
        "--all",
        action="store_true",
        help="also vectors without a name, such as those that requests carry; --json always "
        "lists them",
    )
    listing.set_defaults(run=run_list)

    put = actions.add_parser(
        "put",
        help="store the array of a .npy file, [width] or [rows, width]",
        description="Store the array of a .npy file: one row, or one row per layer.",
        example="rheostat vectors put joy.npy --name joy --points resid_post --layers 3",
    )
    put.add_argument("file", metavar="FILE.npy", type=Path)
    put.add_argument("--name", help="default: the file's name without .npy")
    put.add_argument("--points", type=points, help="where it acts by default, e.g. resid_post")
    put.add_argument("--layers", type=layers, help='e.g. 3, 2-5, "all"')
    put.add_argument("--description", default="")
    put.set_defaults(run=run_put)

    get = actions.add_parser(
        "get",
        help="save a vector to a .npy file, as float32",
        description="Save a vector to a .npy file, as float32.",
        example="rheostat vectors get joy joy.npy",
    )
    get.add_argument("name", metavar="NAME|DIGEST", help="a digest needs 8 digits or more")
    get.add_argument(
        "file", type=Path, nargs="?", metavar="FILE.npy", help="default: NAME.npy, here"
    )
    get.set_defaults(run=run_get)

    importing = actions.add_parser(
        "import",
        help="store the vector of a .safetensors, .npz or .gguf file, or of an SAE",
        description="Store the vector of a .safetensors, .npz or .gguf file, or a row of an SAE's "
        "decoder.",
        example="""\
rheostat vectors import joy.gguf --name joy
rheostat vectors import gpt2-res-jb/blocks.8.hook_resid_pre --feature 1234 --name cats""",
    )
    importing.add_argument("file", metavar="FILE", type=Path, help="or the folder of an SAE")
    importing.add_argument("--name", help="default: the file's own, else the file's name")
    importing.add_argument("--feature", type=int, metavar="N", help="row of an SAE's decoder")
    importing.add_argument("--description", help="default: the file's own")
    importing.set_defaults(run=run_import)

    exporting = actions.add_parser(
        "export",
        help="save a vector to a .safetensors, .npz or .gguf file",
        description="Save a vector to a .safetensors, .npz or .gguf file, with its name, "
        "description, points and layers.",
        example="rheostat vectors export joy joy.safetensors",
    )
    exporting.add_argument("name", metavar="NAME|DIGEST", help="a digest needs 8 digits or more")
    exporting.add_argument("file", metavar="FILE", type=Path)
    exporting.set_defaults(run=run_export)

    importing.add_argument(
        "--points", type=points, help="where it acts by default (default: its own)"
    )
    importing.add_argument("--layers", type=layers, help="default: the vector's own")
    exporting.add_argument("--points", type=points, help="some of its points (default: all)")
    exporting.add_argument(
        "--layers", type=layers, help="the rows of some of its layers (default: all)"
    )
    for action, formats in ((importing, FORMATS), (exporting, _WRITTEN)):
        action.add_argument("--format", choices=formats, help="default: that of the file's suffix")
    for action in (get, exporting):
        add_force(action)

    naming = actions.add_parser(
        "name",
        help="name a stored vector",
        description="Name a stored vector. A name that another vector has moves to this one.",
        example="""\
rheostat vectors name joy 3fa2b81c
rheostat vectors name joy joy/v2 --expect joy/v1""",
    )
    naming.add_argument("name", metavar="NAME")
    naming.add_argument("vector", metavar="VECTOR", help="its name, or 8 digits of its digest")
    holder = naming.add_mutually_exclusive_group()
    holder.add_argument(
        "--expect", metavar="VECTOR", help="refuse if the name belongs to another vector now"
    )
    holder.add_argument("--new", action="store_true", help="refuse if the name exists")
    naming.set_defaults(run=run_name)

    delete = actions.add_parser(
        "delete",
        help="delete a name",
        description="Delete a name. Running requests keep the vector that they started with.",
        example="rheostat vectors delete joy",
    )
    delete.add_argument("name", metavar="NAME")
    delete.set_defaults(run=run_delete)

    derive.add(actions)

    for action in (listing, put, get, importing, exporting, naming, delete):
        add_target(action)


def run_list(args: argparse.Namespace) -> int:
    """Print one line per vector."""
    with connected(args) as engine:
        infos = engine.vectors.list(args.prefix)
    if args.json:
        print_json([_fields(info) for info in infos])
        return 0
    listed = [info for info in infos if args.all or info.vector.name]
    unnamed = len(infos) - len(listed)
    if listed or not unnamed:
        print_table(_HEAD, [_cells(info) for info in listed], "vectors")
    if unnamed:
        noun = "further vector" if listed else "vector"
        warn(f"{counted(unnamed, noun)} without a name: --all lists all")
    return 0


def run_put(args: argparse.Namespace) -> int:
    """Store a file's array under a name."""
    vector = inline(_array(args.file), points=args.points, layers=args.layers)
    return _put(args, replace(vector, name=args.file.stem))


def run_get(args: argparse.Namespace) -> int:
    """Save a vector's numbers."""
    path = args.file or Path(args.name.rpartition("/")[2] + ".npy")
    if path.suffix not in ("", ".npy"):
        hint = "; rheostat vectors export writes it" if path.suffix[1:] in FORMATS else ""
        raise CommandError(f"{path} does not end in .npy{hint}", 2)
    check_writable(path, args.force)
    with connected(args) as engine, Phase(f"fetching {args.name}"):
        vector = fetched(engine, args.name)
    # An open file, because np.save would append .npy to the path.
    with writing(path) as temporary, temporary.open("wb") as file:
        np.save(file, vector.values)
    print(f"{path}  {_shape(vector)}")
    return 0


def run_import(args: argparse.Namespace) -> int:
    """Store a file's vector under a name."""
    if args.format is None and args.file.suffix == ".npy":
        raise CommandError(f"{args.file} is one array: store it with rheostat vectors put", 2)
    vector = load_vector(args.file, feature=args.feature, format=args.format)
    stem = args.file.stem if args.feature is None else f"{args.file.name}/{args.feature}"
    points, layers = defaults(args.points, args.layers)
    return _put(
        args,
        replace(
            vector,
            name=vector.name or stem,
            points=points or vector.points,
            layers=layers or vector.layers,
        ),
    )


def run_export(args: argparse.Namespace) -> int:
    """Save a vector, or its rows of some layers."""
    check_writable(args.file, args.force)
    with connected(args) as engine, Phase(f"fetching {args.name}"):
        vector = part(fetched(engine, args.name), *defaults(args.points, args.layers))
    save_vector(args.file, vector, format=args.format)
    print(f"{args.file}  {_shape(vector)}")
    return 0


def _array(path: Path) -> npt.NDArray[np.generic]:
    try:
        array = np.load(path, allow_pickle=False)
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror or error}", 2) from error
    except (ValueError, EOFError) as error:  # numpy's own message speaks of pickles
        raise CommandError(
            f"cannot read {path}: it is not a .npy file{_remedy(path)}", 2
        ) from error
    if not isinstance(array, np.ndarray):
        raise CommandError(f"{path} holds several arrays; save one as .npy", 2)
    return array


def _remedy(path: Path) -> str:
    importable = path.suffix.removeprefix(".") in FORMATS
    return "; rheostat vectors import reads it" if importable else ""


def _put(args: argparse.Namespace, vector: Vector) -> int:
    """Store a vector, after a check that the model has its layers."""
    name: str = args.name or vector.label
    with connected(args) as engine:
        check_layers(vector, engine.model())
        before = digests_by_name(engine, name)
        with Phase(f"storing {name}") as phase:
            vector = engine.vectors.put(
                vector,
                name=name,
                description=args.description,
                progress=lambda sent, total: phase.note(f"{sent} of {total} bytes"),
            )
    warn_if_moved(before, vector)
    print(f"{vector.digest}  {name}")
    return 0


def run_name(args: argparse.Namespace) -> int:
    """Name a stored vector."""
    with connected(args) as engine:
        vector = stored(engine, args.vector)
        expected = "" if args.new else None
        if args.expect is not None:
            expected = stored(engine, args.expect).digest
        previous = engine.vectors.set_name(args.name, vector, expected=expected)
    if previous not in ("", vector.digest):
        warn(f"the name {args.name} moved here from {previous}")
    print(f"{vector.digest}  {args.name}")
    return 0


def run_delete(args: argparse.Namespace) -> int:
    """Delete a name."""
    with connected(args) as engine:
        print(f"deleted the name {args.name} of {engine.vectors.delete(args.name)}")
    return 0


def _shape(vector: Vector) -> str:
    rows, width = vector.shape or (0, 0)
    return f"{vector.dtype} [{rows}, {width}]"


_HEAD = ("DIGEST", "NAME", "TYPE", "SHAPE", "SITES", "DESCRIPTION")


def _cells(info: VectorInfo) -> tuple[str, ...]:
    vector, sites = info.vector, "-"
    if vector.points and vector.layers:
        sites = f"{','.join(vector.points)} {show_layers(vector.layers)}"
    shape = str(list(vector.shape or ()))
    return (
        short_digest(vector), vector.name or "-", vector.dtype or "-",
        shape, sites, info.description,
    )  # fmt: skip


def _fields(info: VectorInfo) -> dict[str, object]:
    """The fields of a vector for JSON; layers are numbers, or "all"."""
    vector = info.vector
    return {
        "digest": vector.digest,
        "name": vector.name,
        "dtype": vector.dtype,
        "shape": vector.shape,
        "points": vector.points,
        "layers": [*vector.layers] if isinstance(vector.layers, range) else vector.layers,
        "description": info.description,
        "request_count": info.request_count,
        "store_time": info.store_time,
    }
