"""The code blocks of the project's pages, and what running them must show.

Every block is fenced and says its language:

* ``python`` and ``sh`` are run, in the order of the page. The Python blocks of a page share their
  names, its shell blocks their functions and folder.
* ``text`` is what the block before it prints. See `differences` for the tolerance.
* Anything else, and whatever cannot run in a test, has a comment in the line above that says why:
  ``<!-- not run: the reason -->``.
"""

import ast
import asyncio
import contextlib
import inspect
import io
import math
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix() for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
)
"""Every page whose blocks are run, README.md first."""

RUN = ("python", "sh")
LANGUAGES = (*RUN, "text", "json", "proto", "toml")

_FENCE = re.compile(r"```(\S*)")
_MARKER = re.compile(r"<!-- not run: (\S.*) -->")
_LIST_ITEM = re.compile(r"\s*([*+-]|\d+\.) ")

_ID = re.compile(r"\b[0-9a-f]{12,64}\b")
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.]*\w)")
_TOLERANCE = 0.05
"""The pages show what users get, in bfloat16; tests serve in float32."""


class Block(NamedTuple):
    """One code block."""

    page: str
    """Path of the page from the project's root."""
    line: int
    """Line of its first line, from 1."""
    language: str
    """What its fence says; empty where it says nothing, "indented" where there is no fence."""
    code: str
    """Its lines."""
    reason: str
    """Why it is not run; empty where it is."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str) -> Iterator[Block]:
    """The blocks of a page, in order."""
    above = reason = language = ""
    begun, lines = 0, list[str]()
    item = blank = False
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.fullmatch(line.strip())
        if language:
            if fence is not None and not fence[1]:
                yield Block(page, begun, language.strip(), "\n".join(lines) + "\n", reason)
                language, above = "", ""
            else:
                lines.append(line)
            continue
        if fence is not None:
            marker = _MARKER.fullmatch(above)
            begun, lines, reason = number + 1, [], marker[1] if marker else ""
            language = fence[1] or " "
        elif line.startswith("    ") and blank and not item:
            yield Block(page, number, "indented", line, "")
        if line.strip():
            above = line.strip()
            item = bool(_LIST_ITEM.match(line)) or (item and line.startswith("  "))
        blank = not line.strip()
    if language:
        yield Block(page, begun, "indented", "a fence without an end", "")


def problems(block: Block) -> list[str]:
    """What is wrong with how a block is written."""
    if block.language == "indented":
        return [f"{block}: code stands in a fence that says its language: {block.code.strip()}"]
    if block.language not in LANGUAGES:
        return [f"{block}: the language is one of {', '.join(LANGUAGES)}, not {block.language!r}"]
    if block.language not in (*RUN, "text") and not block.reason:
        return [f"{block}: {block.language} is not run; say why, above it: <!-- not run: ... -->"]
    return []


def differences(claimed: str, printed: str) -> list[str]:
    """Lines of a claimed output that the printed one does not have, in its order.

    Decimal numbers may differ by 5 % or by 1 in their last digit; ids and digests, 12 hexadecimal
    digits or more, in all of them. A line ``...`` stands for any lines, as does what comes before
    and after the claimed lines; ``...`` at the end of a line stands for its rest.
    """
    left = printed.splitlines()
    missing = []
    for line in claimed.splitlines():
        if line.strip() in ("", "..."):
            continue
        found = next((i for i, said in enumerate(left) if _same(line, said)), None)
        if found is None:
            missing.append(line)
        else:
            left = left[found + 1 :]
    return missing


def _same(claimed: str, said: str) -> bool:
    claimed, said = _ID.sub("<id>", claimed.rstrip()), _ID.sub("<id>", said.rstrip())
    if claimed.endswith("..."):
        said = said[: len(claimed)]
        claimed = claimed.removesuffix("...")
        said = said[: len(claimed)]
    if claimed == said:
        return True
    if _NUMBER.sub("#", claimed).split() != _NUMBER.sub("#", said).split():
        return False
    pairs = zip(_NUMBER.findall(claimed), _NUMBER.findall(said), strict=True)
    return all(_near(one, other) for one, other in pairs)


def _near(claimed: str, said: str) -> bool:
    if "." not in claimed:
        return claimed == said
    last = 10.0 ** -len(claimed.partition("e")[0].partition(".")[2])
    return math.isclose(float(claimed), float(said), rel_tol=_TOLERANCE, abs_tol=1.01 * last)


class Page:
    """Runs the blocks of one page, one after the other."""

    def __init__(
        self, folder: Path, replaced: Mapping[str, str], environment: Mapping[str, str]
    ) -> None:
        """A page that has not begun.

        Args:
            folder: where its commands run, and its files go.
            replaced: what is put in the place of addresses and folders that the pages name.
            environment: of its commands.
        """
        self._folder = folder
        self._replaced = replaced
        self._environment = dict(environment)
        self._names: dict[str, object] = {"__name__": "__main__"}
        self._printed = ""
        self._run = True

    def run(self, block: Block) -> str:
        """Runs a block, or compares it with what the last one printed. Gives what is printed.

        Raises:
            AssertionError: it fails, or prints something else than is claimed.
        """
        if block.language == "text":
            if self._run and not block.reason:
                missing = differences(block.code, self._printed)
                assert not missing, f"{block}: not printed: {missing}, but:\n{self._printed}"
            return self._printed
        self._run = not block.reason
        if block.reason:
            return ""
        code = block.code
        for theirs, ours in self._replaced.items():
            code = code.replace(theirs, ours)
        with contextlib.chdir(self._folder):
            run = self._python if block.language == "python" else self._shell
            self._printed = run(block, code)
        return self._printed

    def close(self) -> None:
        """Closes what the blocks have left open."""
        for value in self._names.values():
            if type(value).__name__ in ("Engine", "Subscription") and hasattr(value, "close"):
                done = value.close()
                assert not inspect.isawaitable(done)

    def _python(self, block: Block, code: str) -> str:
        printed = io.StringIO()
        compiled = compile(
            code, f"<{block}>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
        )
        try:
            with contextlib.redirect_stdout(printed):
                if compiled.co_flags & inspect.CO_COROUTINE:
                    asyncio.run(eval(compiled, self._names))
                else:
                    exec(compiled, self._names)
        except Exception as error:
            raise AssertionError(f"{block}: {type(error).__name__}: {error}") from error
        return printed.getvalue()

    def _shell(self, block: Block, code: str) -> str:
        kept = self._folder / ".functions"
        kept.touch()
        script = f"set -euo pipefail\n. {kept}\n{code}\ndeclare -f > {kept}\n"
        done = subprocess.run(
            ["bash", "-c", script],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{block}: exit code {done.returncode}: {done.stderr}"
        return done.stdout
