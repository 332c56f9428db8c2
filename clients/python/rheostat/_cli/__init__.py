"""The command ``rheostat``: a module for each subcommand. An error is one line, never a traceback.

``global_steering`` is the command ``global``, and ``derive`` an action of ``vectors``.

Exit codes: 0 done, 1 failed, 2 wrong command line, 129, 130 and 143 ended by SIGHUP, SIGINT and
SIGTERM, 141 stdout was closed.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import rheostat
from rheostat._cli import (
    bench,
    conditions,
    demo,
    generate,
    global_steering,
    info,
    runs,
    serve,
    subscribe,
    sweep,
    vectors,
    watch,
)
from rheostat._cli._common import CommandError, Parser
from rheostat._cli._signals import exiting_on_signals
from rheostat._cli._words import error_text
from rheostat._errors import InvalidRequest, RheostatError

_INTERRUPTED = 130
_BROKEN_PIPE = 141
"""The exit code that a shell reports for a program that SIGPIPE ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; argparse itself exits with 2."""
    _print_warnings()
    try:
        args, unknown = _parser().parse_known_args(arguments)
        if unknown:
            args.parser.unknown(unknown)
        with exiting_on_signals():
            code = int(args.run(args))
        sys.stdout.flush()  # a closed pipe shows here, not when Python exits
        return code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # stdout was closed; Python must not flush it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except InvalidRequest as error:
        return _failed(error_text(error), 2)
    except RheostatError as error:
        return _failed(error_text(error), 1)
    except CommandError as error:
        return _failed(str(error), error.code)


def _parser() -> Parser:
    parser = Parser(
        prog="rheostat",
        description="Steer and read out language models while vLLM serves them.",
        example="""\
rheostat serve demo
rheostat generate "My day was" --max-tokens 16
rheostat vectors derive --positive GLAD.txt --negative SAD.txt --points resid_post --layers 3 \\
    --name joy
rheostat generate "My day was" --max-tokens 16 --steer joy:0.5

The guide is docs/client.md of the project.""",
    )
    parser.add_argument("--version", action="version", version=f"rheostat {rheostat.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    modules = (
        *(serve, generate, sweep, vectors, conditions, runs),
        *(global_steering, subscribe, watch, info, demo, bench),
    )
    for module in modules:
        module.add(commands)
    return parser


def _print_warnings() -> None:
    """Print the client's log on stderr, prefixed by the name of the command."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("rheostat: %(message)s"))
    logging.getLogger("rheostat").handlers = [handler]


def _failed(message: str, code: int) -> int:
    print(f"rheostat: {' '.join(message.split())}", file=sys.stderr)
    return code
