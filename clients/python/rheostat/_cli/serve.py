"""``rheostat serve``: run a server. The only module of the client that imports the server."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any, get_args

from rheostat._cli._common import Subparsers, need_server

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
rheostat serve Qwen/Qwen3-8B --policy policy.json

Exit codes: 0 stopped by a signal, 2 a setting is wrong, 3 the port is not available,
4 the model or an adapter cannot be read, 5 vLLM did not start, 6 --vector-dir cannot be
used, 7 --sink, 8 --spool, 9 the engine died while the server ran, 10 a front end did
not start, 11 --policy cannot be enforced""",
    )
    parser.add_argument(
        "model", metavar="MODEL", help='a model folder, a hub name, or "demo" for the bundled one'
    )
    parser.add_argument(
        "--model", nargs="?", action=_ModelFlag, default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )
    parser.set_defaults(run=run)
    settings = _settings()
    if not settings:  # accepts any flags, so that `run` reports the missing server
        parser.add_argument("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    group: Any = parser
    for setting in settings:
        if (flag := setting.metadata.get("flag")) is not None:
            group = parser.add_argument_group(flag.group) if flag.group else group
            _add_flag(group, setting, flag)


class _ModelFlag(argparse.Action):
    """``--model``, as other servers have it: the error shows how to write the model."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,  # the model, or None
        option_string: str | None = None,
    ) -> None:
        parser.error(f"the model comes without a flag: rheostat serve {values or 'MODEL'}")


def _add_flag(group: Any, setting: Field[Any], flag: Any) -> None:
    """Adds the flag of a field. If it is not given, the field keeps its default."""
    name: str = flag.name or setting.name
    default: Any = setting.default
    options: dict[str, Any] = {"metavar": flag.metavar, "type": _type_of(setting)}
    if flag.name:
        options |= {"dest": setting.name, "action": "append"}
    if flag.choices is not None:
        options = {"choices": flag.choices}
    elif isinstance(default, bool):
        options = {"action": "store_true", "default": None}
    elif flag.metavar == "MIB":
        name = name.removesuffix("_bytes") + "_mib"
        default = default and default // _MIB
    elif isinstance(default, float):
        default = f"{default:g}"
    help = f"{flag.help} (default: {flag.default or default})"
    group.add_argument(f"--{name.replace('_', '-')}", help=help.replace("%", "%%"), **options)


def _type_of(setting: Field[Any]) -> Callable[[str], object]:
    """The function that parses the value of a field's flag."""
    special = {"port": _port, "loras": _lora}.get(setting.name)
    kinds = (setting.type, *get_args(setting.type))
    return special or (int if int in kinds else float if float in kinds else str)


def _settings() -> tuple[Field[Any], ...]:
    """The fields of the server's configuration; none if the server is not installed."""
    try:
        from rheostat_server.config import ServerConfig
    except ImportError:
        return ()
    return fields(ServerConfig)


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
        if name in ("run", "parser", "flags") or value is None:
            continue
        if name.endswith("_mib"):
            name, value = name.removesuffix("_mib") + "_bytes", value * _MIB
        values[name] = tuple(value) if isinstance(value, list) else value
    return values


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    need_server("serving")
    from rheostat_server.config import ServerConfig
    from rheostat_server.serve import run as serve

    return serve(ServerConfig(**settings(args)))
