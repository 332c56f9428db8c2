"""Checks the runs that the captures of a request would store, before the request runs."""

from collections.abc import Sequence

from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.errors import InvalidValue, NotSupported
from rheostat_server.runs.store import Runs
from rheostat_server.validation import field_path


def check_runs(
    captures: Sequence[ResolvedCapture], runs: Runs | None, *, samples: int, prompt_len: int
) -> None:
    """Checks the runs that a request's captures would store.

    Raises:
        NotSupported: this server does not store runs.
        InvalidValue: two captures name one run, or there are several samples.
        RunExists: a stored run has the same id.
        StoreFull: a run is larger than the memory for runs.
    """
    seen: dict[str, int] = {}
    for index, capture in enumerate(captures):
        if capture.run is None:
            continue
        path = f"captures[{index}].run"
        if runs is None:
            raise NotSupported("runs are not stored here", field=path)
        if samples > 1:
            raise InvalidValue(
                f"a run is of one sample, not of {samples}: send a request for each",
                field="sampling.n",
            )
        path = field_path(path, "run_id")
        other = seen.setdefault(capture.run.id, index)
        if other != index:
            raise InvalidValue(
                f"captures {other} and {index} name one run: give each a run of its own", field=path
            )
        runs.check(capture.run.id, capture.payload_bytes(row_end=prompt_len), path)
