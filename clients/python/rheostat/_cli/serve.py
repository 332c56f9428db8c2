"""``rheostat serve``: run a server. The only module that needs more than the client."""

from __future__ import annotations

import argparse
from typing import Any

from rheostat._cli._common import Subparsers, need_server

_MIB = 1024 * 1024


def add(commands: Subparsers) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "serve", help="serve a model", description="Serve a model until interrupted."
    )
    parser.add_argument(
        "model", metavar="MODEL", help='a model folder, a hub name, or "demo" for the bundled one'
    )
    # Every flag is named as the field of the server's configuration that it sets, and one that is
    # not given leaves that field's own default.
    text = parser.add_argument_group("where it listens")
    text.add_argument("--host", help="address (default: 127.0.0.1)")
    text.add_argument("--port", type=_port, help="port; 0: any free one (default: 50051)")
    engine = parser.add_argument_group("how the model runs")
    engine.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"))
    engine.add_argument("--max-model-len", type=int, metavar="TOKENS")
    engine.add_argument("--max-num-seqs", type=int, metavar="SAMPLES")
    engine.add_argument("--max-num-batched-tokens", type=int, metavar="TOKENS")
    engine.add_argument("--enforce-eager", action="store_true", default=None)
    engine.add_argument("--gpu-memory-utilization", type=float, metavar="FRACTION")
    engine.add_argument("--tensor-parallel-size", type=int, metavar="DEVICES")
    engine.add_argument("--seed", type=int)
    engine.add_argument(
        "--lora",
        dest="loras",
        action="append",
        type=_lora,
        metavar="NAME=FOLDER",
        help="an adapter that requests may name; may be repeated",
    )
    engine.add_argument("--load-format", help='"dummy" makes random weights')
    memory = parser.add_argument_group("memory, in MiB")
    memory.add_argument("--kv-cache-memory-mib", type=int, metavar="MIB", help="KV cache")
    memory.add_argument("--bank-mib", type=int, metavar="MIB", help="vectors of steering")
    memory.add_argument("--capture-mib", type=int, metavar="MIB", help="ring of captured rows")
    memory.add_argument(
        "--encode-mib",
        type=int,
        metavar="MIB",
        help="on the device, to encode and project captured rows there",
    )
    memory.add_argument(
        "--staging-mib",
        type=int,
        metavar="MIB",
        help="on the host, of each worker, where captured rows wait for the server",
    )
    memory.add_argument(
        "--inline-capture-mib",
        type=int,
        metavar="MIB",
        help="captured rows of one request that may wait to be read",
    )
    memory.add_argument(
        "--subscriptions-mib",
        type=int,
        metavar="MIB",
        help="captured rows that subscribers have not read and acknowledged, all together",
    )
    memory.add_argument("--vector-store-mib", type=int, metavar="MIB", help="stored vectors")
    memory.add_argument("--runs-mib", type=int, metavar="MIB", help="stored runs")
    sinks = parser.add_argument_group("where captured rows can be kept")
    sinks.add_argument(
        "--sink",
        dest="sinks",
        action="append",
        metavar="NAME=PLUGIN:KEY=VALUE,...",
        help='a sink that requests may name, e.g. "disk=filesystem:root=/data"; may be repeated',
    )
    waits = parser.add_argument_group("how long it waits, in seconds")
    waits.add_argument(
        "--resume-window",
        type=float,
        metavar="SECONDS",
        help="for the client of a subscription whose connection broke",
    )
    folders = parser.add_argument_group("folders")
    folders.add_argument(
        "--spool",
        metavar="FOLDER",
        help="where captured rows wait, under the policy spill; one server per folder",
    )
    folders.add_argument(
        "--spool-mib", type=int, metavar="MIB", help="how much may wait there (default: 16384)"
    )
    folders.add_argument(
        "--vector-dir",
        metavar="FOLDER",
        help="keeps stored vectors and their names over restarts; one server per folder",
    )
    parser.set_defaults(run=run)


def _lora(text: str) -> tuple[str, str]:
    name, separator, folder = text.partition("=")
    if not (name and separator and folder):
        raise argparse.ArgumentTypeError(f"an adapter is given as name=folder, not {text!r}")
    return name, folder


def _port(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"a port is a number from 0 to 65535, not {text!r}")
    return int(text)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of the server's configuration that the command line sets."""
    found: dict[str, Any] = {}
    for name, value in vars(args).items():
        if name in ("run", "parser") or value is None:
            continue
        if name in ("loras", "sinks"):
            found[name] = tuple(value)
        elif name.endswith("_mib"):
            found[name.removesuffix("_mib") + "_bytes"] = value * _MIB
        else:
            found[name] = value
    return found


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    need_server("serving")
    from rheostat_server.config import ServerConfig
    from rheostat_server.serve import run as serve

    return serve(ServerConfig(**settings(args)))
