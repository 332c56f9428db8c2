"""Positions of a run that a message names."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rheostat_server import validation
from rheostat_server.errors import InvalidValue, RunIncomplete
from rheostat_server.limits import REPLACED_ROWS
from rheostat_server.runs.store import Run


def absolute_positions(positions: Sequence[int], run: Run, path: str) -> list[int]:
    """Positions counted from the start; negative ones count from the end of the run's prompt.

    Raises:
        InvalidValue: there are none or too many, or one lies before the prompt.
    """
    if not positions:
        raise InvalidValue("at least one position is required", field=path)
    validation.check_count(len(positions), REPLACED_ROWS, path, "positions")
    length_of_prompt = len(run.prompt_token_ids)
    absolute = [position + length_of_prompt * (position < 0) for position in positions]
    if min(absolute) < 0:
        raise InvalidValue(
            f"position {min(positions)} lies before the run's {length_of_prompt} prompt tokens",
            field=path,
        )
    return absolute


def row_indices(run: Run, positions: Sequence[int], path: str) -> npt.NDArray[np.intp]:
    """The index of each position in a run's rows.

    Raises:
        RunIncomplete: the run lacks a position.
    """
    at = find_rows(run, positions)
    if (at < 0).any():
        missing = positions[int(np.argmax(at < 0))]
        raise RunIncomplete(f"the run {run.id} has no row of position {missing}", field=path)
    return at


def find_rows(run: Run, positions: Sequence[int]) -> npt.NDArray[np.intp]:
    """The index of each position in a run's rows; -1 if the run lacks it."""
    wanted = np.asarray(positions, np.int64)
    at = np.searchsorted(run.positions, wanted)
    inside = at < len(run.positions)
    inside[inside] = run.positions[at[inside]] == wanted[inside]
    return np.where(inside, at, -1)
