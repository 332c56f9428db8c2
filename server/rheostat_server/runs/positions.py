"""Sites and positions of a run that a message names."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rheostat_engine import ModelSites, Site
from rheostat_server import validation
from rheostat_server.errors import InvalidValue, RunIncomplete
from rheostat_server.limits import REPLACED_ROWS
from rheostat_server.runs.store import Run
from rheostat_server.selectors.sites import resolve_sites
from rheostat_wire.v1 import replace_pb2, types_pb2


def named_sites(run: Run, sites: types_pb2.SiteSet | None, model: ModelSites) -> tuple[Site, ...]:
    """The sites of a run that ``sites`` names, by layer, then point; all of them if it is None.

    Raises:
        InvalidArgument: the set is malformed, or names a layer that the model lacks.
        RunIncomplete: the run lacks a site.
    """
    if sites is None:
        return run.sites
    named = resolve_sites(sites, model, "sites").sites
    own = {site.index for site in run.sites}
    for site in named:
        if site.index not in own:
            raise RunIncomplete(
                f"the run {run.id} has no rows of {site.point.value} {site.layer}", field="sites"
            )
    return named


def named_rows(run: Run, positions: replace_pb2.PositionList | None) -> npt.NDArray[np.intp]:
    """The indices of the rows of a run at ``positions``, ascending; all of them if it is None.

    Raises:
        InvalidValue: a position comes twice, or lies before the prompt.
        RunIncomplete: the run lacks a position.
    """
    if positions is None:
        return np.arange(len(run.positions))
    path = "positions.positions"
    absolute = absolute_positions(positions.positions, run, path)
    validation.no_repeats(absolute, path, "positions")
    return np.sort(row_indices(run, absolute, path))


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
