"""All readings of a watch, by request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rheostat._errors import Refused, missing_library
from rheostat._notebook import Picture, Watcher, notebook_output, show_in_notebook
from rheostat._responses.signals import SignalColumn, column_numbers, joined_firings
from rheostat._steering.gates import Probe
from rheostat._watches.events import (
    Readings,
    SignalsDropped,
    WatchedRequestEnded,
    WatchedSignals,
    WatchEvent,
)

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

_MOST_LABELS = 12
"""Lines of a plot beyond which they are not named."""

_OWN_COLUMNS = ("request_id", "sample", "position", "fired")
"""Columns of a data frame that are no readings."""

_Key = tuple[str, int]
_NONE = np.zeros(0, np.int64)


class WatchTable(Mapping[tuple[str, int], Readings]):
    """The readings of a watch, by request and sample: made of its events.

        table = rheostat.WatchTable()
        for event in watch:
            table.add(event)
        table["r1", 0][mood]  # float32 [positions]
        table.ended["r1"].finish_reasons

    It keeps all that was added; `drop` forgets a request. With ``live=True`` a notebook shows the
    readings while they come:

        table = rheostat.WatchTable(live=True)
    """

    def __init__(self, *, live: bool | Callable[[WatchTable], None] = False) -> None:
        """Make a table without readings.

        Args:
            live: whether a notebook shows a plot of the samples that were added last, which is
                drawn anew a few times a second, and once no request runs. Elsewhere nothing is
                shown. Or a function that is called with the table in place of this.
        """
        self.ended: dict[str, WatchedRequestEnded] = {}
        """The ends of requests, by id."""
        self._parts: dict[_Key, list[Readings]] = {}
        update = notebook_output(_picture) if live is True else live
        self._watcher = Watcher(update) if update else None

    def add(self, event: WatchEvent) -> None:
        """Add the readings of an event; events of other kinds change nothing."""
        match event:
            case WatchedSignals():
                for part in event:
                    self._parts.setdefault((part.request_id, part.sample), []).append(part)
            case SignalsDropped():
                values = np.zeros((0, 0), np.float32)
                part = Readings(
                    event.request_id, event.sample, (), _NONE, values, dropped=event.positions
                )
                self._parts.setdefault((part.request_id, part.sample), []).append(part)
            case WatchedRequestEnded():
                self.ended[event.request_id] = event
            case _:
                return
        if self._watcher is None:
            return
        if all(request_id in self.ended for request_id, _ in self._parts):
            self._watcher.show(self)  # because no event may come for long
        else:
            self._watcher.offer(lambda: self)

    def drop(self, request_id: str) -> None:
        """Forget a request, if it is there."""
        self.ended.pop(request_id, None)
        for key in [key for key in self._parts if key[0] == request_id]:
            del self._parts[key]

    def __getitem__(self, key: tuple[str, int]) -> Readings:
        parts = self._parts[key]
        if len(parts) > 1:
            parts[:] = [_joined(parts)]
        return parts[0]

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self._parts)

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._parts)

    def to_dataframe(self) -> pandas.DataFrame:
        """A table with a line for each position of each sample.

        Its columns are "request_id", "sample", "position", one for each column of the readings,
        and "fired": the names of the rules that fired there, separated by spaces. A column has the
        name of its probe, and of its site if the probe reads at several or has one of these names.

        Raises Refused if pandas is not installed.
        """
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise missing_library("a table of readings", error, "tables") from error
        frames = []
        for (request_id, sample), readings in self.items():
            fired = np.full(len(readings), "", object)
            for rule, positions in readings.firings.items():
                for row in np.searchsorted(readings.positions, positions).tolist():
                    fired[row] = f"{fired[row]} {rule}".strip()
            frame = pandas.DataFrame(readings.values, columns=column_names(readings.columns))
            frame.insert(0, "request_id", request_id)
            frame.insert(1, "sample", sample)
            frame.insert(2, "position", readings.positions)
            frame["fired"] = fired
            frames.append(frame)
        if not frames:
            return pandas.DataFrame(columns=[*_OWN_COLUMNS])
        return pandas.concat(frames, ignore_index=True)

    def plot(self, path: str | Path | None = None, probe: Probe | str | None = None) -> Figure:
        """Draw the readings of a probe, or of all: a line for each sample and column.

        Dots are positions at which a rule fired. ``path`` is a file to write; its suffix chooses
        the format. Returns the figure, which a notebook shows. Needs matplotlib.
        """
        figure = self._figure([*self], probe)
        if path is not None:
            figure.savefig(path)
        return show_in_notebook(figure)

    def _figure(self, keys: Sequence[_Key], probe: Probe | str | None = None) -> Figure:
        """The readings of some samples."""
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise Refused("drawing readings needs matplotlib: pip install matplotlib") from error
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.add_subplot()
        for request_id, sample in keys:
            readings = self[request_id, sample]
            names = column_names(readings.columns)
            columns = [*range(len(names))]
            if probe is not None:
                columns = column_numbers(probe, readings.columns)
            for number in columns:
                values = readings.values[:, number]
                label = f"{request_id}/{sample} {names[number]}"
                (line,) = axes.plot(readings.positions, values, label=label)
                fired = np.isin(
                    readings.positions, np.concatenate([_NONE, *readings.firings.values()])
                )
                axes.plot(readings.positions[fired], values[fired], "o", color=line.get_color())
        axes.set_xlabel("position")
        axes.set_ylabel("reading")
        if 0 < len(axes.lines) <= 2 * _MOST_LABELS:
            axes.legend(fontsize="small")
        return figure

    def __repr__(self) -> str:
        return f"WatchTable(samples={len(self)}, ended={len(self.ended)})"


def _picture(table: WatchTable) -> Picture:
    """The samples that came last, so that drawing takes as long for a watch of thousands."""
    return Picture(repr(table), lambda: table._figure([*table][-_MOST_LABELS:]))


def column_names(columns: tuple[SignalColumn, ...]) -> list[str]:
    """The name of each column: its probe, and its site if the name would not be unique."""
    probes = [*_OWN_COLUMNS, *(column.probe for column in columns)]
    return [
        column.probe if probes.count(column.probe) == 1 else f"{column.probe} {column.site}"
        for column in columns
    ]


def _joined(parts: list[Readings]) -> Readings:
    """The readings of a sample, from its parts in order."""
    read = [part for part in parts if len(part)]
    columns = read[0].columns if read else ()
    width = len(columns)
    return Readings(
        parts[0].request_id,
        parts[0].sample,
        columns,
        np.concatenate([part.positions for part in parts]),
        np.concatenate([part.values for part in read] or [np.zeros((0, width), np.float32)]),
        joined_firings([part.firings for part in parts]),
        np.concatenate([part.dropped for part in parts]),
    )
