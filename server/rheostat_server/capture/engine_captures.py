"""What the engine has to copy for all captures of a request together.

Invariant: every row is copied once, however many captures ask for it.
"""

from collections.abc import Sequence
from itertools import chain

from rheostat_engine import Capture, RowEncoding, Spans
from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.selectors.spans import united


def engine_captures(captures: Sequence[ResolvedCapture]) -> tuple[Capture, ...]:
    """What the engine has to copy: every row once, however many captures ask for it.

    A row leaves the device in the form that all who ask for it want, or, where they differ, as it
    is; see `row_tensors`.
    """
    if len(captures) == 1 and captures[0].site_forms.alike is not None:
        (capture,) = captures
        reach = capture.selection.reach
        form = _common(set(capture.site_forms.alike or ()))
        return (Capture(capture.indices, reach, form),) if reach else ()
    by_sites: dict[tuple[int, ...], list[int]] = {}
    for number, capture in enumerate(captures):
        by_sites.setdefault(capture.indices, []).append(number)
    asking: dict[int, list[int]] = {}
    for group, sites in enumerate(by_sites):
        for index in sites:
            asking.setdefault(index, []).append(group)
    alike: dict[tuple[int, ...], list[int]] = {}
    for index, askers in asking.items():
        alike.setdefault(tuple(askers), []).append(index)
    members = list(by_sites.values())
    alike_too: dict[tuple[Spans, RowEncoding | None], list[int]] = {}
    for groups, shared in alike.items():
        together = [captures[number] for group in groups for number in members[group]]
        spans = _reach(together)
        if spans:
            for index, form in zip(shared, _forms(together, shared), strict=True):
                alike_too.setdefault((spans, form), []).append(index)
    merged = [Capture(tuple(sorted(sites)), *key) for key, sites in alike_too.items()]
    return tuple(sorted(merged, key=lambda capture: capture.sites))


def _forms(together: Sequence[ResolvedCapture], indices: Sequence[int]) -> list[RowEncoding | None]:
    """The form in which all captures want the rows of each site; None: they differ, or as it is."""
    every = {capture.site_forms.alike for capture in together}
    if None not in every:
        form = _common({form for forms in every for form in forms or ()})
        return [form] * len(indices)
    return [
        _common({form for capture in together for form in capture.forms[index]})
        for index in indices
    ]


def _common(forms: set[RowEncoding | None]) -> RowEncoding | None:
    return next(iter(forms)) if len(forms) == 1 else None


def _reach(captures: Sequence[ResolvedCapture]) -> Spans:
    first, *others = dict.fromkeys(capture.selection.reach for capture in captures)
    return united(chain(first, *others)) if others else first
