"""Capture classes are shared by content, counted and recycled, with the forms that they hold."""

import numpy as np
import numpy.typing as npt

from rheostat_engine.core.classes import CaptureClasses
from rheostat_engine.core.forms import Forms
from rheostat_engine.row_forms import Coding, RowForm


def forms() -> Forms:
    return Forms(width=16, itemsize=4, vectors={}, limit=1 << 20)


def classes_of(sites: int, held: Forms | None = None) -> CaptureClasses:
    """Classes of sites whose numbers are ten times their places."""
    return CaptureClasses(10 * np.arange(sites), held or forms())


def sets(*many: dict[int, int], sites: int) -> npt.NDArray[np.int16]:
    """Sets of sites, each with the form of its rows."""
    found = np.zeros((len(many), sites), np.int16)
    for row, one in zip(found, many, strict=True):
        for site, form in one.items():
            row[site] = 1 + form
    return found


def raw(*sites: int) -> dict[int, int]:
    return dict.fromkeys(sites, 0)


def test_equal_sets_share_a_class_until_nobody_uses_it() -> None:
    classes = classes_of(4)
    ones = classes.acquire(sets(raw(1, 3), raw(), raw(1, 3), sites=4))
    others = classes.acquire(sets(raw(0), raw(1, 3), sites=4))
    assert ones[0] == ones[2] == others[1] != others[0]
    assert ones[1] == 0
    assert classes.table.ranks[ones[0]].tolist() == [-1, 0, -1, 1]
    assert classes.table.ranks[others[0]].tolist() == [0, -1, -1, -1]
    assert classes.table.ranks[0].tolist() == [-1, -1, -1, -1]
    assert classes.sites_of(ones[0], 0) == [10, 30]
    classes.release(ones)
    assert len(classes) == 2
    classes.release(others)
    assert len(classes) == 0


def test_a_class_that_is_given_out_again_has_its_new_sites() -> None:
    classes = classes_of(4)
    (one,) = classes.acquire(sets(raw(1, 3), sites=4))
    assert classes.sites_of(one, 0) == [10, 30]
    classes.release([one])
    assert classes.acquire(sets(raw(0, 2), sites=4)) == [one]
    assert classes.sites_of(one, 0) == [0, 20]


def test_the_table_grows_with_what_is_in_use_and_no_further() -> None:
    classes = classes_of(8)
    for mask in range(1, 200):
        one = raw(*(site for site in range(8) if mask >> site & 1))
        classes.release(classes.acquire(sets(one, sites=8)))
    assert len(classes.table.ranks) == 2


def test_a_class_ranks_sites_within_their_form_and_holds_the_forms_it_names() -> None:
    held = forms()
    eight, top = held.acquire(RowForm(Coding.FULL8)), held.acquire(RowForm(Coding.TOPK8, kept=2))
    classes = classes_of(5, held)
    one = {0: eight, 1: 0, 2: top, 3: eight}
    mixed, other = classes.acquire(sets(one, {**one, 4: 0}, sites=5))
    (plain,) = classes.acquire(sets(raw(0, 1), sites=5))
    assert classes.table.ranks[mixed].tolist() == [0, 0, 0, 1, -1]
    assert classes.table.forms[mixed].tolist() == [eight, 0, top, eight, 0]
    assert classes.sites_of(mixed, eight) == [0, 30]
    counts = np.zeros(1 + max(eight, top), int)
    counts[[0, eight, top]] = 1, 2, 1
    assert classes.table.counts[mixed].tolist() == counts.tolist()
    held.release(eight)
    held.release(top)
    assert len(held) == 2
    classes.release([mixed])
    assert len(held) == 2
    classes.release([other])
    assert len(held) == 0
    assert classes.table.counts.shape[1] == 1
    assert classes.table.counts[plain].tolist() == [2]
