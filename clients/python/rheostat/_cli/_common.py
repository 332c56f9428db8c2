"""Shared by several commands: the parser, flags for the server, points, layers, and errors."""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from rheostat._cli._progress import Phase
from rheostat._client.engine import Engine, connect
from rheostat._connection.channel import DEFAULT_TARGET, TARGET_VARIABLE, default_target
from rheostat._connection.readiness import READY_TIMEOUT
from rheostat._fields import did_you_mean
from rheostat._files import replaced_file
from rheostat._points import LayersLike

Subparsers: TypeAlias = "argparse._SubParsersAction[Parser]"
"""The argparse action to which a command adds its parser."""

_LAYERS = re.compile(r"(\d+)(?:-(\d+))?")
_MOST_LAYERS = 1024
_CHOICE = re.compile(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", re.DOTALL)
_NUMBER = re.compile(r"-?\d*\.?\d+")
_NAMED = {"COMMAND": "command", "ACTION": "action"}
_HELP_WIDTH = 90


class Parser(argparse.ArgumentParser):
    """A parser whose help has a description and examples, and whose errors are one line.

    The parsed arguments include the parser of the command, which reports unknown flags. A command
    without an action prints its help.
    """

    def __init__(self, *, description: str = "", example: str = "", **options: Any) -> None:
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter,
            description=textwrap.fill(description, _HELP_WIDTH),
            epilog=f"example:\n{textwrap.indent(example, '  ')}" if example else None,
            allow_abbrev=False,  # a flag of a later version must not make a short form ambiguous
            **options,
        )
        self.set_defaults(parser=self, run=print_help)
        self._words: list[str] = []
        """The arguments that are being parsed."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # argparse's own
        """Keeps the arguments for error messages, then parses as argparse does."""
        self._words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the cause and the command for help, then exit with code 2."""
        self.exit(2, f"{self.prog}: {self._message(message)}\n  see {self.prog} --help\n")

    def unknown(self, words: Sequence[str]) -> NoReturn:
        """Exit with code 2 because of arguments that the command does not have."""
        flag = words[0].partition("=")[0]
        if flag.startswith("-"):
            self.error(f"there is no {flag}{did_you_mean(flag, self._option_string_actions)}")
        self.error(f"too many arguments: {' '.join(words)}{self._joining(words[0])}")

    def _joining(self, word: str) -> str:
        """Advice for a word that probably belongs to the argument before it."""
        words = [word]
        if "--steer" in self._words:  # "--steer joy 0.5 Hello" has one word too many: "Hello"
            behind = self._words.index("--steer") + 2
            words += self._words[behind : behind + 1]
        if "--steer" in self._option_string_actions and any(map(_NUMBER.fullmatch, words)):
            return "; a scale is joined to its vector by a colon, as in --steer joy:0.5"
        if any(action.dest == "prompt" for action in self._actions):
            return "; put a prompt of several words in quotes"
        return ""

    def _one_of(self, group: argparse._MutuallyExclusiveGroup) -> str:
        """As ", and one of --request, --every", if one is required and none is given; else ""."""
        flags = [flag for action in group._group_actions for flag in action.option_strings]
        given = any(word.partition("=")[0] in flags for word in self._words)
        if given or not group.required:
            return ""
        firsts = (action.option_strings[0] for action in group._group_actions)
        return f", and one of {', '.join(firsts)}"

    def _message(self, message: str) -> str:
        """argparse's message in clearer words, with the choices or the value that is missing."""
        match = _CHOICE.fullmatch(message)
        if match is None:
            message = message.removeprefix("argument ")
            flag, _, cause = message.partition(": ")
            if cause == "expected one argument":
                action = self._option_string_actions.get(flag.partition("/")[0])
                form = f", {action.metavar}" if action is not None and action.metavar else ""
                return f"{flag} needs a value{form}; write {flag}=VALUE if it begins with -"
            if flag == "the following arguments are required":
                message += "".join(map(self._one_of, self._mutually_exclusive_groups))
            return message
        what, word, listed = match.groups()
        choices = re.findall(r"[\w-]+", listed)
        hint = did_you_mean(word, choices)
        if what in _NAMED:
            return (
                f"there is no {_NAMED[what]} {word!r}{hint or '; there are ' + ', '.join(choices)}"
            )
        return f"{what} cannot be {word!r}{hint or '; it is one of ' + ', '.join(choices)}"


def print_help(args: argparse.Namespace) -> int:
    """Run a command that was typed without an action."""
    args.parser.print_help()
    return 0


