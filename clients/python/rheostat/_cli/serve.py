"""``rheostat serve``: run a server. The only module that needs more than the client."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any, TypeAlias

from rheostat._cli._common import Subparsers, need_server

Group: TypeAlias = "argparse._ArgumentGroup"

_MIB = 1024 * 1024


def add(commands: Subparsers) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "serve",
        help="serve a model",
        description="Serve a model until interrupted.",
        example="""\
rheostat serve demo
rheostat serve Qwen/Qwen3-8B --port 50052 --vector-dir vectors

Exit codes: 0 ended as told, 2 a setting is wrong, 3 the port cannot be listened on,
4 the model or an adapter cannot be read, 5 vLLM did not start, 6 --vector-dir cannot be
used, 7 --sink, 8 --spool, 9 the engine was lost while the server served, 10 a front end did
not start""",
    )
    parser.add_argument(
        "model", metavar="MODEL", help='a model folder, a hub name, or "demo" for the bundled one'
    )
    defaults = _defaults()

    def flag(group: Group, name: str, help: str, *, default: str = "", **options: Any) -> None:
        """Add a flag that sets the configuration's field of its name.

        A flag that is not given leaves the field's default, which `help` ends with. `default` says
        in words what a field of None means.
        """
        field = name.removeprefix("--").replace("-", "_")
        if field.endswith("_mib"):
            field = field.removesuffix("_mib") + "_bytes"
            options = {"type": int, "metavar": "MIB", **options}
        value = defaults.get(options.get("dest", field))
        if isinstance(value, float):
            value = f"{value:g}"
        elif field.endswith("_bytes") and isinstance(value, int):
            value //= _MIB
        if default or defaults:  # without the server package no default is known
            help = f"{help} (default: {default or value})"
        group.add_argument(name, help=help.replace("%", "%%"), **options)

    text = parser.add_argument_group("where it listens")
    flag(text, "--host", "address to listen on", metavar="ADDRESS")
    flag(text, "--port", "port to listen on; 0 takes any free port", type=_port, metavar="PORT")
    flag(
        text,
        "--front-ends",
        "processes that speak gRPC with clients; 0: the server's own process does",
        default="one for every 4 cores, at most 8; 0 on fewer than 8 cores",
        type=int,
        metavar="PROCESSES",
    )
    flag(
        text,
        "--maximum-concurrent-rpcs",
        "calls that run at the same time; more are refused",
        type=int,
        metavar="RPCS",
    )
    flag(
        text,
        "--enable-log-requests",
        "log a line for each request that has ended",
        default="off",
        action="store_true",
    )
    engine = parser.add_argument_group("how the model runs")
    flag(
        engine,
        "--dtype",
        "element type of weights and activations",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    tokens = {"type": int, "metavar": "TOKENS"}
    flag(
        engine,
        "--max-model-len",
        "longest prompt and generation together, in tokens",
        default="what the model allows",
        **tokens,
    )
    flag(
        engine,
        "--max-num-seqs",
        "samples that run at the same time",
        default="vLLM's choice",
        type=int,
        metavar="SAMPLES",
    )
    flag(
        engine,
        "--max-num-batched-tokens",
        "tokens that one step computes",
        default="vLLM's choice",
        **tokens,
    )
    flag(
        engine,
        "--enforce-eager",
        "run the model uncompiled and without CUDA graphs",
        default="off",
        action="store_true",
    )
    flag(
        engine,
        "--gpu-memory-utilization",
        "fraction of the device's memory that vLLM may take",
        default="vLLM's choice",
        type=float,
        metavar="FRACTION",
    )
    flag(
        engine,
        "--tensor-parallel-size",
        "devices that share each layer",
        type=int,
        metavar="DEVICES",
    )
    flag(
        engine,
        "--distributed-executor-backend",
        "how vLLM runs its workers: mp, ray, uni or the import path of an executor class",
        default="vLLM's choice",
        metavar="BACKEND",
    )
    flag(engine, "--seed", "seed for requests that give none", type=int, metavar="SEED")
    flag(
        engine,
        "--lora",
        "an adapter that requests may name; may be repeated",
        default="none",
        dest="loras",
        action="append",
        type=_lora,
        metavar="NAME=FOLDER",
    )
    flag(
        engine, "--load-format", 'how to read weights; "dummy" makes random ones', metavar="FORMAT"
    )
    memory = parser.add_argument_group("memory, in MiB")
    flag(
        memory,
        "--kv-cache-memory-mib",
        "KV cache",
        default="vLLM's choice on a GPU, up to 4096 on a CPU",
    )
    flag(memory, "--bank-mib", "device memory for steering vectors")
    flag(memory, "--capture-mib", "device memory for the ring of captured rows")
    flag(memory, "--encode-mib", "device memory to encode and project captured rows")
    flag(
        memory,
        "--staging-mib",
        "host memory of each worker in which captured rows wait for the server",
    )
    flag(
        memory,
        "--request-buffer-mib",
        "memory in which one request's rows, tokens and log-probabilities wait for slow readers",
    )
    flag(memory, "--buffers-mib", "the same for all requests together")
    flag(
        memory,
        "--subscriptions-mib",
        "captured rows that subscribers have not acknowledged, for all subscriptions together",
    )
    flag(memory, "--vector-store-mib", "memory for stored vectors")
    flag(memory, "--runs-mib", "memory for stored runs")
    sinks = parser.add_argument_group("files for captured rows")
    flag(
        sinks,
        "--sink",
        'a sink that requests may name, e.g. "disk=filesystem:root=/data"; may be repeated',
        default="none",
        dest="sinks",
        action="append",
        metavar="NAME=PLUGIN:KEY=VALUE,...",
    )
    waits = parser.add_argument_group("broken connections")
    flag(
        waits,
        "--resume-window",
        "how long a subscription waits for its client to reconnect",
        type=float,
        metavar="SECONDS",
    )
    folders = parser.add_argument_group("folders")
    flag(
        folders,
        "--spool",
        "folder in which captured rows wait under the policy spill; one server per folder",
        default="none",
        metavar="FOLDER",
    )
    flag(folders, "--spool-mib", "largest size of that folder")
    flag(
        folders,
        "--vector-dir",
        "folder that keeps stored vectors and their names over restarts; one server per folder",
        default="none",
        metavar="FOLDER",
    )
    parser.set_defaults(run=run, enforce_eager=None, enable_log_requests=None)


def _defaults() -> dict[str, object]:
    """Every default of the server's configuration; nothing if the server is not installed."""
    try:
        from rheostat_server.config import ServerConfig
    except ImportError:
        return {}
    return {field.name: field.default for field in fields(ServerConfig)}


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
    values: dict[str, Any] = {}
    for name, value in vars(args).items():
        if name in ("run", "parser") or value is None:
            continue
        if name in ("loras", "sinks"):
            values[name] = tuple(value)
        elif name.endswith("_mib"):
            values[name.removesuffix("_mib") + "_bytes"] = value * _MIB
        else:
            values[name] = value
    return values


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    need_server("serving")
    from rheostat_server.config import ServerConfig
    from rheostat_server.serve import run as serve

    return serve(ServerConfig(**settings(args)))
