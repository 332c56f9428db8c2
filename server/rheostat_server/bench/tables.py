"""Tables of the benchmarks' files in Markdown, as the documentation holds them.

python -m rheostat_server.bench.tables results
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rheostat_server.bench.results import Comparison, PrefixCache, read


def table(found: Comparison | PrefixCache) -> str:
    """The table of one file."""
    return _prefix_cache(found) if isinstance(found, PrefixCache) else _comparison(found)


def _comparison(found: Comparison) -> str:
    reference, *arms = found.cells
    batches = list(found.stock_ms)
    unit = "ms per token" if found.per_token else "ms of the whole batch"
    rows = [[f"{reference}, {unit}", *(f"{found.stock_ms[batch]:.3f}" for batch in batches)]]
    for arm in (reference, *arms):
        cells = [found.cells[arm][batch] for batch in batches]
        label = f"{reference}'s quartiles" if arm == reference else arm
        rows.append(
            [
                label,
                *(
                    f"{_signed(cell.low)} to {_signed(cell.high)} %"
                    if arm == reference
                    else f"{_signed(cell.median)} % ({_signed(cell.low)} to {_signed(cell.high)})"
                    for cell in cells
                ),
            ]
        )
    return _markdown(["", *(f"bs {batch}" for batch in batches)], rows)


def _prefix_cache(found: PrefixCache) -> str:
    heads = [
        "",
        "hits cold",
        "hits warm",
        "most",
        "TTFT unread",
        "cold",
        "warm",
        "gain",
        "to stock",
    ]
    rows = [
        [
            arm,
            f"{row['hit_rate_cold']:.1%}",
            f"{row['hit_rate_warm']:.1%}",
            f"{found.most_hits[arm]:.1%}",
            *(f"{row[f'ttft_{state}_ms']:.1f} ms" for state in ("unread", "cold", "warm")),
            f"{row['gain_over_unread']:.2f}",
            f"{_signed((row['warm_to_stock'] - 1) * 100)} %",
        ]
        for arm, row in found.figures.items()
    ]
    return _markdown(heads, rows)


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "\N{MINUS SIGN}")


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Prints the tables of a folder's files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    for path in sorted(folder.glob("*.json")):
        found = read(path)
        if found is not None:
            print(f"{path.name}\n\n{table(found)}\n")


if __name__ == "__main__":
    main()