class CommandError(Exception):
    """A command failed. The message is one line; ``code`` is the exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add ``--target`` and ``--wait`` to a command, for `connected`."""
    parser.add_argument(
        "--target",
        default=default_target(),
        metavar="HOST:PORT",
        help=f"address of the server (default: ${TARGET_VARIABLE}, or else {DEFAULT_TARGET})",
    )
    parser.add_argument(
        "--wait",
        nargs="?",
        type=_seconds,
        const=READY_TIMEOUT,
        metavar="SECONDS",
        help="wait until the server has loaded its model, at most SECONDS "
        f"({READY_TIMEOUT:g} if not given); write --wait without SECONDS last",
    )


@contextmanager
def connected(args: argparse.Namespace) -> Iterator[Engine]:
    """A client of the server that ``--target`` names; waits for it if ``--wait`` is given."""
    with connect(args.target) as engine:
        if args.wait is not None:
            with Phase(f"waiting for {args.target}"):
                engine.wait_until_ready(args.wait)
        yield engine


def warn(message: str) -> None:
    """Print a message on stderr."""
    print(f"rheostat: {message}", file=sys.stderr)


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """`replaced_file`, but raises CommandError if the file cannot be written."""
    try:
        with replaced_file(path) as temporary:
            yield temporary
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror or error}") from error


def check_writable(path: Path, force: bool, suffix: str | None = None) -> None:
    """Raise CommandError if the file cannot be replaced, or exists and ``force`` is not given.

    ``suffix`` is the required suffix; None: any.
    """
    if suffix is not None and path.suffix != suffix:
        raise CommandError(f"{path} does not end in {suffix}", 2)
    folder = path.parent
    if not folder.is_dir():
        raise CommandError(f"{path} cannot be written: there is no folder {folder}", 2)
    if path.is_dir():
        raise CommandError(f"{path} cannot be written: it is a folder", 2)
    real_path = Path(os.path.realpath(path))
    needed = [real_path] if real_path.exists() else []
    if not needed or real_path.is_file():
        needed.append(real_path.parent)  # gets the temporary file
    if not all(os.access(one, os.W_OK) for one in needed):
        raise CommandError(f"{path} cannot be written: it is read-only, or its folder is", 2)
    if path.is_file() and not force:
        raise CommandError(f"{path} exists already; --force replaces it", 2)


def add_force(parser: argparse.ArgumentParser) -> None:
    """Add ``--force`` to a command that writes a file, for `check_writable`."""
    parser.add_argument("--force", action="store_true", help="replace an existing file")


def need_server(task: str) -> None:
    """Raise CommandError if the server's packages are not installed. Imports none of them."""
    for name in ("rheostat_server", "vllm"):
        if find_spec(name) is None:
            raise CommandError(
                f"{task} needs the server (no module named {name}): "
                "in a checkout, run make setup (CPU) or pip install '.[cuda]' (GPU)"
            )


def need_matplotlib() -> None:
    """Raise CommandError if matplotlib is not installed, before a long command begins."""
    if find_spec("matplotlib") is None:
        raise CommandError("drawing the heatmap needs matplotlib: pip install matplotlib")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of seconds; write --wait without one last"
        )
    return seconds


def add_label(parser: argparse._ActionsContainer, help: str) -> None:
    """Add ``--label KEY=VALUE``, which may be repeated, to a command or to a group of flags."""
    parser.add_argument("--label", action="append", type=_label, metavar="KEY=VALUE", help=help)


def _label(text: str) -> tuple[str, str]:
    """Parses KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def points(text: str) -> list[str]:
    """Parses points: "resid_post" or "resid_pre,resid_mid"."""
    return [name.strip() for name in text.split(",")]


def layers(text: str) -> LayersLike:
    """Parses layers: "all", "3", "2-5" (5 included) or "0,4,7-9"."""
    if text == "all":
        return "all"
    numbers: list[int] = []
    for first, last in ranges(text, _LAYERS, 'layers are "all", 3, 2-5 or 0,4,7-9'):
        if len(numbers) + last + 1 - first > _MOST_LAYERS:
            raise argparse.ArgumentTypeError(f"these are more than {_MOST_LAYERS} layers")
        numbers.extend(range(first, last + 1))
    return numbers


def ranges(text: str, one: re.Pattern[str], expected: str) -> Iterator[tuple[int, int]]:
    """The first and the last number of each part of a list, such as "3", "2-5" or "0,3-5".

    Args:
        text: the list.
        one: matches a part; its groups are the first number and, if it is there, the last.
        expected: begins the error for a part that is malformed.
    """
    for part in map(str.strip, text.split(",")):
        match = one.fullmatch(part)
        if match is None:
            raise argparse.ArgumentTypeError(f"{expected}, not {text!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if (first < 0) == (last < 0) and last < first:
            raise argparse.ArgumentTypeError(f"{part} counts down: write {last}-{first}")
        yield first, last
