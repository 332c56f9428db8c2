"""Lists the benchmarks, or runs one: `python -m rheostat_bench [NAME [ARGUMENT...]]`."""

import ast
import os
import sys
from pathlib import Path

_STARTED = 'if __name__ == "__main__":'
"""A line that a module of this package has exactly if it is a command."""


def benchmarks() -> dict[str, str]:
    """The commands by name, with the first line of each module's docstring."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        source = path.read_text(encoding="utf-8")
        if _STARTED in source:
            text = ast.get_docstring(ast.parse(source)) or ""
            found[path.stem] = text.partition("\n")[0]
    return found


def main(arguments: list[str]) -> int:
    """Lists the benchmarks, or replaces this process by a benchmark; returns the exit code."""
    commands = benchmarks()
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: rheostat bench NAME [ARGUMENT ...]    NAME --help shows its arguments\n")
        for name, summary in commands.items():
            print(f"  {name:14}{summary}")
        return 0
    name, *rest = arguments
    if name in commands:
        os.execv(sys.executable, [sys.executable, "-m", f"{__package__}.{name}", *rest])
    print(
        f"rheostat bench: there is no benchmark {name!r}; there are {', '.join(commands)}",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
