"""``rheostat vectors``: what is stored, and files in and out."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from rheostat._cli import derive
from rheostat._cli._common import CommandError, Subparsers, add_target, layers, points
from rheostat._cli._progress import Phase
from rheostat._engine import Engine, connect
from rheostat._files import FORMATS, load_vector, save_vector
from rheostat._points import show_layers
from rheostat._vectors import Vector, VectorInfo, defaults

_DIGEST = re.compile(r"[0-9a-f]{64}")


def add(commands: Subparsers) -> None:
    """Register the command and its own subcommands."""
    parser = commands.add_parser(
        "vectors", help="list, put, get, import, export, derive and delete vectors"
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    listing = actions.add_parser("list", help="show what is stored")
    listing.add_argument("--prefix", default="", help="only names that begin so")
    listing.set_defaults(run=run_list)

    put = actions.add_parser("put", help="store the array of a .npy file, [width] or [rows, width]")
    put.add_argument("file", metavar="FILE.npy", type=Path)
    put.add_argument("--name", help="default: the file's name without .npy")
    put.add_argument("--points", type=points, help="where it is meant to act, e.g. resid_post")
    put.add_argument("--layers", type=layers, help='e.g. 3, 2-5, "all"')
    put.add_argument("--description", default="")
    put.set_defaults(run=run_put)

    get = actions.add_parser("get", help="save a vector to a .npy file, as float32")
    get.add_argument("name", metavar="NAME|DIGEST")
    get.add_argument("--out", type=Path, metavar="FILE.npy", help="default: NAME.npy")
    get.set_defaults(run=run_get)

    take = actions.add_parser(
        "import", help="store the vector of a .safetensors, .npz or .gguf file, or of an SAE"
    )
    take.add_argument("file", metavar="FILE", type=Path, help="or the folder of an SAE")
    take.add_argument("--name", help="default: the file's own, else the file's name")
    take.add_argument("--feature", type=int, metavar="N", help="row of an SAE's decoder")
    take.add_argument("--description", help="default: the file's own")
    take.set_defaults(run=run_import)

    give = actions.add_parser("export", help="save a vector to a .safetensors, .npz or .gguf file")
    give.add_argument("name", metavar="NAME|DIGEST")
    give.add_argument("file", metavar="FILE", type=Path)
    give.set_defaults(run=run_export)

    for action in (take, give):
        action.add_argument("--format", choices=FORMATS, help="default: as the file's name ends")
        action.add_argument("--points", type=points, help="default: the vector's own")
        action.add_argument("--layers", type=layers, help="default: the vector's own")

    delete = actions.add_parser("delete", help="take a name off its vector")
    delete.add_argument("name", metavar="NAME")
    delete.set_defaults(run=run_delete)

    derive.add(actions)

    for action in (listing, put, get, take, give, delete):
        add_target(action)


def run_list(args: argparse.Namespace) -> int:
    """Print one line per vector."""
    with connect(args.target) as engine:
        for info in engine.vectors.list(args.prefix):
            print(_line(info))
    return 0


def run_put(args: argparse.Namespace) -> int:
    """Store a file's array under a name."""
    try:
        array = np.load(args.file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise CommandError(f"cannot read {args.file}: {error}", 2) from error
    if not isinstance(array, np.ndarray):
        raise CommandError(f"{args.file} holds several arrays; save one as .npy", 2)
    name = args.name or args.file.stem
    with connect(args.target) as engine, Phase(f"storing {name}") as phase:
        vector = engine.vectors.put(
            array,
            name=name,
            points=args.points,
            layers=args.layers,
            description=args.description,
            progress=lambda sent, total: phase.note(f"{sent} of {total} bytes"),
        )
    print(f"{vector.digest}  {name}")
    return 0


def run_get(args: argparse.Namespace) -> int:
    """Save a vector's numbers."""
    with connect(args.target) as engine, Phase(f"fetching {args.name}"):
        vector = _fetch(engine, args.name)
    path = args.out or Path(args.name.rpartition("/")[2] + ".npy")
    try:
        np.save(path, vector.values)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error}") from error
    print(f"{path}  {_shape(vector)}")
    return 0


def run_import(args: argparse.Namespace) -> int:
    """Store a file's vector under a name."""
    vector = load_vector(args.file, feature=args.feature, format=args.format)
    stem = args.file.stem if args.feature is None else f"{args.file.name}/{args.feature}"
    name = args.name or vector.name or stem
    with connect(args.target) as engine, Phase(f"storing {name}") as phase:
        vector = engine.vectors.put(
            vector,
            name=name,
            points=args.points,
            layers=args.layers,
            description=args.description,
            progress=lambda sent, total: phase.note(f"{sent} of {total} bytes"),
        )
    print(f"{vector.digest}  {name}")
    return 0


def run_export(args: argparse.Namespace) -> int:
    """Save a vector with what is known of it."""
    with connect(args.target) as engine, Phase(f"fetching {args.name}"):
        vector = _fetch(engine, args.name)
    at_points, at_layers = defaults(args.points, args.layers)
    vector = replace(vector, points=at_points or vector.points, layers=at_layers or vector.layers)
    save_vector(args.file, vector, format=args.format)
    print(f"{args.file}  {_shape(vector)}")
    return 0


def _fetch(engine: Engine, name: str) -> Vector:
    if _DIGEST.fullmatch(name):
        return engine.vectors.get(digest=name)
    return engine.vectors.get(name)


def run_delete(args: argparse.Namespace) -> int:
    """Take a name off its vector."""
    with connect(args.target) as engine:
        print(f"{engine.vectors.delete(args.name)}  {args.name}")
    return 0


def _shape(vector: Vector) -> str:
    rows, width = vector.shape or (0, 0)
    return f"{vector.dtype} [{rows}, {width}]"


def _line(info: VectorInfo) -> str:
    vector = info.vector
    parts = [(vector.digest or "")[:12], vector.name or "-", _shape(vector)]
    if vector.points and vector.layers:
        parts.append(f"{','.join(vector.points)} {show_layers(vector.layers)}")
    if info.description:
        parts.append(info.description)
    return "  ".join(parts)
