"""What a sweep found: a grid of grades, with its axes, and what batching alone does to a grade."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from rheostat._errors import Refused, invalid, missing_library
from rheostat._fields import counted
from rheostat._notebook import passage, show_in_notebook
from rheostat._points import Point, Site

if TYPE_CHECKING:
    import pandas
    import xarray
    from matplotlib.figure import Figure

Grid = npt.NDArray[np.float64]

_DOTS_PER_INCH = 150
_DARK = 0.6
"""Part of the colour scale from which on the number of a cell is white."""
_NUMBERED = 400
"""Most cells of a picture that are labelled with their numbers."""
_REASONS = 3
"""Most reasons of skipped cells that a text or a picture shows, each in a line."""
_CHARACTERS_PER_INCH = 11
_LINE = 0.17
"""Of a picture's caption: characters of a line, and inches between lines."""
_FORMAT = 1
"""Version of saved results."""


@dataclass(frozen=True)
class Cell:
    """One cell of a grid."""

    index: int
    site: Site
    column: str
    value: float
    standard_error: float


class Noise(NamedTuple):
    """What batching alone does to a grade, by repeated runs of the unchanged prompts."""

    mean: float
    """Grade of the unchanged prompts that cells are run in."""
    std: float
    """Standard deviation."""
    largest: float
    """Largest deviation from the mean."""
    runs: int
    """Number of runs."""


class ResolvedPair(NamedTuple):
    """A pair's tokens."""

    clean_token_ids: tuple[int, ...]
    corrupt_token_ids: tuple[int, ...]
    """Empty if there is no corrupt prompt."""
    unaligned: tuple[range, ...] = ()
    """Positions of the clean prompt without a partner in the corrupt one."""


@dataclass(frozen=True, repr=False, eq=False)
class SweepResult:
    """The grades of a grid of cells: a row for each site, a column for each position or group."""

    grades: tuple[str, ...]
    """Names of the grades, as they were given."""
    sites: tuple[Site, ...]
    """The rows: by point, then layer."""
    columns: tuple[str, ...]
    """The columns: positions, or labels of groups."""
    tokens: tuple[str, ...]
    """The text of the token at each position; empty for groups and without a tokenizer."""
    values: Grid
    """[grades, rows, columns]: means over the pairs; NaN where a cell has no value."""
    standard_errors: Grid
    """[grades, rows, columns]: of these means; 0 for one pair."""
    pair_values: Grid
    """[pairs, grades, rows, columns]; no pairs unless they were asked for."""
    top_token_ids: npt.NDArray[np.int64]
    """[rows, columns]: the most likely token of the first pair; -1 where there is none."""
    below_noise: npt.NDArray[np.bool_]
    """[rows, columns]: whether a cell differs by no more than repeated runs of one prompt."""
    skipped: Mapping[int, str]
    """Why a cell has no value, by its index, `row * columns + column`. A cell that zoom left out
    is not in it."""
    pairs: tuple[ResolvedPair, ...]
    clean: tuple[float, ...]
    """For each grade its metric of the unchanged clean prompts."""
    corrupt: tuple[float, ...]
    """For each grade its metric of the unchanged corrupt prompts; NaN if there are none."""
    noise: tuple[Noise, ...]
    """For each grade."""
    run_ids: tuple[str, ...] = ()
    """Runs that were kept."""
    computed_token_count: int = 0
    """Tokens that the engine computed."""
    seconds: float = 0.0
    """From admission to the last cell."""

    def array(self, grade: str | None = None) -> Grid:
        """The values of a grade, the first by default: float64 [rows, columns], NaN if missing."""
        values: Grid = self.values[self._number(grade)]
        return values

    def base(self, grade: str | None = None) -> float:
        """The grade of the unchanged prompts that cells are run in.

        While the sweep runs it is not known yet: then it is the median of the cells, because most
        of them change nothing. 0 if there is no cell.
        """
        number = self._number(grade)
        mean, values = self.noise[number].mean, self.values[number]
        if not np.isnan(mean):
            return mean
        return 0.0 if np.isnan(values).all() else float(np.nanmedian(values))

    @property
    def significant(self) -> npt.NDArray[np.bool_]:
        """[rows, columns]: cells with values that differ by more than repeated runs do."""
        found: npt.NDArray[np.bool_] = ~self.below_noise & ~np.isnan(self.values[0])
        return found

    @property
    def skip_reasons(self) -> dict[str, int]:
        """How many cells have no value for each reason in `skipped`, the most frequent first."""
        return dict(Counter(self.skipped.values()).most_common())

    def top(self, count: int = 10, grade: str | None = None) -> list[Cell]:
        """The cells that differ most from the unchanged prompts, largest first.

        Cells without a value are not among them; `skip_reasons` counts them.
        """
        number = self._number(grade)
        effects = np.abs(self.values[number] - self.base(grade)).ravel()
        order = np.argsort(-np.nan_to_num(effects, nan=-np.inf), kind="stable")
        return [self._cell(int(i), number) for i in order[:count] if not np.isnan(effects[i])]

    def heatmap(self, path: str | Path | None = None, grade: str | None = None) -> Figure:
        """Draw a grade: columns on the x axis, sites on the y axis. Needs matplotlib.

        ``path`` is a file to write; its suffix chooses the format. Returns the figure, which a
        notebook shows. Grey cells have no value. Those that were skipped are hatched, and the
        caption says why. Cells within the noise have no number.
        """
        try:
            from matplotlib.collections import PatchCollection
            from matplotlib.figure import Figure
            from matplotlib.patches import Rectangle
        except ModuleNotFoundError as error:
            raise Refused("drawing a sweep needs matplotlib: pip install matplotlib") from error
        number = self._number(grade)
        values, base = self.values[number], self.base(grade)
        rows, columns = values.shape
        width = 3.2 + 0.55 * min(columns, 60)
        caption = "replaced position" if self.tokens else "replaced group"
        for line in self._skips():
            wrapped = textwrap.fill(f"hatched: {line}", round(width * _CHARACTERS_PER_INCH))
            caption += f"\n{wrapped}"
        height = 1.9 + 0.3 * min(rows, 80) + _LINE * caption.count("\n")
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
        reach = float(np.nanmax(np.abs(values - base), initial=0.0)) or 1.0
        axes.set_facecolor("lightgrey")
        image = axes.imshow(
            values, origin="lower", aspect="auto", cmap="RdBu", vmin=base - reach, vmax=base + reach
        )
        if values.size <= _NUMBERED:
            for (row, column), value in np.ndenumerate(values):
                if np.isnan(value) or self.below_noise[row, column]:
                    continue
                colour = "white" if abs(value - base) > _DARK * reach else "black"
                text = f"{round(float(value), 2) + 0.0:g}"  # never "-0"
                axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=7)
        if self.skipped:
            corners = (divmod(index, columns) for index in self.skipped)
            cells = [Rectangle((column - 0.5, row - 0.5), 1, 1) for row, column in corners]
            axes.add_collection(
                PatchCollection(
                    cells, facecolor="none", edgecolor="dimgrey", linewidth=0, hatch="////"
                )
            )
        axes.set_xticks(range(columns), self.labels, rotation=45, ha="right")
        axes.set_yticks(range(rows), self.site_labels)
        axes.set_xlabel(caption)
        axes.set_ylabel(f"layer of {self._points[0]}" if len(self._points) == 1 else "site")
        figure.colorbar(image, ax=axes).set_label(self.grades[number])
        if path is not None:
            figure.savefig(path, dpi=_DOTS_PER_INCH)
        return show_in_notebook(figure)

    @property
    def labels(self) -> list[str]:
        """The columns with the texts of their tokens, where these are known."""
        if not self.tokens:
            return list(self.columns)
        return [f"{at} {token!r}" for at, token in zip(self.columns, self.tokens, strict=True)]

    @property
    def site_labels(self) -> list[str]:
        """The rows: their layers, or point and layer if there are several points."""
        if len(self._points) == 1:
            return [str(site.layer) for site in self.sites]
        return [f"{site.point} {site.layer}" for site in self.sites]

    def records(self) -> list[dict[str, object]]:
        """A dict for each cell that has values, as `pandas.DataFrame` takes them."""
        return list(self._records())

    def to_dataframe(self) -> pandas.DataFrame:
        """A table with a line for each cell that has values; the columns are those of `records`.

        `skipped` says why others have none.

        Raises Refused if pandas is not installed.
        """
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise missing_library("a sweep's table", error, "tables") from error
        # The columns are there even if no cell has values.
        errors = [f"{grade} standard error" for grade in self.grades]
        names = ["point", "layer", "column", *self.grades, *errors, "top_token_id", "below_noise"]
        return pandas.DataFrame(self.records(), columns=names)

    def to_xarray(self) -> xarray.Dataset:
        """A dataset with the dimensions grade, point, layer and column, by their names.

        ``value`` and ``standard_error`` have all four, ``top_token_id``, ``below_noise`` and
        ``skipped`` (the reason, or "") the last three, ``clean``, ``corrupt``, ``noise_mean``,
        ``noise_std`` and ``noise_largest`` the first alone. ``pair_value`` has a fifth, pair, and
        is there if pair values were asked for; so is the coordinate ``token`` if `tokens` are.
        Where the sweep has no cell, values are NaN.

        Raises Refused if xarray is not installed.
        """
        try:
            import xarray
        except ModuleNotFoundError as error:
            raise missing_library("a sweep's dataset", error, "tables") from error
        skipped = [self.skipped.get(index, "") for index in range(self.top_token_ids.size)]
        reasons = np.array(skipped, np.str_).reshape(self.top_token_ids.shape)
        grid = ("point", "layer", "column")
        variables = {
            "value": (("grade", *grid), self._by_layer(self.values, np.nan)),
            "standard_error": (("grade", *grid), self._by_layer(self.standard_errors, np.nan)),
            "top_token_id": (grid, self._by_layer(self.top_token_ids, -1)),
            "below_noise": (grid, self._by_layer(self.below_noise, False)),
            "skipped": (grid, self._by_layer(reasons, "")),
            "clean": ("grade", list(self.clean)),
            "corrupt": ("grade", list(self.corrupt)),
            "noise_mean": ("grade", [noise.mean for noise in self.noise]),
            "noise_std": ("grade", [noise.std for noise in self.noise]),
            "noise_largest": ("grade", [noise.largest for noise in self.noise]),
        }
        if len(self.pair_values):
            pairs = self._by_layer(self.pair_values, np.nan)
            variables["pair_value"] = (("pair", "grade", *grid), pairs)
        coordinates = {
            "grade": list(self.grades),
            "point": self._points,
            "layer": self._layers,
            "column": list(self.columns),
        }
        if self.tokens:
            coordinates["token"] = ("column", list(self.tokens))
        about = {"computed_token_count": self.computed_token_count, "seconds": self.seconds}
        return xarray.Dataset(variables, coordinates, about)

    def save(self, path: str | Path) -> None:
        """Write the result to a file that `load` reads: NumPy's .npz, without pickles."""
        about = {
            "format": _FORMAT,
            "grades": self.grades,
            "sites": [[site.point.value, site.layer] for site in self.sites],
            "columns": self.columns,
            "tokens": self.tokens,
            "skipped": list(self.skipped.items()),
            "pairs": [
                [p.clean_token_ids, p.corrupt_token_ids, [[r.start, r.stop] for r in p.unaligned]]
                for p in self.pairs
            ],
            "clean": self.clean,
            "corrupt": self.corrupt,
            "noise": self.noise,
            "run_ids": self.run_ids,
            "computed_token_count": self.computed_token_count,
            "seconds": self.seconds,
        }
        with Path(path).open("wb") as file:
            np.savez_compressed(
                file, about=np.array(json.dumps(about)), **{n: getattr(self, n) for n in _ARRAYS}
            )

    @classmethod
    def load(cls, path: str | Path) -> SweepResult:
        """Read a result that `save` has written.

        Raises InvalidRequest if the file is none.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                about = json.loads(str(file["about"]))
                arrays = {name: file[name] for name in _ARRAYS}
            version = about.pop("format")
        except (KeyError, TypeError, ValueError, EOFError, BadZipFile) as error:
            raise invalid(
                "path", f"{path} is no saved sweep: SweepResult.save writes one"
            ) from error
        if version != _FORMAT:
            raise invalid("path", f"{path} is no saved sweep of this version of rheostat")
        about["sites"] = tuple(Site(Point(point), layer) for point, layer in about["sites"])
        about["skipped"] = dict(about["skipped"])
        about["pairs"] = tuple(
            ResolvedPair(tuple(clean), tuple(corrupt), tuple(range(*edges) for edges in unaligned))
            for clean, corrupt, unaligned in about["pairs"]
        )
        about["noise"] = tuple(Noise(*numbers) for numbers in about["noise"])
        for name in ("grades", "columns", "tokens", "clean", "corrupt", "run_ids"):
            about[name] = tuple(about[name])
        return cls(**about, **arrays)

    @property
    def _points(self) -> list[str]:
        return list(dict.fromkeys(site.point.value for site in self.sites))

    @property
    def _layers(self) -> list[int]:
        return sorted({site.layer for site in self.sites})

    def _by_layer(
        self, rows: npt.NDArray[np.generic], missing: float | str
    ) -> npt.NDArray[np.generic]:
        """From [..., rows, columns] to [..., points, layers, columns].

        A point gets ``missing`` at layers that it has no row for.
        """
        points, layers = self._points, self._layers
        whole = np.full(
            (*rows.shape[:-2], len(points), len(layers), rows.shape[-1]), missing, rows.dtype
        )
        at_point = [points.index(site.point.value) for site in self.sites]
        at_layer = [layers.index(site.layer) for site in self.sites]
        whole[..., at_point, at_layer, :] = rows
        return whole

    def _number(self, grade: str | None) -> int:
        if grade is None:
            return 0
        if grade not in self.grades:
            raise invalid("grade", f"the grades are {', '.join(self.grades)}, not {grade!r}")
        return self.grades.index(grade)

    def _cell(self, index: int, number: int) -> Cell:
        row, column = divmod(index, len(self.columns))
        return Cell(
            index,
            self.sites[row],
            self.labels[column],
            float(self.values[number, row, column]),
            float(self.standard_errors[number, row, column]),
        )

    def _records(self) -> Iterator[dict[str, object]]:
        labels = self.labels
        for index in np.flatnonzero(~np.isnan(self.values[0]).ravel()).tolist():
            row, column = divmod(index, len(labels))
            site = self.sites[row]
            yield {
                "point": site.point.value,
                "layer": site.layer,
                "column": labels[column],
                **{name: self.values[i, row, column] for i, name in enumerate(self.grades)},
                **{
                    f"{name} standard error": self.standard_errors[i, row, column]
                    for i, name in enumerate(self.grades)
                },
                "top_token_id": int(self.top_token_ids[row, column]),
                "below_noise": bool(self.below_noise[row, column]),
            }

    def _skips(self) -> list[str]:
        """A line for each of the most frequent reasons of skipped cells."""
        reasons = list(self.skip_reasons.items())
        lines = [
            f"{counted(count, 'cell')} skipped: {reason}" for reason, count in reasons[:_REASONS]
        ]
        if others := sum(count for _, count in reasons[_REASONS:]):
            lines.append(f"{counted(others, 'cell')} skipped for other reasons, see result.skipped")
        return lines

    def __repr__(self) -> str:
        ran = int((~np.isnan(self.values[0])).sum())
        return (
            f"SweepResult({', '.join(self.grades)}: {ran} of {len(self.sites)} x "
            f"{len(self.columns)} cells, {counted(len(self.pairs), 'pair')}, "
            f"{len(self.skipped)} skipped)"
        )

    def __str__(self) -> str:
        """Skipped cells, the grades of the unchanged prompts, and the largest effects, by lines.

        The effects are those of the first grade, in the order of `top`.
        """
        lines = [repr(self), *self._skips()]
        for name, clean, corrupt in zip(self.grades, self.clean, self.corrupt, strict=True):
            metric = name.removeprefix("recovered ")
            if not np.isnan(clean):
                other = "" if np.isnan(corrupt) else f", of the corrupt ones {corrupt:.3f}"
                lines.append(f"{metric} of the clean prompts {clean:.3f}{other}")
        top = self.top()
        if top:
            lines.append(f"cells that differ most from the unchanged prompts, by {self.grades[0]}:")
        for cell in top:
            line = f"{cell.value:9.3f}  {cell.site} at {cell.column}"
            if len(self.pairs) != 1:
                line += f" (standard error {cell.standard_error:.3f})"
            lines.append(line + ", within the noise" * bool(self.below_noise.flat[cell.index]))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return passage(str(self))


_ARRAYS = ("values", "standard_errors", "pair_values", "top_token_ids", "below_noise")
